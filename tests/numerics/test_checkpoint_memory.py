"""Checkpointed tensors are really gone, and nothing is left behind. The collector stays off."""

import contextlib
import gc
import itertools
import threading
import time
import tracemalloc
import weakref

import pytest
import torch
import torch._dynamo  # imported in the middle of a step, it would keep the frames around it
from activation_models import CASES, checking, differing, left_by, loss_of, seed_all
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from holdfast.activation import CheckpointManager, checkpoint
from holdfast.errors import RecomputationError


@pytest.fixture(autouse=True)
def _no_collector():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations: on a busy machine threads wait for threads
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(threads)


class Meter(TorchDispatchMode):
    """The bytes of the storages made under it that live, and the most there were at once.

    The tensors given were there before: views of them are not counted.
    """

    def __init__(self, *there):
        super().__init__()
        self.there = {tensor.untyped_storage()._cdata for tensor in there}
        self.storages = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.there:
                    known = self.storages.get(storage._cdata)
                    if known is None or known[0].expired():
                        self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live())
        return output

    def live(self):
        for key, (storage, _) in [*self.storages.items()]:
            if storage.expired():
                del self.storages[key]
        return sum(size for _, size in self.storages.values())


def blocks(count=6, width=32):
    torch.manual_seed(3)
    return nn.ModuleList(
        nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Tanh()
        )
        for _ in range(count)
    )


def through(model, x, run):
    for block in model:
        x = run(block, x)
    return x


def plain(function, *args):
    return function(*args)


def torchs(function, *args):
    return torch_checkpoint(function, *args, use_reentrant=False)


def measured(run):
    """Live bytes after the forward, at the peak and after the step, gradients already there.

    Of the second step: what a process makes when first used is not the step's.
    """
    model, x = blocks(), torch.randn(64, 32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        gradients = (parameter.grad for parameter in model.parameters())
        with Meter(x, *model.parameters(), *gradients) as meter:
            loss = through(model, x, run).sum()
            after_forward = meter.live()
            loss.backward()
            del loss
            told = after_forward, meter.peak, meter.live()
    return told


def test_a_forward_keeps_what_is_between_the_blocks_and_no_more():
    row = 64 * 32 * 4
    kept, _, left = measured(checkpoint)
    everything, _, _ = measured(plain)
    assert kept < 7 * row
    assert everything >= 6 * (9 * row)
    assert left == 0


def test_the_peak_of_a_step_is_no_higher_than_torchs():
    _, ours, _ = measured(checkpoint)
    _, theirs, _ = measured(torchs)
    _, everything, _ = measured(plain)
    assert ours <= theirs
    assert ours < everything / 2


def test_nested_regions_keep_less_still():
    def nested(block, x):
        return checkpoint(block, x)

    model, x = blocks(), torch.randn(64, 32, requires_grad=True)
    with Meter(x, *model.parameters()) as meter:
        output = checkpoint(through, model, x, nested)
        assert meter.live() <= output.nbytes
        output.sum().backward()
        assert meter.live() <= output.nbytes + x.nbytes + sum(p.nbytes for p in model.parameters())


def test_what_a_region_saved_is_dropped_at_once():
    storages = []

    def region(x):
        for _ in range(5):
            x = x.exp().sin()
            storages.append(StorageWeakRef(x.untyped_storage()))
        return x.clone()

    output = checkpoint(region, torch.ones(10, requires_grad=True))
    assert all(storage.expired() for storage in storages)
    output.sum().backward()
    assert all(storage.expired() for storage in storages)


def objects():
    """How many there are; an engine's log of times is tuples, and is added up when it is long."""
    return sum(type(each) is not tuple for each in gc.get_objects())


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm", "everything"])
def test_a_step_leaves_no_more_than_a_plain_one(name):
    def left(run):
        seed_all(3)
        model, x = CASES[name].make(), CASES[name].sample()

        def step():
            loss_of(model(x, checking(model) if run else plain)).backward()
            model.zero_grad()
            x.grad = None

        step()
        with Meter(x, *model.parameters(), *model.buffers()) as meter:
            step()
            step()
        before = objects()
        for _ in range(20):
            step()
        return meter.live(), objects() - before

    live, made = left(run=True)
    assert live <= left(run=False)[0]
    assert made < 20


class Fn:
    """A function that can be referred to weakly, and what it was given."""

    def __init__(self, act=torch.sin):
        self.act = act

    def __call__(self, x, *more):
        return self.act(x.exp()).sin()


def left_of(use):
    """Whether the function and the argument live on after ``use(output)``."""
    fn, leaf = Fn(), torch.ones(3, requires_grad=True)
    argument = leaf * 2
    refs = [weakref.ref(fn), StorageWeakRef(argument.untyped_storage())]
    output = checkpoint(fn, argument, [argument])
    del fn, argument
    output = use(output)
    del output
    return [refs[0]() is not None, not refs[1].expired()]


def _let_go(output):
    return None


def _backward(output):
    output.sum().backward()


def _backward_and_keep(output):
    output.sum().backward()
    return output


def _twice(output):
    output.sum().backward(retain_graph=True)
    output.sum().backward()


def _create_graph(output):
    (slope,) = torch.autograd.grad(output.sum(), output, create_graph=True)
    return slope


def _read_outside(output):
    return output.grad_fn._saved_self


@pytest.mark.parametrize(
    "use", [_let_go, _backward, _backward_and_keep, _twice, _create_graph, _read_outside]
)
def test_a_region_dies_with_its_graph(use):
    assert left_of(use) == [False, False]


def test_a_graph_kept_after_backward_holds_no_replayed_tensor():
    storages = []

    def region(x):
        y = x.exp()
        z = y.sin()
        storages.extend(StorageWeakRef(t.untyped_storage()) for t in (y, z))
        return z.cos()

    x = torch.ones(10, requires_grad=True)
    output = checkpoint(region, x)
    output.sum().backward(retain_graph=True)
    assert len(storages) == 4
    assert all(storage.expired() for storage in storages)
    output.sum().backward()
    assert len(storages) == 6
    assert all(storage.expired() for storage in storages)


def test_an_error_in_the_forward_leaves_nothing():
    storages, refs = [], []

    def run():
        def act(x):
            storages.append(StorageWeakRef(x.untyped_storage()))
            raise ValueError("not this time")

        fn = Fn(act)
        refs.append(weakref.ref(fn))
        x = torch.ones(10, requires_grad=True) * 2
        storages.append(StorageWeakRef(x.untyped_storage()))
        with contextlib.suppress(ValueError):
            checkpoint(fn, x)

    run()
    assert refs[0]() is None
    assert all(storage.expired() for storage in storages)


def test_an_error_in_the_replay_leaves_nothing():
    storages, refs = [], []

    def run():
        calls = []

        def act(x):
            calls.append("call")
            storages.append(StorageWeakRef(x.untyped_storage()))
            if len(calls) == 2:
                raise ValueError("not this time")
            return x.sin()

        fn = Fn(act)
        refs.append(weakref.ref(fn))
        x = torch.ones(10, requires_grad=True) * 2
        output = checkpoint(fn, x)
        with contextlib.suppress(ValueError, RecomputationError):
            output.sum().backward()
        assert len(calls) == 2

    run()
    assert refs[0]() is None
    assert all(storage.expired() for storage in storages)


def _abandon(model, x, nested):
    if nested:
        checkpoint(through, model, x, checkpoint)
    else:
        through(model, x, checkpoint)


@pytest.mark.parametrize("nested", [False, True])
def test_ten_thousand_abandoned_forwards_leave_memory_flat(nested):
    model = nn.ModuleList(
        [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Tanh())]
    )
    x = torch.randn(3, 4, requires_grad=True)
    rounds = 10_000 if not nested else 2_000
    for _ in range(200):
        _abandon(model, x, nested)
    before = objects()
    for _ in range(rounds):
        _abandon(model, x, nested)
    assert objects() - before < 20
    tracemalloc.start()
    try:
        told = []
        for _ in range(6):
            for _ in range(100):
                _abandon(model, x, nested)
            told.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # What others do in between is not a leak; that grows in every round.
    assert min(after - before for before, after in itertools.pairwise(told)) < 5_000


def test_abandoned_forwards_keep_no_storage():
    x = torch.randn(8, requires_grad=True)
    with Meter() as meter:
        for _ in range(500):
            checkpoint(lambda x: checkpoint(torch.sin, x.exp()).exp(), x * 2)
        assert meter.live() <= x.nbytes


def test_failed_forwards_and_replays_keep_no_objects():
    x = torch.randn(8, requires_grad=True)

    def fails(x):
        raise ValueError(x.exp().sum())

    def run():
        with contextlib.suppress(ValueError):
            checkpoint(fails, x)
        flags = []

        def later(x):
            y = x.exp().sin()
            if flags:
                raise ValueError("later")
            return y.sin()

        output = checkpoint(later, x)
        flags.append(1)
        with contextlib.suppress(ValueError, RecomputationError):
            output.sum().backward()

    for _ in range(20):
        run()
    before = objects()
    for _ in range(200):
        run()
    assert objects() - before < 20


def test_what_the_manager_says_was_saved_is_what_was_saved():
    model, x = blocks(), torch.randn(64, 32, requires_grad=True)
    with CheckpointManager() as manager:
        with Meter(x, *model.parameters()) as meter:
            output = through(model, x, plain)
            everything = meter.live()
            del output
        with Meter(x, *model.parameters()) as meter:
            output = through(model, x, lambda block, x: checkpoint(block, x, manager=manager))
            kept = meter.live()
            told = manager.get_memory_stats().memory_savings
        del output
        # GELU's and Tanh's inputs and outputs: what autograd holds, each storage once.
        assert abs(told - (everything - kept)) <= 6 * x.nbytes
        assert manager.get_memory_stats().memory_savings == 0


class Moves:
    """What a manager tells, and a way to wait for its threads."""

    def __init__(self, manager):
        self.kinds = []
        self._manager = manager
        self._told = threading.Condition()
        manager.on_event(self._hear)

    def _hear(self, event):
        with self._told:
            self.kinds.append(event.kind)
            self._told.notify_all()

    def wait(self, condition):
        """Whether the manager's stats come to be so. Looks from time to time even if nothing is
        told: nothing is when a thread lets go of the last reference."""
        until = time.monotonic() + 60
        with self._told:
            while not condition(self._manager.get_memory_stats()):
                if time.monotonic() > until:
                    return False
                self._told.wait(0.05)
        return True


@pytest.mark.parametrize("tier", ["inplace", "disk"])
@pytest.mark.parametrize("part", ["all", "some"])
def test_tensors_that_are_to_be_kept_are_and_are_freed(tier, part, tmp_path):
    model, x = blocks(2), torch.randn(1024, 32, requires_grad=True)
    expected = torch.autograd.grad(loss_of(through(model, x, plain)), [x, *model.parameters()])
    calls = []
    model[0].register_forward_pre_hook(lambda *_: calls.append("call"))

    def keep(tensor):
        return part == "all" or tensor.shape[-1] == 128

    with CheckpointManager(tier=tier, folder=tmp_path if tier == "disk" else None) as manager:
        moves = Moves(manager)
        output = through(
            model, x, lambda block, x: checkpoint(block, x, manager=manager, keep=keep)
        )
        least = 2 * 2 * 1024 * 128 * 4  # of each block GELU's input and output
        if tier == "disk":
            assert moves.wait(lambda stats: not stats.current_memory_used)
            assert manager.get_memory_stats().moved_bytes >= least
            assert moves.kinds.count("moved") >= 4
        else:
            assert manager.get_memory_stats().current_memory_used >= least
        got = torch.autograd.grad(loss_of(output), [x, *model.parameters()])
        assert all(map(torch.equal, got, expected))
        del output
        if tier == "disk":  # what reads ahead may be about to let go of the last
            assert moves.wait(lambda stats: not stats.moved_bytes)
        stats = manager.get_memory_stats()
        assert (stats.current_memory_used, stats.moved_bytes) == (0, 0)
    assert len(calls) == (1 if part == "all" else 2)


LARGE = {
    "gpt": lambda: torch.randint(0, 23, (32, 40)),
    "resnet": lambda: torch.randn(16, 3, 24, 24, requires_grad=True),
    "everything": lambda: torch.randn(4096, 8, requires_grad=True),
}
"""Samples whose activations are large enough to be moved."""


@pytest.mark.parametrize("name", LARGE)
def test_a_manager_that_moves_tensors_gives_the_same_gradients(name, tmp_path):
    def step(run, before_backward):
        seed_all(3)
        model, x = CASES[name].make(), LARGE[name]()
        output = model(x, run(model))
        before_backward()
        loss_of(output).backward()
        return left_by(model, [("input", x), ("output", output)])

    with CheckpointManager(tier="disk", folder=tmp_path) as manager:
        moves = Moves(manager)

        def wait():
            # The arguments of all blocks but the first, which gets the sample.
            assert moves.wait(lambda stats: stats.moved_bytes >= 3 * 64 * 1024)

        moved = step(lambda model: checking(model, manager=manager), wait)
        assert "moved" in moves.kinds
        assert "fell_back" not in moves.kinds
    assert differing(moved, step(lambda _: plain, lambda: None)) == []
