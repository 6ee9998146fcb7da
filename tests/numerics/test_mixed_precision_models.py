"""Models under MixedPrecisionOptimizer: what stays FP32, where dtypes meet, fallback, and training
that ends where FP32's does."""

import copy
import gc
import logging
import math
import tracemalloc

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW

import holdfast
from holdfast.errors import ValidationError
from holdfast.precision import MixedPrecisionOptimizer, MixedPrecisionOptions, Precision


@pytest.fixture(autouse=True)
def _plain_kernels():
    """oneDNN's BF16 kernels die of SIGILL on some machines; and so small a model is slower on two
    threads, much slower if others work too."""
    before = torch._C._get_mkldnn_enabled(), torch.get_num_threads()
    torch._C._set_mkldnn_enabled(False)
    torch.set_num_threads(1)
    yield
    torch._C._set_mkldnn_enabled(before[0])
    torch.set_num_threads(before[1])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, *, shift=None):
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + y if shift is None else x + y + shift


class Net(nn.Module):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.start = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.RMSNorm(width)
        self.head = nn.Linear(width, 2)
        self.register_buffer("offset", torch.full((width,), 0.1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, shift=None):
        x = self.start(x) + self.offset
        for block in self.blocks:
            x = block(x, shift=shift)
        return self.head(self.last(x))


def made(chosen=None, make=None, seed=0, **words):
    torch.manual_seed(seed)
    net = Net()
    inner = (make or (lambda p: AdamW(p, lr=0.01, fused=True)))(net.parameters())
    return net, MixedPrecisionOptimizer(inner, chosen, model=net, **words)


def batch(seed=0, samples=16):
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=drawn)
    return x, torch.stack([x[:, 0] * x[:, 1], x.sum(1).sin()], 1)


def train(net, optimizer, steps, first=0, samples=16):
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step, samples)
        optimizer.zero_grad()
        loss = (net(x).float() - y).square().mean()
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def overflow(optimizer, times=1):
    for _ in range(times):
        for weight in optimizer.training_weights.values():
            weight.grad = torch.full_like(weight, math.inf)
        result = optimizer.step()
    return result


FP16 = MixedPrecisionOptions.for_fp16()
BF16 = MixedPrecisionOptions.for_bf16()


@pytest.mark.parametrize("chosen", [FP16, BF16])
def test_norms_stay_fp32_and_all_else_becomes_16_bit(chosen):
    net, optimizer = made(chosen)
    dtype = chosen.precision.dtype
    for name, weight in net.named_parameters():
        assert weight.dtype is (torch.float32 if "norm" in name or "last" in name else dtype)
    assert net.offset.dtype is dtype
    assert net.seen.dtype is torch.int64
    assert list(optimizer.master_weights) == [name for name, _ in net.named_parameters()]
    assert all(master.dtype is torch.float32 for master in optimizer.master_weights.values())
    assert optimizer.master_weights["last.weight"] is net.last.weight
    assert net(batch()[0]).dtype is dtype
    assert net(batch()[0].double().float(), shift=torch.ones(8)).dtype is dtype
    train(net, optimizer, 2)


def test_layers_by_pattern():
    net, optimizer = made(MixedPrecisionOptions(fp32_layer_patterns=("blocks.1", "head")))
    kept = {name for name, weight in net.named_parameters() if weight.dtype is torch.float32}
    assert kept == {
        name for name, _ in net.named_parameters() if name[:8] == "blocks.1" or name[:4] == "head"
    }
    assert net(batch()[0]).dtype is torch.bfloat16  # what leaves the model is cast back too
    train(net, optimizer, 2)


def test_without_a_pattern_all_becomes_16_bit():
    net, optimizer = made(MixedPrecisionOptions(fp32_layer_patterns=()))
    assert {weight.dtype for weight in net.parameters()} == {torch.bfloat16}
    train(net, optimizer, 2)


def test_inputs_may_stay_as_they_are():
    net, _ = made(MixedPrecisionOptions(cast_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        net(batch()[0])
    net(batch()[0].bfloat16())


def test_what_layers_compute_is_what_their_dtypes_say():
    """A norm in FP32 of what BF16 gave it, and back to BF16."""
    net, _ = made(BF16)
    x = torch.randn(3, 8).bfloat16()
    norm = net.blocks[0].norm
    wanted = nn.functional.layer_norm(x.float(), (8,), norm.weight, norm.bias, norm.eps).bfloat16()
    assert torch.equal(norm(x), wanted)


def test_frozen_parameters_get_the_dtype_too():
    torch.manual_seed(0)
    net = Net()
    net.start.requires_grad_(requires_grad=False)
    trained = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer = MixedPrecisionOptimizer(AdamW(trained, fused=True), BF16, model=net)
    assert net.start.weight.dtype is torch.bfloat16
    assert "start.weight" not in optimizer.master_weights
    train(net, optimizer, 2)


def test_a_tied_parameter_is_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[1].weight = net[0].weight
    optimizer = MixedPrecisionOptimizer(AdamW(net.parameters(), fused=True), BF16, model=net)
    assert [name for name in optimizer.master_weights if "weight" in name] == [
        "0.weight",
        "2.weight",
    ]
    train(net, optimizer, 2)
    assert net[1].weight is net[0].weight


def test_names():
    net = Net()
    named = MixedPrecisionOptimizer(SGD(net.named_parameters(), lr=0.1), BF16)
    assert list(named.master_weights) == [name for name, _ in net.named_parameters()]
    unnamed = MixedPrecisionOptimizer(SGD(Net().parameters(), lr=0.1), BF16)
    assert list(unnamed.master_weights)[:2] == ["group0.0", "group0.1"]


def test_two_parameters_of_one_name_are_refused():
    groups = [{"params": [("a", nn.Parameter(torch.ones(2)))]}]
    groups += [{"params": [("a", nn.Parameter(torch.ones(2)))]}]
    with pytest.raises(ValueError, match="two parameters of the optimizer are called 'a'"):
        MixedPrecisionOptimizer(SGD(groups, lr=0.1), BF16)
    assert groups[0]["params"][0].dtype is torch.float32


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"optimizer": 3}, "optimizer must be an optimizer"),
        ({"options": "bf16"}, "options must be MixedPrecisionOptions"),
        ({"options": MixedPrecisionOptions(fp32_layer_patterns=["a"])}, "give the model too"),
        ({"optimizer": LBFGS([nn.Parameter(torch.ones(2))])}, "closures"),
        ({"optimizer": made()[1]}, "has masters already"),
    ],
)
def test_refused(words, named):
    given = {"optimizer": SGD([nn.Parameter(torch.ones(2))], lr=0.1), "options": None, **words}
    with pytest.raises(ValueError, match=named):
        MixedPrecisionOptimizer(**given)


def test_closures_are_refused():
    net, optimizer = made()
    with pytest.raises(ValueError, match="closures are refused"):
        optimizer.step(lambda: net(batch()[0]).sum())


def test_a_copy_is_refused():
    with pytest.raises(TypeError, match="create_checkpoint"):
        copy.deepcopy(made()[1])


def test_groups_can_be_added():
    net, optimizer = made()
    extra = nn.Parameter(torch.randn(3))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert extra.dtype is torch.bfloat16
    assert list(optimizer.master_weights)[-1] == "group1.0"
    assert optimizer.master_weights["group1.0"].dtype is torch.float32
    extra.grad = torch.ones_like(extra)
    before = extra.detach().clone()
    train(net, optimizer, 1)
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    assert not torch.equal(extra, before)


def test_a_group_that_is_refused_is_not_added():
    _, optimizer = made(make=lambda p: SGD(p, lr=0.1))
    with pytest.raises(ValueError, match="more than one"):
        optimizer.add_param_group({"params": [optimizer.master_weights["head.bias"]]})
    assert len(optimizer.param_groups) == 1


SLOW = lambda p: SGD(p, lr=0.05, momentum=0.9)  # noqa: E731


@pytest.mark.parametrize(
    ("make", "chosen"),
    [(None, FP16), (None, BF16), (SLOW, MixedPrecisionOptions.conservative()), (SLOW, BF16)],
)
def test_training_ends_where_that_of_fp32_does(chosen, make):
    """Runs of FP32 from other seeds differ by a third and more."""
    clipping = {"max_grad_norm": chosen.max_grad_norm}
    net, optimizer = made(MixedPrecisionOptions(precision=Precision.FP32, **clipping), make, seed=1)
    wanted = train(net, optimizer, 300, samples=64)
    net, optimizer = made(chosen, make, seed=1)
    losses = train(net, optimizer, 300, samples=64)
    assert sum(wanted[-40:]) < 0.1 * sum(wanted[:40])
    assert sum(losses[-40:]) == pytest.approx(sum(wanted[-40:]), rel=0.2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chosen", [FP16, BF16])
def test_fallback_goes_on_from_the_masters(chosen, fused, caplog):
    chosen = MixedPrecisionOptions(**{**chosen.plain(), "max_consecutive_overflows": 3})
    net, optimizer = made(chosen, lambda p: AdamW(p, lr=0.01, fused=fused))
    train(net, optimizer, 5)
    masters = {name: master.detach().clone() for name, master in optimizer.master_weights.items()}
    moments = optimizer.state[optimizer.master_weights["head.weight"]]["exp_avg"]
    overflow(optimizer, 2)
    train(net, optimizer, 0)
    assert not optimizer.has_fallback
    with caplog.at_level(logging.WARNING, "holdfast.precision"):
        result = overflow(optimizer)
    assert result.fell_back
    assert optimizer.has_fallback
    assert [record.message for record in caplog.records] == [
        "3 steps in a row overflowed: the model goes on in FP32"
    ]
    for name, weight in net.named_parameters():
        assert weight.dtype is torch.float32
        assert torch.equal(weight, masters[name])
    assert net.offset.dtype is torch.float32
    assert optimizer.state[net.head.weight]["exp_avg"] is moments
    assert optimizer.scaler.scale == 1.0
    assert net(batch()[0]).dtype is torch.float32

    reference = Net()
    reference.load_state_dict(net.state_dict())
    other = AdamW(reference.parameters(), lr=0.01, fused=fused)
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        other.state[theirs] = copy.deepcopy(optimizer.state[mine])
    train(net, optimizer, 3)
    for step in range(3):
        x, y = batch(step)
        other.zero_grad()
        (reference(x) - y).square().mean().backward()
        other.step()
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    overflow(optimizer, 4)  # which is skipped, and nothing more
    assert optimizer.get_stats().skipped_steps == 7
    assert optimizer.scaler.scale == 1.0


def test_a_good_step_ends_a_row_of_overflows():
    net, optimizer = made(MixedPrecisionOptions.for_fp16(max_consecutive_overflows=3))
    for _ in range(4):
        overflow(optimizer, 2)
        train(net, optimizer, 1)
    assert not optimizer.has_fallback


def test_without_a_limit_there_is_no_fallback():
    _, optimizer = made(MixedPrecisionOptions.for_fp16(max_consecutive_overflows=None))
    overflow(optimizer, 100)
    assert not optimizer.has_fallback


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chosen", [FP16, BF16])
def test_a_state_dict_goes_on_where_it_was_taken(chosen, fused):
    make = lambda p: AdamW(p, lr=0.01, fused=fused)  # noqa: E731
    net, optimizer = made(chosen, make)
    train(net, optimizer, 4)
    overflow(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    other_net, other = made(chosen, make, seed=9)
    train(other_net, other, 2, first=50)
    other.load_state_dict(state)
    assert other.get_stats() == optimizer.get_stats()
    assert train(net, optimizer, 4, first=4) == train(other_net, other, 4, first=4)
    for mine, theirs in zip(net.parameters(), other_net.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("saved", [True, False])
def test_a_state_from_either_side_of_a_fallback(saved):
    net, optimizer = made(FP16)
    train(net, optimizer, 2)
    other_net, other = made(FP16, seed=5)
    (optimizer if saved else other).set_fallback(fallback=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.has_fallback is saved
    assert other.scaler.scale == optimizer.scaler.scale
    for mine, theirs in zip(net.parameters(), other_net.parameters(), strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)
    assert train(net, optimizer, 3) == train(other_net, other, 3)


def test_masters_from_the_model():
    net, optimizer = made(BF16)
    train(net, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    other_net, other = made(BF16, seed=4)
    before = {name: weight.detach().clone() for name, weight in other_net.named_parameters()}
    other.load_state_dict(state, masters_from="model")
    for name, weight in other_net.named_parameters():
        assert torch.equal(weight, before[name])
        assert torch.equal(other.master_weights[name], before[name].float())
    assert other.step_count == 3


def lists(change):
    """A state dict with one thing wrong, of what kind, and in which words."""
    return pytest.param(*change, id=change[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        lists((lambda s: s.pop("version"), "has no version")),
        lists((lambda s: s.update(version=99), "its version is 99")),
        lists((lambda s: s.pop("scaler"), "it has no scaler")),
        lists((lambda s: s.update(masters=3), "masters is no dict")),
        lists((lambda s: s["masters"].pop("head.bias"), "no master of 'head.bias'")),
        lists((lambda s: s["masters"].update(x=torch.ones(1)), "a master of 'x', unknown here")),
        lists(
            (
                lambda s: s["masters"].update({"head.bias": torch.ones(3)}),
                "master of 'head.bias' is 3, not 2",
            )
        ),
        lists(
            (
                lambda s: s["masters"].update({"head.bias": torch.ones(2).half()}),
                "is torch.float16, not torch.float32",
            )
        ),
        lists(
            (
                lambda s: s["masters"]["head.bias"].fill_(math.nan),
                "master of 'head.bias' is not finite",
            )
        ),
        lists((lambda s: s["inner"].update({"class": "SGD"}), "it is the state of SGD")),
        lists((lambda s: s["inner"]["groups"].pop(), "hold other parameters")),
        lists(
            (
                lambda s: s["inner"]["state"]["head.bias"].update(exp_avg=torch.ones(5)),
                "exp_avg of 'head.bias' is",
            )
        ),
        lists((lambda s: s["inner"]["state"].update(x={}), "state of 'x', unknown here")),
        lists((lambda s: s["scaler"].update(scale=0.0), "scale is 0")),
        lists((lambda s: s["options"].update(precision="bf16"), "it was trained in bf16")),
        lists((lambda s: s.update(skipped_steps=9), "9 of 3 steps were skipped")),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, named):
    net, optimizer = made(FP16)
    train(net, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    train(net, optimizer, 1, first=3)
    before = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(net.state_dict())
    with pytest.raises(ValidationError, match=named):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert str(after) == str(before)
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, weights[name])


def test_everything_that_is_wrong_is_said_at_once():
    net, optimizer = made(FP16)
    train(net, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    del state["masters"]["head.bias"]
    state["masters"]["head.weight"] = torch.ones(1)
    state["inner"]["state"]["start.bias"]["exp_avg"] = torch.ones(99)
    with pytest.raises(ValidationError) as caught:
        optimizer.load_state_dict(state)
    for part in ("head.bias", "head.weight", "start.bias", "nothing was changed"):
        assert part in str(caught.value)


def test_with_a_plan_and_checkpointed_layers():
    """The same losses and weights as without either, bit for bit."""
    alone_net, alone = made(BF16)
    wanted = train(alone_net, alone, 3)

    net, optimizer = made(BF16)
    for block in net.blocks[1:]:
        inner = block.down.forward
        block.down.forward = lambda x, inner=inner: holdfast.checkpoint(inner, x)
    plan = holdfast.plan(net, batch()[0], "90%", loss=lambda found: found.float().square().mean())
    with plan.applied(net):
        found = train(net, optimizer, 3)
    assert found == wanted
    for name, weight in net.named_parameters():
        assert torch.equal(weight, alone_net.get_parameter(name))


@pytest.mark.parametrize("fused", [True, False])
def test_a_thousand_steps_hold_no_more_than_ten(fused):
    weights = [nn.Parameter(torch.randn(50, 7)) for _ in range(3)]
    optimizer = MixedPrecisionOptimizer(Adam(weights, fused=fused), FP16)

    def run(steps):
        for step in range(steps):
            optimizer.zero_grad()
            for weight in weights:
                weight.grad = torch.full_like(weight, math.inf if step % 50 == 3 else 0.5)
            if step % 7 == 1:
                optimizer.unscale_()
            optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        held = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        held = [each for each in held if torch._C._has_storage(each)]  # other tests' may have none
        return len(held), sum(each.untyped_storage().nbytes() for each in held)

    run(10)
    tracemalloc.start()
    try:
        first = run(10)
        before = tracemalloc.get_traced_memory()[0]
        assert run(980) == first
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
