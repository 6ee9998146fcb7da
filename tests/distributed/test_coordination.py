"""What ranks do together when all is well, and what is refused before anything is sent."""

import itertools
import json
import os
import threading
import time

import pytest

from holdfast.coordination import SoloCoordinator, TimeoutHandler, TorchCoordinator
from holdfast.errors import (
    CheckpointError,
    ClosedError,
    CoordinationError,
    RankFailedError,
    RankLostError,
    RankTimeoutError,
    StorageError,
)
from holdfast.testing import RankGang

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def gang():
    with RankGang(4) as ranks:
        yield ranks


def coordinator():
    return TorchCoordinator(timeout_s=60)


def exchange(rank):
    with coordinator() as ranks:
        ranks.barrier()
        return (
            ranks.all_gather(bytes([rank]) * rank),
            ranks.broadcast(b"from 2" if rank == 2 else None, source=2),
            ranks.broadcast(b"", source=1),
            ranks.gather(str(rank).encode(), target=3),
            ranks.rank,
            ranks.world_size,
        )


def test_every_rank_gets_what_the_collective_promises(gang):
    for rank, got in enumerate(gang.run(exchange)):
        gathered = [b"0", b"1", b"2", b"3"] if rank == 3 else None
        expected = ([b"", b"\1", b"\2\2", b"\3\3\3"], b"from 2", b"", gathered, rank, 4)
        assert got == expected


def exchange_large(rank):
    with coordinator() as ranks:
        size = 9 * MIB + 1  # more than one message to the store may carry
        word = ranks.broadcast(os.urandom(size) if rank == 1 else None, source=1)
        parts = ranks.all_gather(word[: 5 * MIB + rank])
        whole = ranks.gather(word, target=2)
        assert whole is None or whole == [word] * 4
        return len(word), [len(part) for part in parts], all(word.startswith(p) for p in parts)


def test_values_larger_than_the_store_takes_arrive_whole(gang):
    for size, sizes, same in gang.run(exchange_large):
        assert size == 9 * MIB + 1
        assert sizes == [5 * MIB + rank for rank in range(4)]
        assert same


def beside_training(rank):
    import torch
    import torch.distributed as dist

    failures = []

    def in_background(name):
        try:
            for turn in range(20):
                with ranks.operation(name) as operation:
                    assert operation.all_gather(bytes([turn, rank])) == [
                        bytes([turn, other]) for other in range(4)
                    ]
        except BaseException as error:
            failures.append(repr(error))

    with coordinator() as ranks:
        names = ["save", "prune"] if rank % 2 else ["prune", "save"]  # order differs by rank
        threads = [threading.Thread(target=in_background, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for step in itertools.count():  # until all ranks say so: one that left would be missed
            total = torch.ones(1)
            dist.all_reduce(total)
            busy = torch.tensor(float(any(thread.is_alive() for thread in threads)))
            dist.all_reduce(busy)
            if not busy and step >= 50:
                break
        for thread in threads:
            thread.join()
    return failures, float(total)


def test_background_threads_coordinate_while_training_collectives_run(gang):
    assert gang.run(beside_training) == [([], 4.0)] * 4


def wait_for_two(rank):
    """The moments at which rank 2 came, or at which this rank's waits for it ended."""
    with coordinator() as ranks:
        handler = TimeoutHandler(ranks, default_timeout_s=30)
        handler.barrier()
        moments = []
        for _ in range(0 if rank == 3 else 2):  # rank 3 does not care
            if rank == 2:
                time.sleep(2)
                moments.append(time.monotonic())
            handler.wait_for_rank(2)
            if rank != 2:
                moments.append(time.monotonic())
        handler.barrier()
        return moments


def test_waiting_for_a_rank_ends_when_it_arrives_and_bystanders_need_not_call(gang):
    *others, came, _ = gang.run(wait_for_two)  # the clock is one for all processes
    for first, second in others:
        assert first >= came[0]
        assert second >= came[1]


def wait_too_short(rank):
    import torch.distributed as dist

    with coordinator() as ranks:
        ranks.barrier()
        if rank == 1:
            dist.barrier()  # the others have given up
            ranks.wait_for_rank(1)
        else:
            with pytest.raises(RankTimeoutError) as caught:
                ranks.wait_for_rank(1, 0.3)
            assert caught.value.ranks == (1,)
            assert "rank 1 did not arrive at wait_for_rank 1 within 0.3 s" in str(caught.value)
            dist.barrier()
            ranks.wait_for_rank(1, 30)  # the arrival is not lost by having given up once
        ranks.barrier()


def test_a_wait_that_timed_out_can_be_repeated(gang):
    gang.run(wait_too_short)


def wait_for_the_dead(rank):
    ranks = coordinator()
    ranks.barrier()
    if rank == 1:
        time.sleep(0.3)
        os._exit(7)
    with pytest.raises(RankLostError) as caught:
        ranks.wait_for_rank(1)
    return caught.value.ranks


def test_waiting_for_a_rank_that_dies_ends_at_once():
    with RankGang(4) as own:
        own.start(wait_for_the_dead)
        outcomes = own.outcomes()
        assert outcomes[1].exit_code == 7
        assert [outcomes[rank].value for rank in (0, 2, 3)] == [(1,)] * 3


def many_barriers(rank, count):
    import torch.distributed as dist

    store = dist.group.WORLD.get_group_store()
    with coordinator() as ranks:
        for _ in range(20):
            ranks.barrier()
        before = store.num_keys()
        for _ in range(count):
            ranks.barrier()
        ranks.barrier()
        time.sleep(0.5)  # what the last barrier left is being tidied
        return store.num_keys() - before


def test_ten_thousand_barriers_do_not_grow_the_store():
    with RankGang(2) as own:
        for grown in own.run(many_barriers, 10_000):
            assert grown <= 4


def many_operations(rank, count, fail):
    import torch.distributed as dist

    store = dist.group.WORLD.get_group_store()
    with coordinator() as ranks:
        for turn in range(count):
            try:
                with ranks.operation("save") as operation:
                    operation.gather(b"x" * 100, target=1)
                    if fail and rank == 3 and turn % 2:
                        raise OSError("no")
                    operation.broadcast(bytes(5 * MIB) if rank == 2 else None, source=2)
                    operation.all_gather(b"y")
                    if fail and rank == 3:
                        raise OSError("no")
            except RankFailedError:
                assert fail
        ranks.barrier()
        time.sleep(0.5)  # what the last ones left is being tidied
        kept = [key for key in store.list_keys() if "/operation:" in key]
        return [key for key in kept if "/at/" not in key]  # where each rank was last: one of a name


@pytest.mark.parametrize("fail", [False, True])
def test_operations_leave_nothing_in_the_store_whether_they_fail_or_not(gang, fail):
    assert gang.run(many_operations, 12, fail) == [[]] * 4


def two_coordinators(rank):
    with coordinator() as one, coordinator() as two:
        return one.all_gather(b"1"), two.all_gather(b"2"), one.all_gather(b"3")


def test_two_coordinators_of_a_job_do_not_mix(gang):
    assert gang.run(two_coordinators) == [([b"1"] * 4, [b"2"] * 4, [b"3"] * 4)] * 4


def within_a_subgroup(rank):
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    with TorchCoordinator(mine) as ranks:
        gathered = ranks.all_gather(str(rank).encode())
    with pytest.raises(CoordinationError, match="not a member"):
        TorchCoordinator(groups[1 - rank // 2])
    return ranks.rank, ranks.world_size, gathered


def test_a_process_group_coordinates_by_itself(gang):
    expected = [(0, 2, [b"0", b"1"]), (1, 2, [b"0", b"1"]), (0, 2, [b"2", b"3"])]
    assert gang.run(within_a_subgroup)[:3] == expected


def bad_arguments(rank):
    seen = []

    def refused(call):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        seen.append(str(caught.value))

    with coordinator() as ranks:
        refused(lambda: ranks.barrier(-1))
        refused(lambda: ranks.barrier(0))
        refused(lambda: ranks.barrier(float("nan")))
        refused(lambda: ranks.barrier("5"))
        refused(lambda: ranks.barrier(True))
        refused(lambda: ranks.wait_for_rank(4))
        refused(lambda: ranks.wait_for_rank(-1))
        refused(lambda: ranks.wait_for_rank("1"))
        refused(lambda: ranks.wait_for_rank(1, -2))
        refused(lambda: ranks.broadcast(b"", source=4))
        refused(lambda: ranks.gather(b"", target=9))
        refused(lambda: ranks.gather("text"))
        refused(lambda: ranks.all_gather(None))
        refused(lambda: ranks.operation("").__enter__())
        refused(lambda: ranks.operation("x" * 201).__enter__())
        refused(lambda: TimeoutHandler(ranks, 0))
        refused(lambda: TimeoutHandler(ranks).barrier(-1))
        refused(lambda: TorchCoordinator(liveness_timeout_s=0))
        refused(lambda: TorchCoordinator(liveness_timeout_s=0.1))
        refused(lambda: TorchCoordinator(timeout_s=float("inf")))
        ranks.barrier()  # nothing half-done: all ranks are still in step
    return seen


def test_bad_arguments_are_refused_by_name_and_value_before_anything_is_sent(gang):
    for texts in gang.run(bad_arguments):
        for named in ("-1", "nan", "'5'", "True", "4", "'1'", "-2", "9", "str", "NoneType", "0.1"):
            assert any(named in text for text in texts), named
        assert all(len(text) < 400 for text in texts)


def used_after_close(rank):
    ranks = coordinator()
    ranks.barrier()
    ranks.close()
    ranks.close()
    for call in (
        ranks.barrier,
        lambda: ranks.all_gather(b""),
        lambda: ranks.wait_for_rank(0),
        lambda: ranks.operation("save").__enter__(),
    ):
        with pytest.raises(ClosedError):
            call()


def test_after_close_every_call_says_so(gang):
    gang.run(used_after_close)


def closed_while_waiting(rank):
    import torch.distributed as dist

    ranks = coordinator()
    ranks.barrier()
    if rank == 1:
        closing = threading.Timer(0.3, ranks.close)
        closing.start()
        with pytest.raises(ClosedError):
            ranks.barrier()
        closing.join()
        dist.barrier()
    else:
        dist.barrier()  # rank 1 has left
        with pytest.raises(CheckpointError):
            ranks.barrier()


def test_closing_ends_a_wait_of_another_thread(gang):
    gang.run(closed_while_waiting)


def phases(rank):
    with coordinator() as ranks:
        try:
            with ranks.operation("save") as operation:
                with operation.phase("plan"):
                    operation.barrier()
                with operation.phase("write"):
                    if rank == 1:
                        raise StorageError("no space", path="a/b")
                    operation.barrier()
        except StorageError as error:
            return error.rank, error.phase, error.path, error.__cause__ is None


def test_the_phase_is_the_one_of_the_rank_that_failed(gang):
    assert gang.run(phases) == [(1, "write", "a/b", True)] * 4


def operation_deadline(rank):
    import torch.distributed as dist

    with coordinator() as ranks:
        ranks.barrier()
        with pytest.raises(RankTimeoutError) as caught, ranks.operation("save", 6.0) as operation:
            operation.barrier()
            if rank == 0:
                dist.barrier()  # the others have given up
            # The operation's own limit is the shorter; if it did not count, the gang would give up.
            operation.barrier(300)
        if rank != 0:
            dist.barrier()
        ranks.barrier()
        return caught.value.ranks


def test_an_operations_timeout_bounds_all_of_its_waits(gang):
    assert gang.run(operation_deadline) == [(0,)] * 4


def gathering_in_vain(rank):
    """Rank 0 gives rank 1 up, and is late with that news itself."""
    import torch.distributed as dist

    with coordinator() as ranks:
        ranks.barrier()
        with pytest.raises(RankTimeoutError) as caught, ranks.operation("save") as operation:
            if rank == 1:
                dist.barrier()  # ranks 2 and 3 have given up
            try:
                operation.gather(b"", timeout_s=4)
            finally:
                if rank == 0:
                    dist.barrier()
            operation.broadcast(b"" if rank == 0 else None, timeout_s=6)
        if rank in (2, 3):
            dist.barrier()
        ranks.barrier()
        return caught.value.ranks


def test_who_gathered_in_vain_is_not_blamed_for_it(gang):
    assert gang.run(gathering_in_vain) == [(1,)] * 4


def without_a_process_group():
    with pytest.raises(CoordinationError, match="init_process_group"):
        TorchCoordinator()


def test_without_torch_distributed_the_error_says_what_to_do():
    without_a_process_group()


def restarted_on_the_old_store(rank, life):
    """What torchrun does: new processes, the same store, and the debris of an earlier life."""
    import torch.distributed as dist

    from holdfast.coordination import _torch

    store = dist.group.WORLD.get_group_store()
    if life == "first":
        if rank == 0:  # a hub that no longer answers, from a job whose ranks got unequally far
            dead = {"name": "old", "token": "old", "address": ["127.0.0.1", 9]}
            store.set("holdfast/hub/1", json.dumps(dead).encode())
        return None
    _torch._PROCESS = f"new life of {rank}"
    if rank == 0:
        time.sleep(1)
    with coordinator() as ranks:
        return ranks.all_gather(bytes([rank]))


def test_a_restarted_job_is_not_misled_by_what_the_former_one_left_in_the_store():
    with RankGang(3) as own:
        own.run(restarted_on_the_old_store, "first")
        got = own.run(restarted_on_the_old_store, "second")
        assert got == [[b"\0", b"\1", b"\2"]] * 3


def nested(rank):
    with coordinator() as ranks, ranks.operation("save"):
        try:
            with ranks.operation("save"):
                pass
        except CoordinationError as error:
            return str(error)


def test_an_operation_inside_itself_is_refused_at_once(gang):
    assert all("already under way in this very thread" in text for text in gang.run(nested))


def caught_inside(rank):
    with coordinator() as ranks:
        ranks.barrier()
        try:
            with ranks.operation("save") as operation:
                try:
                    with operation.phase("probe"):
                        raise ValueError("not serious")
                except ValueError:
                    pass
                if rank == 0:
                    raise KeyError("serious")
        except RankFailedError as error:
            return error.phase


def test_an_error_that_was_dealt_with_leaves_no_phase_behind(gang):
    assert gang.run(caught_inside) == ["save"] * 4


def over_a_file(rank, folder):
    import torch.distributed as dist

    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/x", rank=rank, world_size=2)
    with coordinator() as ranks:
        ranks.barrier()
        large = ranks.broadcast(bytes(5 * MIB) if rank == 0 else None)
        with pytest.raises(RankFailedError, match="ZeroDivisionError"), ranks.operation("save"):
            if rank == 1:
                raise ZeroDivisionError
        return len(large), ranks.all_gather(bytes([rank]))


def test_a_job_whose_store_is_a_file_works_too(tmp_path):
    with RankGang(2) as own:
        assert own.run(over_a_file, str(tmp_path)) == [(5 * MIB, [b"\0", b"\1"])] * 2


class TestSolo:
    def test_it_behaves_as_a_world_of_one(self):
        ranks = SoloCoordinator()
        ranks.barrier()
        assert (ranks.rank, ranks.world_size) == (0, 1)
        assert ranks.all_gather(b"a") == [b"a"]
        assert ranks.gather(b"a") == [b"a"]
        assert ranks.broadcast(b"a") == b"a"
        ranks.wait_for_rank(0)
        TimeoutHandler(ranks).barrier(1)

    def test_an_error_gets_rank_and_phase_as_on_many(self):
        ranks = SoloCoordinator()
        with (
            pytest.raises(RankFailedError, match="ZeroDivisionError: no") as caught,
            ranks.operation("save") as operation,
            operation.phase("write"),
        ):
            raise ZeroDivisionError("no")
        assert (caught.value.rank, caught.value.phase) == (0, "write")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_an_error_of_ours_is_raised_itself(self):
        own = StorageError("full", path="x")
        with pytest.raises(StorageError) as caught, SoloCoordinator().operation("save"):
            raise own
        assert caught.value is own
        assert (own.rank, own.phase) == (0, "save")

    def test_bad_arguments_and_use_after_close_are_refused(self):
        ranks = SoloCoordinator()
        for call in (
            lambda: ranks.barrier(-1),
            lambda: ranks.wait_for_rank(1),
            lambda: ranks.wait_for_rank(0, 0),
            lambda: ranks.gather(b"", target=1),
            lambda: ranks.broadcast(None),
            lambda: ranks.operation("").__enter__(),
        ):
            with pytest.raises((ValueError, TypeError)):
                call()
        ranks.close()
        with pytest.raises(ClosedError):
            ranks.barrier()
