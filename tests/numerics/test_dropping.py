"""Tensors dropped from the graphs of whole blocks: the gradients stay the same to the last bit, the
memory falls, and nothing around notices."""

import contextlib
import copy
import gc
import threading
import weakref

import msgspec
import pytest
import torch
from activation_models import GptBlock
from recipe_models import BLOCKS, tokens
from recipe_tools import (
    all_same,
    compiled,
    gradients,
    graph_of,
    loss_of,
    roots_of,
    same,
    saved_in,
    tensors_in,
    without_onednn,
)
from torch import nn

from holdfast.activation import measure_peak
from holdfast.activation._recipes.dropping import Dropping
from holdfast.activation._recipes.drops import Drops, chosen


@pytest.fixture(autouse=True)
def _seeded():
    state = torch.get_rng_state()
    torch.manual_seed(3)
    yield
    torch.set_rng_state(state)


class Stage:
    """A block, what is dropped of its calls, and runs of fresh copies of it."""

    def __init__(self, make, sample, *, least_bytes=1, needs_grad=True):
        self.model, self.sample, self.needs_grad = make(), sample(), needs_grad
        model, _, given, output = self.forward()
        self.compiled = compiled(
            output, [given], [*model.parameters(), *model.buffers()], least_bytes=least_bytes
        )
        self.dropping = self.compiled.dropping()
        self.tried = self.dropping.tried(roots_of(output), 1)

    def forward(self, model=None, sample=None):
        model = copy.deepcopy(self.model) if model is None else model
        leaf = (self.sample if sample is None else sample).detach().clone()
        leaf.requires_grad_(self.needs_grad)
        given = leaf * 1 if self.needs_grad else leaf
        torch.default_generator.manual_seed(9)
        return model, leaf, given, model(given)

    def step(self, *, drop, **keywords):
        """All that a step leaves behind."""
        model, leaf, _, output = self.forward(**keywords)
        if drop:
            assert self.dropping.drop(roots_of(output))
        loss_of(output).backward()
        left = [leaf.grad, *(each.grad for each in model.parameters()), *model.buffers()]
        return [*left, *tensors_in(output)]


def gpt(dropout=0.0):
    return Stage(lambda: GptBlock(32, 4, dropout), tokens)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_step_with_all_dropped_leaves_the_same_behind(block):
    stage = Stage(*BLOCKS[block])
    assert stage.compiled.items
    assert all(each.is_exact for each in stage.tried)
    assert all_same(stage.step(drop=True), stage.step(drop=False))


@pytest.mark.parametrize(
    ("block", "labels"),
    [
        (
            "gpt",
            {"NativeLayerNorm", "Gelu", "Addmm", "Add", "ScaledDotProductFlashAttentionForCpu"},
        ),
        ("gpt with dropout", {"mask", "Gelu", "NativeLayerNorm"}),
        ("llama", {"Add", "Mul", "Silu", "Mm"}),
        ("resnet bottleneck", {"Relu", "Convolution"}),
        ("u-net", {"Cat", "Mul", "Silu", "NativeGroupNorm", "mask"}),
        ("pooled convolutions", {"MaxPool2DWithIndices", "LeakyRelu", "Convolution"}),
        ("lora", {"Add", "NativeLayerNorm"}),
    ],
)
def test_what_is_found_in_a_block(block, labels):
    assert labels <= {item.label for item in Stage(*BLOCKS[block]).compiled.items}


def test_each_alone_and_any_of_them_together():
    stage = gpt(0.2)
    expected = stage.step(drop=False)
    drops = stage.compiled.drops
    count = len(drops.drops)
    choices = [[number] for number in range(count)]
    choices += [[each for each in range(count) if bits >> each & 1] for bits in (0b1010101, 0b110)]
    choices += [[each for each in range(count) if bits * 7919 >> each & 1] for bits in range(1, 9)]
    for choice in choices:
        stage.dropping = Dropping("stage", chosen(drops, choice))
        assert all_same(stage.step(drop=True), expected), choice


def test_drops_go_through_json():
    stage = gpt(0.2)
    read = msgspec.json.decode(msgspec.json.encode(stage.compiled.drops), type=Drops)
    assert read == stage.compiled.drops
    stage.dropping = Dropping("stage", read)
    assert all_same(stage.step(drop=True), stage.step(drop=False))


def test_another_batch_of_the_same_structure():
    for block, shapes in (
        ("gpt", [(1, 12, 32), (5, 3, 32), (2, 40, 32)]),
        ("tanh", [(1, 1, 32), (7, 2, 32), (0, 12, 32)]),
        ("u-net", [(1, 8, 12, 12), (3, 8, 4, 20)]),
    ):
        stage = Stage(*BLOCKS[block])
        for other in map(torch.randn, shapes):
            kept, dropped = (
                stage.step(drop=False, sample=other),
                stage.step(drop=True, sample=other),
            )
            assert all_same(dropped, kept), (block, other.shape)


def test_the_first_block_whose_input_needs_no_gradient():
    stage = Stage(lambda: GptBlock(32, 4, 0.1), tokens, needs_grad=False)
    assert {item.label for item in stage.compiled.items} >= {"Gelu", "NativeLayerNorm", "mask"}
    assert all_same(stage.step(drop=True), stage.step(drop=False))


class _Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = GptBlock(32, 4, 0.1)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x)


def test_under_autocast_the_casts_are_remade_too():
    with without_onednn():
        stage = Stage(_Cast, tokens)
        kinds = {step.kind for item in stage.compiled.items for step in item.steps}
        assert "ToCopyBackward0" in kinds
        assert all(each.is_exact for each in stage.tried)
        assert all_same(stage.step(drop=True), stage.step(drop=False))
        with torch.autocast("cpu", torch.bfloat16):  # the caller's, in backward too
            assert all_same(stage.step(drop=True), stage.step(drop=False))


def test_double_backward():
    stage = Stage(lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), tokens)

    def twice(drop):
        model, leaf, _, output = stage.forward()
        if drop:
            assert stage.dropping.drop(roots_of(output))
        (slope,) = torch.autograd.grad(loss_of(output), leaf, create_graph=True)
        return gradients((slope * slope).sum(), [leaf, *model.parameters()])

    assert all_same(twice(drop=True), twice(drop=False))


def test_the_graph_retained_and_run_again():
    stage = gpt(0.2)
    model, leaf, _, output = stage.forward()
    assert stage.dropping.drop(roots_of(output))
    inputs = [leaf, *model.parameters()]
    once = gradients(loss_of(output), inputs, retain_graph=True)
    again = gradients(loss_of(output), inputs, retain_graph=True)
    last = gradients(loss_of(output), inputs)
    expected = stage.step(drop=False)[: len(inputs)]
    assert all_same(once, expected)
    assert all_same(again, expected)
    assert all_same(last, expected)


def test_gradients_of_some_inputs_then_of_others():
    stage = gpt()
    model, leaf, _, output = stage.forward()
    assert stage.dropping.drop(roots_of(output))
    expected = stage.step(drop=False)
    names = [name for name, _ in model.named_parameters()]
    late = [p for n, p in model.named_parameters() if n.startswith("down")]
    late_expected = [expected[1 + names.index(n)] for n in names if n.startswith("down")]
    loss = loss_of(output)
    assert all_same(gradients(loss, late, retain_graph=True), late_expected)
    assert same(gradients(loss, [leaf])[0], expected[0])


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_backward_in_a_grad_mode_of_the_caller(around):
    stage = gpt(0.2)
    _, leaf, _, output = stage.forward()
    assert stage.dropping.drop(roots_of(output))
    loss = loss_of(output)
    with around():
        loss.backward()
    assert same(leaf.grad, stage.step(drop=False)[0])


def test_hooks_on_tensors_see_what_they_did():
    stage = gpt()

    def seen(drop):
        model, _, given, output = stage.forward()
        got = []
        given.register_hook(lambda grad: got.append(grad.clone()))
        output.register_hook(lambda grad: got.append(grad.clone()))
        model.up.weight.register_post_accumulate_grad_hook(lambda p: got.append(p.grad.clone()))
        if drop:
            assert stage.dropping.drop(roots_of(output))
        loss_of(output).backward()
        return got

    assert all_same(seen(drop=True), seen(drop=False))


def test_threads_each_with_their_own_call():
    stage = gpt(0.2)
    expected = stage.step(drop=False)
    barrier, results = threading.Barrier(4), [None] * 4
    calls = [stage.forward() for _ in results]

    def run(number):
        model, leaf, _, output = calls[number]
        barrier.wait()
        assert stage.dropping.drop(roots_of(output))
        loss_of(output).backward()
        results[number] = [leaf.grad, *(each.grad for each in model.parameters())]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all_same(result, expected[: len(result)]) for result in results)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_memory_falls_by_what_was_promised(dropout):
    stage = Stage(
        lambda: GptBlock(64, 4, dropout), lambda: torch.randn(4, 64, 64), least_bytes=4096
    )
    model, given = stage.model, torch.randn(4, 64, 64, requires_grad=True) * 1

    def forward(drop):
        output = model(given)
        if drop:
            assert stage.dropping.drop(roots_of(output))
        return output

    kept, dropped = measure_peak(forward, False), measure_peak(forward, True)
    fell = kept.after_bytes - dropped.after_bytes
    promised = sum(item.freed_bytes for item in stage.compiled.items)
    assert promised > 0.75 * kept.after_bytes
    assert abs(fell - promised) < 0.01 * promised


def test_a_remade_tensor_is_gone_after_its_last_use():
    stage = gpt()
    _, _, _, output = stage.forward()
    assert stage.dropping.drop(roots_of(output))
    report = measure_peak(lambda: loss_of(output).backward())
    largest = max(item.size_bytes for item in stage.compiled.items)
    parameters = sum(each.nbytes for each in stage.model.parameters())
    assert report.after_bytes <= parameters + stage.sample.nbytes
    assert report.peak_bytes < parameters + 8 * largest


def test_a_long_program_holds_no_more_than_it_needs():
    x = torch.randn(128, 128, requires_grad=True)
    made = x
    for _ in range(8):
        made = made.neg()
    output = made.sin()
    assert compiled(output, alive=[x]).dropping().drop(roots_of(output))
    del made
    report = measure_peak(lambda: output.grad_fn._saved_self)
    assert x.nbytes <= report.peak_bytes <= 2 * x.nbytes


def test_and_if_the_graph_is_retained():
    stage = gpt()
    _, _, _, output = stage.forward()
    assert stage.dropping.drop(roots_of(output))
    report = measure_peak(lambda: loss_of(output).backward(retain_graph=True))
    gradients = sum(each.nbytes for each in stage.model.parameters()) + stage.sample.nbytes
    assert report.after_bytes < gradients + min(item.size_bytes for item in stage.compiled.items)


def test_what_is_abandoned_is_gone_at_once():
    stage = gpt(0.2)
    gc.disable()
    try:
        for _ in range(3):
            model, leaf, given, output = stage.forward()
            stay = {each.untyped_storage()._cdata for each in (*model.parameters(), given, leaf)}
            seen = [each.untyped_storage() for each in saved_in(graph_of(output, [given])).values()]
            refs = [weakref.ref(storage) for storage in seen if storage._cdata not in stay]
            assert len(refs) > 15
            del seen
            assert stage.dropping.drop(roots_of(output))
            dropped = sum(ref() is None for ref in refs)
            assert dropped >= len(stage.compiled.items)
            del output
            assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


def test_two_thousand_abandoned_forwards_leave_nothing():
    stage = Stage(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)), _rows)
    model, given = stage.model, stage.sample.clone().requires_grad_() * 1
    gc.collect()
    gc.disable()
    try:
        marks = []
        for number in range(2000):
            if number == 100:
                gc.collect()
                before = len(gc.get_objects())
            output = model(given)
            assert stage.dropping.drop(roots_of(output))
            if number % 100 == 0:
                marks.append(weakref.ref(_Mark.on(output.grad_fn)))
        del output
        assert not any(mark() for mark in marks)
        assert len(gc.get_objects()) < before + 200
    finally:
        gc.enable()


def _rows():
    return torch.randn(4, 8)


def test_nothing_is_left_when_backward_is_over():
    stage = gpt(0.2)
    gc.disable()
    try:
        _, _, _, output = stage.forward()
        assert stage.dropping.drop(roots_of(output))
        node = weakref.ref(_Mark.on(output.grad_fn))
        loss = loss_of(output)
        loss.backward()
        del loss, output
        assert node() is None
    finally:
        gc.enable()


class _Mark:
    @classmethod
    def on(cls, node):
        node.metadata["mark"] = mark = cls()
        return mark


def test_tensors_that_are_kept_have_no_hooks():
    stage = gpt()
    _, _, _, output = stage.forward()
    found = compiled(output)
    assert stage.dropping.drop(roots_of(output))
    dropped = {place for item in stage.compiled.items for place in item.holders}
    hooked = 0
    for entry in found.graph.nodes:
        for name in {place.name for place in dropped}:
            handle = getattr(entry.node, f"_raw_saved_{name}", None)
            hooked += handle is not None and handle.unpack_hook is not None
    assert hooked == len(dropped)


@contextlib.contextmanager
def _torch_hooks():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


@pytest.mark.parametrize("inside", [True, False])
def test_where_somebody_elses_hooks_are_at_work_all_is_kept(inside):
    stage = gpt()
    expected = stage.step(drop=False)
    with _torch_hooks():
        _, leaf, _, output = stage.forward()
        if inside:
            assert not stage.dropping.drop(roots_of(output))
    if not inside:
        assert not stage.dropping.drop(roots_of(output))
    loss_of(output).backward()
    assert same(leaf.grad, expected[0])


def test_dropping_twice_drops_once():
    stage = gpt()
    _, leaf, _, output = stage.forward()
    assert stage.dropping.drop(roots_of(output))
    assert not stage.dropping.drop(roots_of(output))
    loss_of(output).backward()
    assert same(leaf.grad, stage.step(drop=False)[0])
