"""What reviewers broke once: each a way to hang, to mislead or to diverge, and none any more."""

import ctypes
import dataclasses
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from holdfast.coordination import TorchCoordinator
from holdfast.errors import (
    CheckpointError,
    CoordinationError,
    OperationTimeoutError,
    RankFailedError,
    RankLostError,
    RankTimeoutError,
    StorageError,
)
from holdfast.testing import RankGang

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def gang():
    with RankGang(3) as ranks:
        yield ranks


def coordinator(liveness_timeout_s=30, timeout_s=60):
    return TorchCoordinator(liveness_timeout_s=liveness_timeout_s, timeout_s=timeout_s)


def end_of(call):
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def interrupted_at_the_end(rank):
    import torch.distributed as dist

    def interrupt(number, frame):
        raise SystemExit(15)

    with coordinator() as ranks:
        ranks.barrier()
        signal.signal(signal.SIGALRM, interrupt)

        def save():
            with ranks.operation("save"):
                if rank == 0:
                    dist.barrier()  # rank 1 was interrupted
                if rank == 1:
                    signal.setitimer(signal.ITIMER_REAL, 0.3)

        end = end_of(save)
        if rank != 0:
            dist.barrier()
        ranks.barrier()
        return end


def test_a_rank_interrupted_while_the_others_come_ends_the_operation_for_all(gang):
    ends = gang.run(interrupted_at_the_end)
    assert ends[1] == "SystemExit: 15"
    assert ends[0] == ends[2]
    assert ends[0].startswith("RankFailedError: SystemExit: 15 [rank 1")


def gives_up_its_turn(rank):
    with coordinator() as ranks:
        results, inside, given_up = {}, threading.Event(), threading.Event()

        def operation(name, timeout_s, until=None):
            with ranks.operation("save", timeout_s) as operation:
                inside.set()
                assert until is None or until.wait(20)
                results[name] = operation.all_gather(f"{name} of {rank}".encode())

        if rank == 1:
            busy = threading.Thread(target=operation, args=("first", 30, given_up))
            busy.start()
            assert inside.wait(20)
            second = end_of(lambda: operation("second", 0.5))
            given_up.set()
            busy.join()
        else:
            operation("first", 30)
            second = end_of(lambda: operation("second", 30))
        operation("third", 30)
        return second, results["third"]


def test_a_turn_that_is_given_up_fails_for_all_and_the_next_is_in_step(gang):
    for second, third in gang.run(gives_up_its_turn):
        assert "did not get out of operation 'save' within 0.5 s" in second
        assert third == [b"third of 0", b"third of 1", b"third of 2"]


class ForgotInitError(CheckpointError):
    def __init__(self, reason):
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    reason: str


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def odd_error(kind):
    odd = SyntaxError("bad")
    odd.lineno, odd.offset, odd.text = 1, "x", 5
    return {
        "path": lambda: StorageError("no", path=pathlib.Path("a/b")),
        "no init": lambda: ForgotInitError("x"),
        "frozen": lambda: FrozenError("x"),
        "unprintable": UnprintableError,
        "syntax": lambda: odd,
        "fact": lambda: OperationTimeoutError("no", timeout_s=object()),
        "huge fact": lambda: OperationTimeoutError("no", timeout_s=10**40),
        "nested fact": lambda: RankTimeoutError("no", ranks=((1, 2), 3)),
        "rank": lambda: CheckpointError("no", rank="zero"),
        "huge path": lambda: StorageError("no", path="p" * 9 * MIB),
        "huge message": lambda: ValueError("m" * 30 * MIB),
        "surrogate": lambda: ValueError("\ud800"),
        "stop": lambda: StopIteration(5),
        "group": lambda: ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    }[kind]()


def raises_oddly(rank, kind):
    with coordinator() as ranks:
        ranks.barrier()

        def save():
            with ranks.operation("save") as operation, operation.phase("write"):
                if rank == 1:
                    raise odd_error(kind)
                operation.barrier()

        began = time.monotonic()
        end = end_of(save)
        waited = time.monotonic() - began
        ranks.barrier()
        return end[:300], waited


@pytest.mark.parametrize(
    "kind",
    [
        "path",
        "no init",
        "frozen",
        "unprintable",
        "syntax",
        "fact",
        "huge fact",
        "nested fact",
        "rank",
        "huge path",
        "huge message",
        "surrogate",
        "stop",
        "group",
    ],
)
def test_an_error_of_any_make_is_told_to_the_others(gang, kind):
    ends = gang.run(raises_oddly, kind)
    assert ends[0][0] == ends[2][0] != "passed"
    assert all(waited < 20 for _, waited in ends)


def interrupted_before_its_turn(rank):
    """While another thread of rank 1 is in an operation of that name."""

    def interrupt(number, frame):
        raise SystemExit(15)

    with coordinator(timeout_s=60) as ranks:
        ranks.barrier()

        inside, caught = threading.Event(), threading.Event()

        def take_part(until=None):
            with ranks.operation("save") as operation:
                inside.set()
                assert until is None or until.wait(20)
                operation.barrier()

        if rank == 1:
            signal.signal(signal.SIGALRM, interrupt)
            other = threading.Thread(target=take_part, args=(caught,))
            other.start()
            assert inside.wait(20)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            end = end_of(take_part)
            caught.set()
            other.join()
            waited_s = 0.0
        else:
            take_part()
            began = time.monotonic()
            end = end_of(take_part)
            waited_s = time.monotonic() - began
        return end, waited_s, end_of(take_part)


def test_the_others_do_not_wait_for_a_turn_that_an_interrupt_has_used_up(gang):
    for end, waited_s, afterwards in gang.run(interrupted_before_its_turn):
        assert "SystemExit: 15" in end
        assert waited_s < 20
        assert afterwards == "passed"


def two_threads_wait_for_two(rank):
    """Two threads of rank 0 wait for rank 2, which takes its time, and one has little patience."""
    import torch.distributed as dist

    with coordinator() as ranks:
        ranks.barrier()
        if rank == 2:
            dist.barrier()  # the impatient one has given up
            ranks.wait_for_rank(2)
            ends = []
        else:
            ends = [None, None] if rank == 0 else [None]
            patient = threading.Thread(
                target=lambda: ends.__setitem__(0, end_of(lambda: ranks.wait_for_rank(2, 60)))
            )
            patient.start()
            if rank == 0:
                time.sleep(1)  # the patient one is waiting by now
                ends[1] = end_of(lambda: ranks.wait_for_rank(2, 0.3))
            dist.barrier()
            patient.join()
        ranks.barrier()
        return ends


def test_two_threads_of_a_rank_that_wait_for_one_are_no_matter_to_the_others(gang):
    first, *others = gang.run(two_threads_wait_for_two)
    assert first[0] == "passed"
    assert "another thread of this rank did not get out of wait_for_rank 2" in first[1]
    assert [end for ends in others for end in ends] == ["passed"] * (len(others) - 1)


def holds_the_interpreter_while_waiting(rank):
    with coordinator(liveness_timeout_s=0.5) as ranks:
        ranks.barrier()
        ends = []
        for _ in range(3):
            waiting = threading.Thread(target=lambda: ends.append(end_of(ranks.barrier)))
            waiting.start()
            time.sleep(0.2)
            if rank == 0:
                ctypes.PyDLL(None).usleep(1_600_000)
            waiting.join()
        return ends


def test_a_rank_that_could_not_run_does_not_blame_the_store():
    with RankGang(2) as own:
        own.start(holds_the_interpreter_while_waiting)
        for outcome in own.outcomes():
            assert set(outcome.value) == {"passed"}


def late_for_a_broadcast(rank, size):
    import torch.distributed as dist

    store = dist.group.WORLD.get_group_store()
    with coordinator() as ranks:
        ends = []
        for call in (
            lambda: ranks.broadcast(bytes(size) if rank == 0 else None, timeout_s=4),
            lambda: ranks.gather(bytes(size), target=1, timeout_s=4),
        ):
            ranks.barrier()
            if rank == 0:
                dist.barrier()  # the others have given up
            ends.append(end_of(call))
            if rank != 0:
                dist.barrier()
        ranks.barrier()
        kinds = "-broadcast-", "-gather-"
        for _ in range(100):  # what they left is being tidied
            keys = [key for key in store.list_keys() if any(kind in key for kind in kinds)]
            payloads = [key for key in keys if not key.endswith("/given-up")]  # who did not come
            if not payloads:
                break
            time.sleep(0.1)
        return *ends, payloads


def test_who_comes_late_to_give_learns_of_it_and_leaves_no_payload_behind(gang):
    for broadcast, _, payloads in gang.run(late_for_a_broadcast, 9 * MIB):
        assert "rank 0 did not arrive at broadcast within 4 s" in broadcast
        assert payloads == []
    gathers = [gather for _, gather, _ in gang.run(late_for_a_broadcast, 10)]
    assert "did not arrive at gather" in gathers[0]  # the late one
    assert "did not arrive at gather" in gathers[1]  # the one that waited
    assert gathers[2] == "passed"  # it had given its part and gone on


def stopped_host(rank, host):
    with coordinator(liveness_timeout_s=20) as ranks:
        ranks.barrier()
        if rank == 0:
            signal.pause()
        os.kill(host, signal.SIGSTOP)
        stat = pathlib.Path(f"/proc/{host}/stat")
        while stat.read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.01)
        began = time.monotonic()
        end = end_of(lambda: ranks.barrier(1))
        return end, time.monotonic() - began


def test_a_timeout_is_kept_although_the_store_does_not_answer():
    with RankGang(2) as own:
        own.start(stopped_host, own.pids[0])
        (outcome,) = own.outcomes(ranks=[1])
        end, elapsed_s = outcome.value
        assert "did not end within 1 s: the store has not answered" in end
        assert elapsed_s < 15


def forks(rank):
    with coordinator() as ranks:
        ranks.barrier()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, end_of(ranks.barrier).encode())
            ranks.close()
            os._exit(0)
        os.waitpid(child, 0)
        ranks.barrier()
        return os.read(read, 1000).decode()


def test_a_forked_child_cannot_speak_for_its_rank(gang):
    assert all("was made in another process" in text for text in gang.run(forks))


def different_roots(rank):
    with coordinator() as ranks:
        return end_of(lambda: ranks.gather(b"x", target=rank % 2, timeout_s=1))


def test_ranks_that_mean_different_roots_do_not_get_each_others_data(gang):
    ends = gang.run(different_roots)
    assert ends[0] != "passed"
    assert ends[1] != "passed"  # rank 2 had given its part and gone on


def mismatched(rank):
    with coordinator() as ranks:
        ranks.barrier()
        with pytest.raises(CheckpointError) as caught, ranks.operation("save", 6) as operation:
            if rank == 1:
                operation.all_gather(b"x")
            else:
                operation.barrier()
        ranks.barrier()
        return str(caught.value)


def test_a_rank_that_waits_elsewhere_is_said_to_be_there(gang):
    texts = gang.run(mismatched)
    assert len(set(texts)) == 1
    assert "was last in all_gather 1 of operation 'save'" in texts[0] or (
        "was last in barrier 1 of operation 'save'" in texts[0]
    )


def leaves_first(rank):
    if rank:
        time.sleep(0.5)
    with coordinator() as ranks:
        return ranks.broadcast(b"config" if rank == 0 else None)


def test_rank_0_may_be_done_before_the_others_have_begun(gang):
    assert gang.run(leaves_first) == [b"config"] * 3


def made_again(rank):
    import torch.distributed as dist

    if rank == 1:
        with pytest.raises(RankTimeoutError):
            TorchCoordinator(timeout_s=0.3)
    dist.barrier()  # else rank 0 might be in time
    with coordinator() as ranks:
        return ranks.all_gather(bytes([rank]))


def test_a_coordinator_that_could_not_be_made_can_be_made_again(gang):
    assert gang.run(made_again) == [[b"\0", b"\1", b"\2"]] * 3


def dropped(rank):
    gc.disable()
    try:
        for _ in range(3):
            ranks = coordinator()
            ranks.barrier()
            del ranks
        for _ in range(100):
            left = [t.name for t in threading.enumerate() if t.name.startswith("holdfast")]
            if not left:
                break
            time.sleep(0.1)
        return left
    finally:
        gc.enable()


def test_a_coordinator_that_is_forgotten_ends_its_threads_and_helper_without_gc(gang):
    assert gang.run(dropped) == [[]] * 3


def closes_while_others_wait(rank):
    import torch.distributed as dist

    ranks = coordinator()
    ranks.barrier()
    closing = threading.Timer(0.3, ranks.close)
    if rank == 1:
        closing.start()
    if rank == 2:
        dist.barrier()  # rank 1 has left
    end = end_of(ranks.barrier)
    if rank == 1:
        closing.join()
    if rank != 2:
        dist.barrier()
    ranks.close()
    return end


def test_the_others_hear_that_a_rank_left_not_that_they_were_closed(gang):
    ends = gang.run(closes_while_others_wait)
    assert ends[1].startswith("ClosedError")
    assert ends[0].startswith("RankLostError: rank 1 has left")
    assert ends[2].startswith("RankLostError: rank 1 has left")


def over(rank):
    with coordinator() as ranks:
        with ranks.operation("save") as operation:
            operation.barrier()
        return end_of(operation.barrier)


def test_an_operation_is_over_when_its_block_is(gang):
    assert all(text.startswith("ClosedError: this operation is over") for text in gang.run(over))


JOB = """
import torch.distributed as dist
from holdfast.coordination import TorchCoordinator

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
coordinator = TorchCoordinator()
for _ in range(5):
    with coordinator.operation("save") as operation:
        assert operation.all_gather(b"x" * 100_000) == [b"x" * 100_000]
"""


@pytest.mark.parametrize("ending", ["", "coordinator.close()"])
def test_a_job_of_one_rank_ends_in_good_order(ending):
    done = subprocess.run(
        [sys.executable, "-c", JOB + ending],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def aborting(rank):
    with coordinator() as ranks, pytest.raises((RankFailedError, CoordinationError, RankLostError)):
        ranks.operation("\ud800").__enter__()


def test_a_name_that_cannot_be_written_is_refused(gang):
    gang.start(aborting)
    for outcome in gang.outcomes():
        assert outcome.error is not None
        assert "name must be a text" in outcome.error.message
