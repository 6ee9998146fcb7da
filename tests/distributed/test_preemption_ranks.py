"""Four real ranks are told to end, one or all, by signals or otherwise: all stop at the same step,
with the same time left, and save once."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.coordination import SoloCoordinator, TorchCoordinator
from holdfast.distributed import (
    DistributedCheckpoint,
    LoadOptions,
    Preemption,
    SaveOptions,
    _preemption,
)
from holdfast.errors import RankLostError
from holdfast.storage import LocalStorage
from holdfast.storage._wrapped import WrappedStorage
from holdfast.testing import FakeClock, RankGang

RANKS = 4
STEPS = 12
LIVENESS_S = 30.0  # no rank is stopped
TIMEOUT_S = 60.0
NOTICED_S = 10.0  # see test_rank_faults.py


@pytest.fixture(scope="module")
def gang():
    with RankGang(RANKS) as ranks:
        yield ranks


@contextlib.contextmanager
def checkpointer(storage):
    with (
        TorchCoordinator(liveness_timeout_s=LIVENESS_S, timeout_s=TIMEOUT_S) as ranks,
        DistributedCheckpoint(coordinator=ranks, storage=storage) as ckpt,
    ):
        yield ckpt


def new_model():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def train_step(model, step):
    with torch.no_grad():
        model.weight.fill_(step)
        dist.all_reduce(model.bias)  # a training that its ranks go through together


def tell(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def train(rank, folder, *, signal_at=None, also_at=None, every=1):
    """Train until told to end; which rank is told at which step, say the arguments."""
    step = 0

    def also():
        return (also_at or {}).get(rank) == step

    model = new_model()
    with checkpointer(folder) as ckpt, Preemption(ckpt, also=also, every=every) as preemption:
        for step in range(STEPS):
            train_step(model, step)
            if (signal_at or {}).get(rank) == step:
                tell()
            if preemption.requested():
                prefix = preemption.save(model, options=SaveOptions(step=step))
                return step, prefix, 0 < preemption.remaining_s < 30
        return None


def require_saved(folder, ends, step):
    """All ranks ended alike, and there is one checkpoint, of that step, which loads."""
    ((agreed, prefix, in_time),) = set(ends)
    assert (agreed, in_time) == (step, True)
    model = new_model()
    with DistributedCheckpoint(coordinator=SoloCoordinator(), storage=folder) as ckpt:
        assert [(info.prefix, info.step) for info in ckpt.list_checkpoints()] == [(prefix, step)]
        options = LoadOptions(checkpoint_prefix=prefix, load_rng_state=False)
        ckpt.load(model, options=options)
    assert torch.equal(model.weight, torch.full_like(model.weight, step))


@pytest.mark.parametrize(
    ("told", "step"),
    [
        ({"signal_at": {0: 5}}, 5),
        ({"signal_at": {3: 0}}, 0),
        ({"signal_at": {0: 9, 1: 4, 2: 7, 3: 6}}, 4),
        ({"signal_at": dict.fromkeys(range(RANKS), 3)}, 3),
        ({"also_at": {2: 6}}, 6),
        ({"also_at": {1: 8}, "signal_at": {2: 7}}, 7),
        ({"signal_at": {1: 4}, "every": 3}, 6),
        ({"signal_at": {1: 6}, "every": 3}, 6),
        ({"also_at": {1: 6}, "every": 6}, 6),
    ],
)
def test_all_ranks_stop_and_save_at_the_step_at_which_one_was_told(gang, tmp_path, told, step):
    require_saved(tmp_path, gang.run(train, tmp_path, **told), step)


def test_nobody_stops_if_nobody_is_told(gang, tmp_path):
    assert gang.run(train, tmp_path) == [None] * RANKS
    assert gang.run(train, tmp_path, signal_at={1: STEPS}, every=5) == [None] * RANKS


def train_on(rank, folder, started, sent):
    """Until told, however long that takes. Stays until all signals were sent: after the block
    they would end it."""
    model, step = new_model(), 0
    with checkpointer(folder) as ckpt, Preemption(ckpt) as preemption:
        while not preemption.requested():
            step += 1
            train_step(model, step)
            if step == 3:
                (started / str(rank)).touch()
        prefix = preemption.save(model, options=SaveOptions(step=step))
        wait_until(sent.exists)
        return step, prefix, True


def wait_until(condition):
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("told", [[2], [3, 1, 0, 2]])
def test_signals_from_outside_at_any_moment_of_a_training(gang, tmp_path, told, times):
    started, sent = tmp_path / "started", tmp_path / "sent"
    started.mkdir()
    gang.start(train_on, tmp_path / "store", started, sent)
    wait_until(lambda: len(list(started.iterdir())) == RANKS)
    for _ in range(times):
        for rank in told:
            os.kill(gang.pids[rank], signal.SIGTERM)
    sent.touch()
    ends = [outcome.value for outcome in gang.outcomes(TIMEOUT_S)]
    assert None not in ends
    require_saved(tmp_path / "store", ends, ends[0][0])


def share_deadline(rank, folder):
    """Every rank has a clock of its own; two are told, at different times."""
    clock = FakeClock(start=1000.0 * rank)
    with (
        checkpointer(folder) as ckpt,
        Preemption(ckpt, deadline_s=30 + rank, clock=clock) as preemption,
    ):
        if rank in (1, 2):
            tell()
            clock.advance({1: 5, 2: 12}[rank])
        assert preemption.requested()
        return preemption.remaining_s


def test_the_least_time_that_a_rank_has_left_is_everybodys(gang, tmp_path):
    assert gang.run(share_deadline, tmp_path) == [20.0] * RANKS


def share_deadline_late(rank, folder):
    with checkpointer(folder) as ckpt, Preemption(ckpt, deadline_s=30) as preemption:
        if rank == 0:
            tell()
        ckpt.coordinator.barrier()
        if rank == 1:
            time.sleep(1.5)
        assert preemption.requested()
        return preemption.remaining_s


def test_what_the_first_waits_for_the_last_is_taken_from_everybodys_time(gang, tmp_path):
    assert all(left_s <= 28.5 for left_s in gang.run(share_deadline_late, tmp_path))


def error_of(work):
    try:
        work()
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return type(error).__name__, getattr(error, "rank", None), str(error), notes
    return None


def save_too_late(rank, folder):
    with (
        checkpointer(folder) as ckpt,
        Preemption(ckpt, also=lambda: 0 if rank == 2 else None) as preemption,
    ):
        assert preemption.requested()
        assert preemption.remaining_s == 0
        with pytest.MonkeyPatch.context() as patch:
            # A busy machine may not find the newest checkpoint in the moment that a user has.
            patch.setattr(_preemption, "_LOOK_S", TIMEOUT_S)
            return error_of(lambda: preemption.save(new_model()))


def test_without_time_left_no_rank_begins_a_save(gang, tmp_path):
    gang.run(train, tmp_path, signal_at={1: 5})
    for name, _, text, _ in gang.run(save_too_late, tmp_path):
        assert name == "OperationTimeoutError"
        assert text.startswith("there is no time for a last save: 0.0 s were left")
        assert "of step 5, and intact" in text


class Held(WrappedStorage):
    """Writes nothing before its event."""

    def __init__(self, storage, release):
        super().__init__(storage)
        self._release = release

    def _through(self, method, key, call, /):
        assert method != "open_writer" or self._release.wait(TIMEOUT_S)
        return call()


def save_too_slowly(rank, folder):
    release = threading.Event()
    storage = LocalStorage(folder)
    with (
        checkpointer(Held(storage, release) if rank == 1 else storage) as ckpt,
        Preemption(ckpt, also=lambda: 6.0 if rank == 0 else None) as preemption,
    ):
        assert preemption.requested()
        found = error_of(lambda: preemption.save(new_model(), options=SaveOptions(step=3)))
        release.set()
        return found


def test_a_save_that_needs_longer_than_is_left_is_given_up_by_all(gang, tmp_path):
    gang.run(train, tmp_path, signal_at={1: 5})
    for name, _, text, notes in gang.run(save_too_slowly, tmp_path):
        assert name in ("OperationTimeoutError", "RankTimeoutError"), text
        assert "were all that was left to the job." in notes
    with DistributedCheckpoint(coordinator=SoloCoordinator(), storage=tmp_path) as ckpt:
        assert [info.step for info in ckpt.list_checkpoints()] == [5]


def ask_with(rank, folder, options):
    with checkpointer(folder) as ckpt, Preemption(ckpt, **options(rank)) as preemption:
        return error_of(preemption.requested)


def failing_on_two(rank):
    def also():
        raise OSError("no route to the metadata")

    return {"also": also if rank == 2 else None}


def test_what_also_raises_on_one_rank_all_raise(gang, tmp_path):
    for name, rank, text, _ in gang.run(ask_with, tmp_path, failing_on_two):
        assert (name, rank) == ("RankFailedError", 2)
        assert "no route to the metadata [rank 2, phase also]" in text


def differing(rank):
    return {"every": 1 if rank == 3 else 10}


def test_ranks_that_differ_in_every_are_told_at_the_first_call(gang, tmp_path):
    expected = "10 on rank 0, 10 on rank 1, 10 on rank 2, 1 on rank 3"
    for name, _, text, _ in gang.run(ask_with, tmp_path, differing):
        assert name == "ValueError"
        assert text == f"every must be the same on all ranks, not {expected}"


def ask_beside_a_save(rank, folder):
    """A save is under way the whole time: nothing is written before this rank has asked often, was
    told, and has asked again."""
    release = threading.Event()
    model = new_model()
    with checkpointer(Held(LocalStorage(folder), release)) as ckpt, Preemption(ckpt) as preemption:
        options = SaveOptions(checkpoint_prefix="background", step=0)
        handle = ckpt.save_async(model, options=options)
        for step in range(50):
            train_step(model, step)
            assert not preemption.requested()
        if rank == 1:
            tell()
        assert preemption.requested()
        assert not handle.done()
        release.set()
        preemption.save(model, options=SaveOptions(checkpoint_prefix="last", step=50))
        return handle.result(0)


def test_asking_goes_on_while_a_save_is_under_way_in_the_background(gang, tmp_path):
    assert gang.run(ask_beside_a_save, tmp_path) == ["background"] * RANKS
    with DistributedCheckpoint(coordinator=SoloCoordinator(), storage=tmp_path) as ckpt:
        found = [(info.prefix, info.step) for info in ckpt.list_checkpoints()]
    assert found == [("last", 50), ("background", 0)]


def lose_one(rank, folder, victim):
    with checkpointer(folder) as ckpt, Preemption(ckpt) as preemption:
        assert not preemption.requested()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        preemption.requested()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_instead_is_named_by_the_others(tmp_path, victim):
    with RankGang(RANKS) as ranks:
        ranks.start(lose_one, tmp_path, victim)
        others = [rank for rank in range(RANKS) if rank != victim]
        for outcome in ranks.outcomes(TIMEOUT_S, ranks=others):
            assert outcome.error is not None
            error = outcome.error.rebuild()
            assert type(error) is RankLostError
            assert error.ranks == (victim,)
            assert "operation 'preemption'" in str(error)
            assert outcome.elapsed_s < NOTICED_S
