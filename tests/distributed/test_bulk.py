"""Bytes from rank to rank: they arrive, and a rank that is lost or fails hangs nobody."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from holdfast.coordination import SoloCoordinator, TorchCoordinator
from holdfast.distributed._bulk import PIECE_BYTES, WINDOW_BYTES, Bulk
from holdfast.distributed._watch import Watch
from holdfast.errors import ClosedError, CoordinationError, RankLostError, StorageError
from holdfast.testing import RankGang

LIVENESS_S = 5.0  # where a rank is stopped; a busy machine keeps one waiting for seconds, too
CALM_S = 30.0  # where none is
NOTICED_S = 10.0  # a lost rank is noticed, not waited for; generous for a busy machine
FOREVER_S = 60.0
MB = 1_000_000
SIZES = (0, 1, 3, 1000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 40 * MB)


@pytest.fixture(scope="module")
def gang():
    with RankGang(4) as ranks:
        yield ranks


def coordinator(liveness_s=CALM_S):
    return TorchCoordinator(liveness_timeout_s=liveness_s, timeout_s=FOREVER_S)


def content(source, target, size):
    start = 31 * source + 7 * target + size
    pattern = (torch.arange(251) + start).remainder(251).to(torch.uint8)
    return pattern.repeat(size // 251 + 1)[:size]


def freely():
    """A ``proceed`` for a caller that nobody stops."""


def all_to_all(course, rank, world_size, sizes):
    for size in sizes:
        for source in range(world_size):
            for target in range(world_size):
                if source == rank != target:
                    course.send(target, content(source, target, size))
                elif target == rank != source:
                    memory = torch.full((size,), 255, dtype=torch.uint8)
                    course.receive(source, memory)
                    assert torch.equal(memory, content(source, target, size))
    course.flush()


def exchange(rank, sizes):
    with coordinator() as ranks:
        bulk = Bulk(ranks)
        bulk.open(FOREVER_S)
        for own in (sizes, sizes[:4]):  # the second course goes on where the first one ended
            bulk.open(FOREVER_S)

            def work(proceed, own=own):
                all_to_all(bulk.course(proceed), rank, 4, own)

            with ranks.operation("save") as operation:
                Watch(operation).run(work)
        bulk.close()
        return "done"


def test_every_rank_sends_to_every_other(gang):
    assert gang.run(exchange, SIZES) == ["done"] * 4


def ring(rank):
    """Everybody sends more than the window to the next one before it receives."""
    with coordinator() as ranks:
        bulk = Bulk(ranks)
        bulk.open(FOREVER_S)
        course = bulk.course(freely)
        received = 0
        # One order for all: transfer number n goes from rank n to its neighbour.
        for turn in range(2 * WINDOW_BYTES // PIECE_BYTES):
            for source in range(4):
                target = (source + 1) % 4
                memory = torch.full((PIECE_BYTES,), (turn + source) % 251, dtype=torch.uint8)
                if rank == source:
                    course.send(target, memory)
                elif rank == target:
                    got = torch.zeros_like(memory)
                    course.receive(source, got)
                    assert torch.equal(got, memory)
                    received += got.numel()
        course.flush()
        bulk.close()
        return received


def test_more_than_the_window_goes_round_a_ring(gang):
    assert gang.run(ring) == [2 * WINDOW_BYTES] * 4


def send_without_receiver(rank):
    """Sends up to the window do not wait for the other end; what exceeds it does."""
    with coordinator() as ranks:
        bulk = Bulk(ranks)
        bulk.open(FOREVER_S)
        course = bulk.course(freely)
        pieces = WINDOW_BYTES // PIECE_BYTES
        memory = torch.arange(PIECE_BYTES * (pieces + 1)).to(torch.uint8).view(pieces + 1, -1)
        beyond = threading.Event()
        if rank == 0:

            def send_one_more():
                course.send(1, memory[pieces])
                beyond.set()

            for piece in memory[:pieces]:
                course.send(1, piece)
            thread = threading.Thread(target=send_one_more)
            thread.start()
            assert not beyond.wait(0.3)
        ranks.barrier()
        if rank == 1:
            got = torch.zeros_like(memory[0])
            for piece in memory:
                course.receive(0, got)
                assert torch.equal(got, piece)
        if rank == 0:
            thread.join(FOREVER_S)
            course.flush()
        bulk.close()
        return "done"


def test_sends_wait_for_the_other_end_only_beyond_the_window(gang):
    assert gang.run(send_without_receiver) == ["done"] * 4


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self():
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_ours():
    raise StorageError("the disk is full", path="step_7/shard-1")


def fail_midway(rank, victim, fault, *, again):
    def work(proceed):
        course = bulk.course(proceed)
        all_to_all(course, rank, 4, (1000, PIECE_BYTES))
        if rank == victim:
            fault()
        while True:
            all_to_all(course, rank, 4, (PIECE_BYTES + 1,))

    with coordinator(LIVENESS_S) as ranks:
        bulk = Bulk(ranks)
        bulk.open(FOREVER_S)
        began = time.monotonic()
        left_running = []
        try:
            with ranks.operation("save") as operation, operation.phase("send"):
                watch = Watch(operation, grace_s=FOREVER_S)
                try:
                    watch.run(work)
                finally:
                    left_running.append(watch.left_running)
        except (RankLostError, StorageError) as failure:
            noticed_s = time.monotonic() - began
            began = time.monotonic()
            bulk.discard()
            bulk.discard()
            if again:
                bulk.open(FOREVER_S)
                all_to_all(bulk.course(freely), rank, 4, (1000, PIECE_BYTES + 1))
            bulk.close()
            ended_s = time.monotonic() - began
            told = type(failure).__name__, failure.rank, failure.phase
            return told, left_running, noticed_s, ended_s


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("fault", "after_s"), [(kill_self, 0), (stop_self, LIVENESS_S)])
def test_a_rank_lost_midway_is_named_by_all_others_and_blocks_nobody(victim, fault, after_s):
    with RankGang(4) as gang:
        gang.start(fail_midway, victim, fault, again=False)
        for outcome in gang.outcomes(FOREVER_S, ranks=[r for r in range(4) if r != victim]):
            assert outcome.error is None
            told, left_running, noticed_s, ended_s = outcome.value
            assert told == ("RankLostError", victim, "send")
            assert left_running == [False]
            assert noticed_s < after_s + NOTICED_S
            assert ended_s < NOTICED_S


@pytest.mark.parametrize("victim", [0, 3])
def test_after_a_rank_raised_midway_all_ranks_connect_again(gang, victim):
    for told, left_running, noticed_s, ended_s in gang.run(
        fail_midway, victim, raise_ours, again=True
    ):
        assert told == ("StorageError", victim, "send")
        assert left_running == [False]
        assert noticed_s < NOTICED_S
        assert ended_s < FOREVER_S


def open_with_one_missing(rank, fault):
    with coordinator() as ranks:
        bulk = Bulk(ranks)
        with ranks.operation("save") as operation, operation.phase("connect"):
            operation.barrier()
            if rank == 2:
                fault()
            bulk.open(FOREVER_S, operation=operation)


@pytest.mark.parametrize(
    ("fault", "kind"), [(raise_ours, "StorageError"), (kill_self, "RankLostError")]
)
def test_a_rank_that_does_not_come_to_open_is_noticed(fault, kind):
    with RankGang(4) as gang:
        gang.start(open_with_one_missing, fault)
        for outcome in gang.outcomes(FOREVER_S, ranks=[0, 1, 3]):
            assert (outcome.error.error, outcome.error.rank) == (kind, 2)
            assert outcome.elapsed_s < NOTICED_S


def open_when_one_has_lost_it(rank):
    """One rank has thrown its connections away, the others have not: all make new ones."""
    with coordinator() as ranks:
        bulk = Bulk(ranks)
        bulk.open(FOREVER_S)
        all_to_all(bulk.course(freely), rank, 4, (10,))
        if rank == 1:
            bulk.discard()
        bulk.open(FOREVER_S)
        all_to_all(bulk.course(freely), rank, 4, (10,))
        bulk.close()
        with pytest.raises(ClosedError):
            bulk.open(FOREVER_S)
        return "done"


def test_opening_mends_what_only_some_ranks_have(gang):
    assert gang.run(open_when_one_has_lost_it) == ["done"] * 4


def in_a_subgroup(rank):
    group = dist.new_group([3, 1])
    if rank not in (1, 3):
        return None
    with TorchCoordinator(group, liveness_timeout_s=CALM_S) as ranks:
        bulk = Bulk(ranks)
        bulk.open(FOREVER_S)
        memory = torch.full((10,), rank, dtype=torch.uint8)
        if ranks.rank == 0:
            course = bulk.course(freely)
            course.send(1, memory)
            course.flush()
        else:
            bulk.course(freely).receive(0, memory)
        bulk.close()
        return memory.tolist()


def test_ranks_are_the_coordinators(gang):
    assert gang.run(in_a_subgroup) == [None, [1] * 10, None, [1] * 10]


def refusals(rank):
    with coordinator() as ranks:
        bulk = Bulk(ranks)
        with pytest.raises(CoordinationError, match="open"):
            bulk.course(freely)
        bulk.open(FOREVER_S)
        course = bulk.course(freely)
        good = torch.zeros(4, dtype=torch.uint8)
        other = (rank + 1) % 4
        with pytest.raises(ValueError, match="another rank"):
            course.send(rank, good)
        with pytest.raises(ValueError, match="target"):
            course.send(4, good)
        for bad in (torch.zeros(4), torch.zeros(4, 4, dtype=torch.uint8).T):
            with pytest.raises(ValueError, match="contiguous uint8 on the CPU"):
                course.receive(other, bad)
        all_to_all(course, rank, 4, (100,))  # a refusal breaks nothing
        bulk.discard()
        with pytest.raises(CoordinationError, match="open"):
            course.receive(other, good)
        return "done"


def test_what_cannot_be_sent_is_refused_before_anything_is(gang):
    assert gang.run(refusals) == ["done"] * 4


def differing_sizes(rank, received):
    with coordinator() as ranks:
        bulk = Bulk(ranks)
        bulk.open(FOREVER_S)
        bulk._links.timeout_s = 1.0  # of a piece alone: a busy machine may take longer to connect
        memory = torch.zeros(received, dtype=torch.uint8)
        with ranks.operation("save") as operation:

            def work(proceed):
                course = bulk.course(proceed)
                if rank == 0:
                    course.send(1, torch.ones(1000, dtype=torch.uint8))
                    course.flush()
                if rank == 1:
                    course.receive(0, memory)

            Watch(operation).run(work)


@pytest.mark.parametrize("received", [10, 5000])
def test_ends_that_differ_in_size_fail_and_nothing_arrives(gang, received):
    gang.start(differing_sizes, received)
    for outcome in gang.outcomes(FOREVER_S):
        assert outcome.error.error == "CoordinationError"
        # Whichever end gives up first breaks the connection under the other.
        assert re.search(r"transfer between rank (0|1) and rank (0|1) broke", outcome.error.message)


class Others:
    """A coordinator of several ranks that are not torch's."""

    rank = 0
    world_size = 2


def test_without_torch_distributed_only_one_rank_will_do():
    with SoloCoordinator() as alone:
        Bulk(alone).open(FOREVER_S)
    with pytest.raises(CoordinationError, match=r"needs torch\.distributed"):
        Bulk(Others()).open(FOREVER_S)


EXITING = """
import os, signal, sys, torch
import torch.distributed as dist
from holdfast.coordination import TorchCoordinator
from holdfast.distributed._bulk import Bulk
from holdfast.distributed._watch import Watch
from holdfast.errors import RankLostError

rank, port, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
ranks = TorchCoordinator(liveness_timeout_s=5)
bulk = Bulk(ranks)
bulk.open(60)

def work(proceed):
    if rank == 1:
        os.kill(os.getpid(), getattr(signal, fault))
    course = bulk.course(proceed)
    course.send(1, torch.zeros(10_000_000, dtype=torch.uint8))
    course.receive(2 - rank, torch.zeros(10_000_000, dtype=torch.uint8))

try:
    with ranks.operation("save") as operation:
        Watch(operation).run(work)
except RankLostError as error:
    print(error.ranks, flush=True)
    sys.exit(3)  # neither discard nor close: as a program does that ends by its error
"""


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_survivors_exit_in_good_order_with_transfers_pending(fault):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", EXITING, str(rank), str(store.port), fault],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            out, err = jobs[rank].communicate(timeout=FOREVER_S)
            assert (jobs[rank].returncode, out.strip()) == (3, "(1,)"), err
            assert "terminate called" not in err
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
