"""Layers of a model that are checkpointed: the same numbers, less kept, and nothing left behind."""

import contextlib
import copy
import functools
import gc
import inspect
import io
import logging
import pickle
import random
import re
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._layers.available import available_bytes
from holdfast.activation._layers.checkpointed import checkpoint_layers
from holdfast.activation._layers.config import CheckpointConfig
from holdfast.activation._recomputing.engine import RecomputationEngine
from holdfast.errors import ClosedError
from holdfast.testing import FakeClock

WIDTH = 16


class Block(nn.Module):
    """Attention and a feed-forward with dropout, and a buffer that counts its calls."""

    counts = True

    def __init__(self, width=WIDTH, hidden=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden * width), nn.GELU(), nn.Linear(hidden * width, width)
        )
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, scale=1.0):
        if self.counts:
            self.calls += 1
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(nn.functional.scaled_dot_product_attention(q, k, v)) * scale
        return x + self.drop(self.mlp(self.norm(x)))


class Gpt(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.left = nn.ModuleList([Block() for _ in range(2)])
        self.right = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.right(x)
        for block in self.left:
            x = block(x, scale=y.mean())
        return x * y


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())

    def forward(self, x):
        return x + self.inner(x) * random.random()


def mlp():
    return nn.Sequential(nn.Embedding(32, WIDTH), nn.Flatten(0, 1), *[Step() for _ in range(4)])


MODELS = {"gpt": Gpt, "two towers": TwoTowers, "mlp": mlp}


def tokens(seed=0, batch=3, length=5):
    return torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(seed))


def made(model, seed=0):
    torch.manual_seed(seed)
    return MODELS[model]()


def still(model):
    """The same model with nothing that a call changes: for threads, and for torch.compile."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, Block):
            module.counts = False
    return model


def train(model, steps=3, **shape):
    """All that a training leaves behind, bit for bit."""
    torch.manual_seed(7)
    random.seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens(step, **shape)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    seen += [value.clone() for value in model.state_dict().values()]
    return seen, torch.get_rng_state(), random.getstate()


def assert_same(found, wanted):
    assert len(found[0]) == len(wanted[0])
    assert all(map(torch.equal, found[0], wanted[0]))
    assert torch.equal(found[1], wanted[1])
    assert found[2] == wanted[2]


def kept_layers(model, batch=None):
    """The layers whose inner activations are still there after a forward in training."""
    held = {}

    def note(name, _module, _args, output):
        held[name.removesuffix(".mlp.1")] = StorageWeakRef(output.untyped_storage())

    hooks = [
        module.register_forward_hook(functools.partial(note, name))
        for name, module in model.named_modules()
        if name.endswith(".mlp.1")
    ]
    output = model(tokens() if batch is None else batch)
    kept = {name for name, reference in held.items() if not reference.expired()}
    for hook in hooks:
        hook.remove()
    del output
    return kept


def replays(manager):
    return {layer.layer_id: layer.call_count for layer in manager.engine.get_stats().layers}


CONFIGS = {
    "default": None,
    "half": CheckpointConfig.half(),
    "selective": CheckpointConfig(strategy="selective", layers="*[13]"),
    "size_based": CheckpointConfig(strategy="size_based", min_bytes=1),
    "memory_aware": CheckpointConfig.fit_memory(),
    "smart": CheckpointConfig(strategy="smart"),
}


# The same numbers.


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("model", MODELS)
def test_training_is_bit_for_bit_the_same(model, config):
    wanted = train(made(model))
    wrapped = made(model)
    with CheckpointManager() as manager:
        checkpoint_layers(wrapped, config, manager=manager)
        assert_same(train(wrapped), wanted)
        assert sum(replays(manager).values()) > 0


def test_activations_of_checkpointed_layers_are_dropped_and_only_those():
    model = made("gpt")
    assert kept_layers(model) == {f"blocks.{i}" for i in range(4)}
    with checkpoint_layers(model, CheckpointConfig.half()) as handle:
        assert handle.layers == ("blocks.0", "blocks.2")
        assert kept_layers(model) == {"blocks.1", "blocks.3"}
    assert kept_layers(model) == {f"blocks.{i}" for i in range(4)}


def test_parameters_modules_and_the_state_dict_are_unchanged():
    model = made("two towers")
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    modules = [(name, id(m)) for name, m in model.named_modules()]
    keys = list(model.state_dict())
    shown = repr(model)
    checkpoint_layers(model)
    assert [(name, id(p)) for name, p in model.named_parameters()] == parameters
    assert [(name, id(m)) for name, m in model.named_modules()] == modules
    assert list(model.state_dict()) == keys
    assert repr(model) == shown
    model.load_state_dict(made("two towers", seed=1).state_dict())


def test_hooks_of_a_layer_run_once():
    model = made("gpt")
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    model.blocks[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    checkpoint_layers(model)
    model.blocks[0].register_forward_hook(lambda *_: calls.append("added later"))
    model(tokens()).sum().backward()
    assert calls == ["before", "after", "added later", "backward"]


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_without_training_a_layer_runs_as_it_is(how):
    model = made("gpt")
    with CheckpointManager() as manager:
        checkpoint_layers(model, manager=manager)
        events = []
        manager.on_event(events.append)
        around = contextlib.nullcontext() if how == "eval" else getattr(torch, how)()
        model.train(how != "eval")
        with around:
            output = model(tokens())
        if how == "eval":
            output.sum().backward()
            plain = made("gpt").eval()
            plain(tokens()).sum().backward()
            for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(found.grad, wanted.grad)
        assert events == []
        assert sum(replays(manager).values()) == 0


def test_keywords_of_a_layer_reach_it_whatever_they_are_called():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, *, name, fn, mask=None, check="x"):
            assert check == "mine"
            return torch.tanh(self.inner(x) * name + fn) * mask

    def gradients(checkpointed):
        torch.manual_seed(0)
        layers = nn.ModuleList([Layer(), Layer()])
        if checkpointed:
            checkpoint_layers(layers)
        x, name, fn, mask = (torch.randn(3, WIDTH, requires_grad=True) for _ in range(4))
        for layer in layers:
            x = layer(x, name=name, fn=fn, mask=mask, check="mine")
        return torch.autograd.grad(x.sum(), [name, fn, mask, *layers.parameters()])

    assert all(map(torch.equal, gradients(checkpointed=True), gradients(checkpointed=False)))


def test_plain_keywords_of_a_layer():
    wanted = train(made("two towers"))
    model = made("two towers")
    checkpoint_layers(model, CheckpointConfig(layers="left.*"))  # called with scale=
    assert_same(train(model), wanted)


def test_a_manager_that_keeps_the_arguments_on_disk(tmp_path):
    shape = {"batch": 32, "length": 40}
    wanted = train(made("gpt"), **shape)
    model, moved = made("gpt"), threading.Semaphore(0)
    argument_bytes = 32 * 40 * WIDTH * 4

    def wait_for_both(*_):
        assert all(moved.acquire(timeout=60) for _ in range(2))
        stats = manager.get_memory_stats()
        assert (stats.moved_bytes, stats.current_memory_used) == (2 * argument_bytes, 0)

    with CheckpointManager(tier="disk", folder=tmp_path) as manager:
        manager.on_event(lambda event: event.kind == "moved" and moved.release())
        handle = checkpoint_layers(model, CheckpointConfig.half(), manager=manager)
        model.head.register_forward_hook(wait_for_both)
        assert_same(train(model, **shape), wanted)
        assert replays(manager) == {"blocks.0": 3, "blocks.2": 3}
        handle.undo()
        assert not manager.engine.closed


@pytest.mark.parametrize("learnt", [False, True])
def test_a_manager_forgets_models_that_are_gone(learnt):
    gc.collect()
    gc.disable()
    try:
        with CheckpointManager() as manager:
            for _ in range(3):
                model = made("gpt")
                handle = checkpoint_layers(model, manager=manager)
                model(tokens()).sum().backward()
                if learnt:
                    handle.relearn()
                assert manager.engine._subscribers
                del model, handle
                assert not manager.engine._subscribers
    finally:
        gc.enable()


def test_the_signature_of_a_layer_can_be_asked_for():
    model = made("gpt")
    wanted = inspect.signature(model.blocks[0].forward)
    checkpoint_layers(model)
    assert inspect.signature(model.blocks[0].forward) == wanted


def test_a_class_that_changes_later_keeps_its_forward():
    """As fully_shard and parametrizations change it."""

    class Doubled(Block):
        def forward(self, x, scale=1.0):
            return 2 * super().forward(x, scale)

    def gradients(checkpointed):
        model = made("gpt")
        if checkpointed:
            checkpoint_layers(model)
        model.blocks[1].__class__ = Doubled
        return train(model)

    assert_same(gradients(checkpointed=True), gradients(checkpointed=False))


def test_a_layer_that_is_used_several_times():
    def model():
        made_of = made("gpt")
        made_of.blocks = nn.ModuleList([made_of.blocks[0], made_of.blocks[1], made_of.blocks[0]])
        return made_of

    wanted = train(model())
    shared = model()
    handle = checkpoint_layers(shared)
    assert handle.layers == ("blocks.0", "blocks.1")
    assert_same(train(shared), wanted)
    sizes = told(handle)
    assert sizes["blocks.0"]["bytes"] == 2 * sizes["blocks.1"]["bytes"]
    assert sizes["blocks.0"]["replays"] == 2 * sizes["blocks.1"]["replays"] == 6


def test_inside_a_region_of_torch():
    """Its replay calls the layers too, and must find them as they were in its forward, although the
    replay of the region behind it has told all there is to learn."""

    class Around(Gpt):
        def forward(self, x):
            x = torch_checkpoint(self.some, self.embed(x), 0, use_reentrant=False)
            return self.head(torch_checkpoint(self.some, x, 2, use_reentrant=False))

        def some(self, x, first):
            for block in self.blocks[first : first + 2]:
                x = block(x)
            return x

    def model():
        torch.manual_seed(0)
        around = Around()
        for block in around.blocks:
            block.counts = False  # torch's replay would count again
        return around

    wanted = train(model())
    config = CheckpointConfig(strategy="memory_aware", memory_share=1)
    wrapped = model()
    handle = checkpoint_layers(wrapped, config)
    assert_same(train(wrapped), wanted)
    assert handle.layers == ()


def test_many_threads_through_one_model():
    model = still(made("gpt"))
    parameters = list(model.parameters())

    def gradients(seed):
        return torch.autograd.grad(model(tokens(seed)).square().sum(), parameters)

    wanted = [gradients(seed) for seed in range(8)]
    handle = checkpoint_layers(model, CheckpointConfig(strategy="smart", target_share=0.5))
    found = {}
    start = threading.Barrier(8)

    def run(seed):
        start.wait()
        found[seed] = [gradients(seed) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(8):
        for each in found[seed]:
            assert all(map(torch.equal, each, wanted[seed]))
    # How many depends on how far each thread was when another one's backward began.
    assert handle.layers
    assert "until it is learnt" not in handle.report()


def test_under_ddp():
    def run():
        wanted = train(DistributedDataParallel(made("gpt")))
        inside = made("gpt")
        handle = checkpoint_layers(inside, CheckpointConfig.half())
        assert_same(train(DistributedDataParallel(inside)), wanted)
        assert told(handle)["blocks.2"]["replays"] == 3

        outside = DistributedDataParallel(made("gpt"))
        handle = checkpoint_layers(outside, CheckpointConfig.half())
        assert handle.layers == ("module.blocks.0", "module.blocks.2")
        assert_same(train(outside), wanted)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Its models must be gone before the group. Freeing them last joins gloo's threads with the
        # GIL held, while those may need it to drop the context of a backward: torch's own
        # checkpoint hangs there too.
        run()
    finally:
        dist.destroy_process_group()


# Copies.


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])


@COPIES
@pytest.mark.parametrize("strategy", ["interval", "smart"])
def test_a_copy_goes_on_by_itself(copied, strategy):
    config = CheckpointConfig(strategy=strategy, layers="blocks.[0-2]")
    wanted = train(made("gpt"))
    model = made("gpt")
    handle = checkpoint_layers(model, config)
    twin = copied(model)
    assert kept_layers(twin) == {"blocks.3"}
    for block in twin.blocks:
        block.calls.zero_()
    assert_same(train(twin), wanted)
    assert all(parameter.grad is None for parameter in model.parameters())
    handle.undo()
    assert kept_layers(twin) == {"blocks.3"}


@COPIES
def test_a_copy_can_be_checkpointed_anew(copied):
    model = made("gpt")
    checkpoint_layers(model)
    twin = copied(model)
    with checkpoint_layers(twin, CheckpointConfig(layers="blocks.1")) as handle:
        assert handle.layers == ("blocks.1",)
        assert kept_layers(twin) == {"blocks.0", "blocks.2", "blocks.3"}
    assert all("forward" not in module.__dict__ for module in twin.modules())
    assert kept_layers(model) == set()


def test_a_copy_keeps_what_was_kept():
    model = made("gpt")
    checkpoint_layers(model, CheckpointConfig(strategy="memory_aware", memory_share=1))
    train(model)
    assert kept_layers(copy.deepcopy(model)) == {f"blocks.{i}" for i in range(4)}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("config", [None, CheckpointConfig(strategy="smart")])
def test_nothing_waits_for_the_garbage_collection(config, trained):
    gc.collect()
    gc.disable()
    try:
        model = made("gpt")
        handle = checkpoint_layers(model, config)
        if trained:
            train(model)
        else:
            model(tokens())
        gone = [weakref.ref(model), weakref.ref(handle), weakref.ref(model.blocks[0].qkv.weight)]
        del model, handle
        assert [reference() for reference in gone] == [None, None, None]
    finally:
        gc.enable()


def test_a_forward_alone_does_not_keep_its_layer():
    model = made("gpt")
    checkpoint_layers(model)
    alone = model.blocks[0].forward
    del model
    with pytest.raises(ReferenceError, match=r"layer 'blocks\.0' is gone"):
        alone(torch.ones(1, 2, WIDTH))


def test_the_handle_need_not_be_kept():
    model = made("gpt")
    checkpoint_layers(model)
    gc.collect()
    assert kept_layers(model) == set()


# Undoing.


def test_undo_when_the_model_is_gone():
    model = made("gpt")
    handle = checkpoint_layers(model)
    del model
    handle.undo()
    assert handle.layers == ()


def test_undo_leaves_nothing_behind():
    model = made("gpt")
    before = [dict(module.__dict__) for module in model.modules()]
    handle = checkpoint_layers(model, CheckpointConfig(strategy="smart"))
    handle.undo()
    handle.undo()
    handle.relearn()
    assert handle.layers == ()
    after = [dict(module.__dict__) for module in model.modules()]
    assert [d.keys() for d in after] == [d.keys() for d in before]
    assert kept_layers(model) == {f"blocks.{i}" for i in range(4)}
    assert handle.report().startswith("smart: 0 of 4 layers recomputed, undone\n")


def test_a_forward_of_the_instance_is_used_and_comes_back():
    model = made("gpt")
    calls = []
    block = model.blocks[0]

    def own(x):
        calls.append(1)
        return type(block).forward(block, x)

    block.forward = own
    with checkpoint_layers(model):
        assert block.forward is not own
        model(tokens()).sum().backward()
        assert len(calls) == 2  # forward and replay
    assert block.__dict__["forward"] is own


def test_a_backward_after_undo():
    wanted = made("gpt")
    torch.manual_seed(3)
    wanted(tokens()).sum().backward()
    model = made("gpt")
    torch.manual_seed(3)
    with checkpoint_layers(model):
        loss = model(tokens()).sum()
    loss.backward()
    for found, parameter in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(found.grad, parameter.grad)


def test_undo_below_a_forward_that_somebody_put_on_top():
    model = made("gpt")
    handle = checkpoint_layers(model)
    block = model.blocks[0]
    below = block.forward
    block.forward = functools.partial(below)
    handle.undo()
    assert kept_layers(model) == {f"blocks.{i}" for i in range(4)}


# What is refused.


def test_a_model_that_is_checkpointed_already():
    model = made("gpt")
    handle = checkpoint_layers(model, CheckpointConfig(layers="blocks.1"))
    with pytest.raises(ValueError, match=r"layer 'blocks\.1' is checkpointed already") as told_why:
        checkpoint_layers(model)
    place = re.search(r"(model\.get_submodule\(.*\.owner)", str(told_why.value))[1]
    assert eval(place, {"model": model}) is handle  # as users will paste it
    assert handle.layers == ("blocks.1",)
    handle.undo()
    assert checkpoint_layers(model).layers == tuple(f"blocks.{i}" for i in range(4))


@pytest.mark.parametrize(
    ("arguments", "options", "told_why"),
    [
        (("not a model",), {}, "model must be a Module"),
        ((nn.Linear(2, 2),), {}, "no repeated layers"),
        ((Gpt(), "interval"), {}, "config must be a CheckpointConfig"),
        ((Gpt(),), {"manager": RecomputationEngine()}, "manager must be a CheckpointManager"),
        ((Gpt(), CheckpointConfig(layers="blocks.9")), {}, "matches no module"),
        (
            (Gpt().to("meta"), CheckpointConfig.fit_memory()),
            {},
            "'memory_aware' is refused: layer 'blocks.0' is on 'meta'",
        ),
    ],
)
def test_bad_arguments(arguments, options, told_why):
    with pytest.raises(ValueError, match=told_why):
        checkpoint_layers(*arguments, **options)
    if isinstance(arguments[0], nn.Module):
        assert all("forward" not in module.__dict__ for module in arguments[0].modules())


def test_a_closed_manager_changes_nothing():
    model = made("gpt")
    manager = CheckpointManager()
    manager.close()
    with pytest.raises(ClosedError):
        checkpoint_layers(model, manager=manager)
    assert all("forward" not in module.__dict__ for module in model.modules())


# Learning.


class Uneven(nn.Module):
    """Blocks of which the later ones keep more."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(hidden=4**i) for i in range(1, 5)])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


ALL = tuple(f"blocks.{i}" for i in range(4))


def told(handle):
    """The report, as values."""
    _, head, *lines = handle.report().splitlines()
    assert head.split() == ["layer", "activations", "bytes", "replays", "total", "ms"]
    rows = {}
    for line in lines:
        name, state, nbytes, count, ms = line.split()
        rows[name] = {
            "state": state,
            "bytes": None if nbytes == "-" else int(nbytes.replace(",", "")),
            "replays": int(count),
            "ms": float(ms),
        }
    return rows


def test_size_based_learns_in_the_first_step_and_decides_at_the_next_forward():
    model = Uneven()
    handle = checkpoint_layers(model, CheckpointConfig(strategy="size_based", min_bytes=60_000))
    assert handle.report().startswith(
        "size_based: 4 of 4 layers recomputed until it is learnt what to keep\n"
    )
    loss = model(tokens()).sum()
    assert handle.layers == ALL
    loss.backward()
    assert handle.layers == ALL

    model.eval()(tokens())
    with torch.no_grad():
        model.train()(tokens())
    assert handle.layers == ALL

    assert kept_layers(model) == {"blocks.0", "blocks.1"}
    assert handle.layers == ("blocks.2", "blocks.3")
    found = told(handle)
    assert [row["bytes"] >= 60_000 for row in found.values()] == [False, False, True, True]
    assert [row["state"] for row in found.values()] == [*["kept"] * 2, *["recomputed"] * 2]
    assert [row["replays"] for row in found.values()] == [1, 1, 1, 1]


def test_what_is_learnt_is_what_is_kept_without_checkpointing():
    """Bytes of tensors that autograd holds for a layer, and that were made in it."""
    model = Uneven()
    block = model.blocks[2]
    handle = checkpoint_layers(model, CheckpointConfig(strategy="smart"))
    torch.manual_seed(0)
    train(model, steps=2)
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    handle.undo()
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x)
    own = {x.untyped_storage().data_ptr()}
    own |= {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept = sum(size for pointer, size in storages.items() if pointer not in own)
    assert output.requires_grad
    assert told(handle)["blocks.2"]["bytes"] == pytest.approx(kept, rel=0.02)


def test_forwards_without_a_backward_are_learnt_together():
    """A pipeline runs several of them first, and holds the activations of all."""

    def learnt(forwards):
        model = made("gpt")
        handle = checkpoint_layers(model, CheckpointConfig(strategy="size_based", min_bytes=1))
        losses = [model(tokens()).sum() for _ in range(forwards)]
        for loss in losses:
            loss.backward()
        model(tokens())
        return told(handle)["blocks.1"]["bytes"]

    assert learnt(3) == 3 * learnt(1) > 0


def test_smart_takes_what_frees_most_for_its_time():
    clock = FakeClock()

    class Slow(Block):
        def forward(self, x):
            clock.advance(0.2)
            return super().forward(x)

    model = made("gpt")
    model.blocks[1].__class__ = model.blocks[3].__class__ = Slow
    config = CheckpointConfig(strategy="smart", target_share=0.4, layers="blocks.*")
    engine = RecomputationEngine(clock_ns=lambda: round(clock.now() * 1e9))
    with engine, CheckpointManager(engine=engine) as manager:
        handle = checkpoint_layers(model, config, manager=manager)
        train(model, steps=2)
        assert handle.layers == ("blocks.0", "blocks.2")


def test_memory_aware_keeps_all_where_there_is_room():
    model = made("gpt")
    handle = checkpoint_layers(model, CheckpointConfig.fit_memory())
    train(model, steps=2)
    assert handle.layers == ()
    assert kept_layers(model) == set(ALL)


def test_memory_aware_keeps_what_fits():
    """The machine's memory, and what others use of it, is as it is: so the share is small, and the
    bounds are wide."""
    blocks = 12
    model = Gpt(blocks=blocks)
    handle = checkpoint_layers(model, CheckpointConfig(strategy="size_based", min_bytes=1))
    train(model, steps=2)
    one = told(handle)["blocks.0"]["bytes"]
    handle.undo()
    share = 7 * one / available_bytes("cpu")
    handle = checkpoint_layers(model, CheckpointConfig.fit_memory(share))
    train(model, steps=2)
    assert 2 <= len(handle.layers) <= 10


def test_memory_aware_says_so_where_nothing_fits(caplog):
    model = made("gpt")
    handle = checkpoint_layers(model, CheckpointConfig.fit_memory(1e-12))
    with caplog.at_level(logging.WARNING, "holdfast.activation"):
        train(model, steps=2)
    assert handle.layers == ALL
    (record,) = caplog.records
    assert re.search(r"memory_share 1e-12 of cpu is \d+ bytes too little", record.getMessage())


def test_relearn_after_shapes_have_changed():
    model = Uneven()
    config = CheckpointConfig(strategy="size_based", min_bytes=60_000)
    handle = checkpoint_layers(model, config)
    train(model)
    assert handle.layers == ("blocks.2", "blocks.3")

    long = tokens(length=15)
    for _ in range(2):
        model(long).sum().backward()
    assert handle.layers == ("blocks.2", "blocks.3")

    handle.relearn()
    assert handle.layers == ALL
    model(long).sum().backward()
    assert kept_layers(model, long) == {"blocks.0"}
    assert handle.layers == ("blocks.1", "blocks.2", "blocks.3")


def test_a_layer_that_was_not_called_stays_checkpointed_and_a_frozen_one_does_not():
    class Skipping(Gpt):
        skipped = 1

        def forward(self, x):
            x = self.embed(x)
            for i, block in enumerate(self.blocks):
                if i != self.skipped:
                    x = block(x)
            return x

    model = Skipping()
    model.embed.requires_grad_(requires_grad=False)
    model.blocks[0].requires_grad_(requires_grad=False)
    config = CheckpointConfig(strategy="size_based", min_bytes=1 << 40)
    handle = checkpoint_layers(model, config)
    for _ in range(2):
        model(tokens()).sum().backward()
    assert handle.layers == ("blocks.1",)
    found = told(handle)
    assert found["blocks.0"] == {"state": "kept", "bytes": 0, "replays": 0, "ms": 0.0}
    assert found["blocks.1"]["bytes"] is None


def test_two_models_with_one_manager_learn_apart():
    with CheckpointManager() as manager:
        small, large = made("gpt"), made("gpt")
        config = CheckpointConfig(strategy="size_based", min_bytes=1)
        handles = [checkpoint_layers(each, config, manager=manager) for each in (small, large)]
        losses = [small(tokens()).sum(), large(tokens(batch=30)).sum()]
        for loss in losses:
            loss.backward()
        small(tokens())
        large(tokens(batch=30))
        sizes = [told(handle)["blocks.0"]["bytes"] for handle in handles]
    assert sizes[1] == 10 * sizes[0]


def test_regions_of_others_are_not_counted():
    """Of another name, or of the same name in another thread, while a layer runs."""

    class Foreign:
        forward_ms = 1.0

        def __init__(self, name):
            self.name = name

        def dropped_bytes(self):
            return 10**9

    with CheckpointManager() as manager:
        model = made("gpt")
        handle = checkpoint_layers(model, manager=manager)

        def intrude(*_):
            manager.watch(Foreign("elsewhere"))
            thread = threading.Thread(target=manager.watch, args=(Foreign("blocks.0"),))
            thread.start()
            thread.join()

        heard = []
        manager.on_event(heard.append)
        model.blocks[0].mlp.register_forward_pre_hook(intrude)
        train(model, steps=2)
        assert sum(event.size_bytes == 10**9 for event in heard) >= 4
        found = told(handle)
        assert found["blocks.0"]["bytes"] == found["blocks.1"]["bytes"] > 0


def test_a_forward_that_fails_is_forgotten():
    def training(model):
        with pytest.raises(RuntimeError):
            model.blocks[0](torch.ones(2, 3))
        return train(model)

    wanted = training(made("gpt"))
    model = made("gpt")
    handle = checkpoint_layers(model, CheckpointConfig(strategy="size_based", min_bytes=1))
    assert_same(training(model), wanted)
    assert handle.layers == ALL
    found = told(handle)
    assert found["blocks.0"]["bytes"] == found["blocks.1"]["bytes"]


def test_the_report_with_a_strategy_that_does_not_learn():
    model = made("gpt")
    handle = checkpoint_layers(model, CheckpointConfig.half())
    assert handle.report().startswith("interval: 2 of 4 layers recomputed\n")
    assert {row["bytes"] for row in told(handle).values()} == {None}
    train(model, steps=5)
    found = told(handle)
    assert [row["state"] for row in found.values()] == ["recomputed", "kept"] * 2
    assert [row["replays"] for row in found.values()] == [5, 0, 5, 0]
    assert found["blocks.0"]["bytes"] == found["blocks.2"]["bytes"] > 0
    assert found["blocks.1"]["bytes"] is None
    assert found["blocks.0"]["ms"] > 0


# Compiled.


def test_a_compiled_model():
    def gradients(model, call):
        model.zero_grad()
        call(tokens()).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    model = still(made("gpt"))
    wanted = gradients(model, model)
    checkpoint_layers(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = gradients(model, compiled)
    for each, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by Dynamo
def test_a_layer_that_is_compiled_by_itself():
    wanted = train(still(made("gpt")), steps=1)
    model = still(made("gpt"))
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    handle = checkpoint_layers(model)
    assert handle.layers == ALL
    found = train(model, steps=1)
    for each, plain in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(each, plain)


def test_functools_partials_stay_in_place():
    """A forward of the instance may be any callable."""
    model = made("gpt")
    wanted = train(made("gpt"))
    for block in model.blocks:
        block.forward = functools.partial(Block.forward, block)
    checkpoint_layers(model)
    assert_same(train(model), wanted)
