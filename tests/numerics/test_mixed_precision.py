"""Steps of MixedPrecisionOptimizer: bit for bit those of torch on FP32 masters, and skipped when a
gradient is not finite. Gradients are made up: 16-bit products are slow on a CPU."""

import copy
import functools
import math
import types

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from holdfast.precision import MixedPrecisionOptimizer, MixedPrecisionOptions
from holdfast.precision._blocked_step import BlockedStep
from holdfast.precision._blocks import BLOCK, FUSED_BLOCK, LANES, blocks_of
from holdfast.precision._parted_step import PartedStep
from holdfast.precision._plain_step import PlainStep

SHAPES = [(FUSED_BLOCK + 12_345,), (7,), (33, 5), (FUSED_BLOCK - 3,), (1,), ()]
SMALL = [(33, 5), (7,), (), (4, 3, 2, 2)]

FUSED = {
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "maximize": lambda p: AdamW(p, lr=torch.tensor(0.01), maximize=True, fused=True),
    "SGD": lambda p: SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}
OTHER = {
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: RMSprop(p, lr=0.01),
    "Adagrad": lambda p: Adagrad(p, lr=0.01),
    "Adafactor": lambda p: Adafactor(p, lr=0.01),
}
PARTED = {
    "AdamW": lambda p, **words: AdamW(p, lr=0.01, amsgrad=True, **words),
    "SGD": lambda p, **words: SGD(p, lr=0.1, **words),
    "nesterov": lambda p, **words: SGD(p, lr=0.1, momentum=0.9, nesterov=True, **words),
    "RMSprop": lambda p, **words: RMSprop(p, lr=0.01, momentum=0.5, centered=True, **words),
    "Adagrad": lambda p, **words: Adagrad(p, lr=0.01, **words),
    "Adadelta": lambda p, **words: Adadelta(p, lr=0.1, weight_decay=0.1, **words),
    "Adamax": lambda p, **words: Adamax(p, lr=0.01, **words),
    "NAdam": lambda p, **words: NAdam(p, lr=0.01, **words),
    "RAdam": lambda p, **words: RAdam(p, lr=0.01, **words),
    "ASGD": lambda p, **words: ASGD(p, lr=0.01, t0=1, **words),
    "Rprop": lambda p, **words: Rprop(p, lr=0.01, **words),
}


def parameters(shapes, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]


def fill(weights, step, scale=1.0):
    """Give weights gradients in their dtype, the same for the same step."""
    drawn = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        gradient = torch.randn(weight.shape, generator=drawn) * 0.1
        weight.grad = (gradient * scale).to(weight.dtype)


def sparse(rows, values):
    return torch.sparse_coo_tensor(rows, values, (10, values.shape[1]), check_invariants=True)


def options(precision, **changes):
    made = MixedPrecisionOptions.for_fp16() if precision == "fp16" else MixedPrecisionOptions()
    return MixedPrecisionOptions(**{**made.plain(), "precision": precision, **changes})


def assert_steps_alike(make, shapes, chosen, steps=3):
    """Against torch's own step on FP32 weights, with the same gradients in FP32, to which scale
    and clipping are one factor: torch's kernels divide by it, else gradients are multiplied."""
    weights, expected = parameters(shapes), parameters(shapes)
    optimizer = MixedPrecisionOptimizer(make(weights), chosen)
    reference = make(expected)
    for step in range(steps):
        fill(weights, step, optimizer.scaler.scale)
        values = [weight.grad.float() for weight in weights]
        result = optimizer.step()
        assert result.applied
        exact = math.sqrt(sum(float(v.double().square().sum()) for v in values)) / result.scale
        assert result.grad_norm == pytest.approx(exact, rel=1e-4)
        most = chosen.max_grad_norm
        clipping = 1.0 if most is None else max(1.0, (result.grad_norm + 1e-6) / most)
        divisor = result.scale * clipping
        is_fused = isinstance(optimizer._stepping, BlockedStep)
        for weight, value in zip(expected, values, strict=True):
            weight.grad = value / torch.tensor(divisor) if is_fused else value * (1 / divisor)
        reference.step()
        for name, (weight, wanted) in enumerate(zip(weights, expected, strict=True)):
            master = optimizer.master_weights[f"group0.{name}"]
            yield optimizer, master, wanted, weight, reference


@pytest.mark.parametrize("most", [None, 0.5])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", FUSED)
def test_a_blocked_step_is_bit_for_bit_the_whole_one(kind, precision, most):
    chosen = options(precision, max_grad_norm=most)
    shapes = SHAPES if (kind, most) in {("AdamW", 0.5), ("nesterov", None)} else SMALL
    for optimizer, master, wanted, weight, reference in assert_steps_alike(
        FUSED[kind], shapes, chosen
    ):
        assert isinstance(optimizer._stepping, BlockedStep)
        assert torch.equal(master, wanted)
        assert torch.equal(weight, wanted.to(weight.dtype))
        held, own = optimizer.state[master], reference.state[wanted]
        assert held.keys() == own.keys()
        assert all(torch.equal(held[key], own[key]) for key in own)
        assert all(held[key].dtype is own[key].dtype for key in own)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", PARTED)
def test_a_step_by_parts_is_bit_for_bit_the_whole_one(kind, foreach):
    """In its first step a parameter is whole, as it has no state yet; then it is cut."""
    shapes = [(33, 5), (BLOCK + 12_345,), (7,), (), (1,), (0, 3)]
    make = functools.partial(PARTED[kind], foreach=foreach)
    for optimizer, master, wanted, weight, reference in assert_steps_alike(
        make, shapes, options("bf16")
    ):
        assert isinstance(optimizer._stepping, PartedStep)
        assert torch.equal(master, wanted)
        assert torch.equal(weight, wanted.to(weight.dtype))
        held, own = optimizer.state[master], reference.state[wanted]
        assert held.keys() == own.keys()
        for key, value in own.items():
            assert torch.equal(torch.as_tensor(held[key]), torch.as_tensor(value)), key
            assert not isinstance(value, torch.Tensor) or held[key].shape == value.shape


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "nesterov"])
def test_a_step_by_parts_holds_no_gradients_in_fp32(kind):
    weights = parameters([*[(BLOCK // 2,)] * 8, (2 * BLOCK,)])
    optimizer = MixedPrecisionOptimizer(PARTED[kind](weights), options("bf16", max_grad_norm=1.0))
    for step in range(3):
        fill(weights, step)
        assert optimizer.step()
    room = optimizer._stepping._scratch.all(0, torch.device("cpu"))
    assert room.untyped_storage().nbytes() <= 4 * BLOCK
    assert all(master.grad is None for master in optimizer.master_weights.values())


def test_parts_of_gradients_in_fp32_are_divided_in_place():
    """As after ``unscale_``, and with ``grad_accumulation="fp32"``: nothing is cast then."""
    chosen = options("bf16", initial_scale=4.0, grad_accumulation="fp32")
    weights, expected = parameters([(3, 5)]), parameters([(3, 5)])
    optimizer = MixedPrecisionOptimizer(PARTED["nesterov"](weights), chosen)
    reference = PARTED["nesterov"](expected)
    for _ in range(3):
        weights[0].grad = torch.full((3, 5), 4.0)
        expected[0].grad = torch.ones(3, 5)
        assert optimizer.step()
        reference.step()
        assert torch.equal(weights[0].grad, torch.ones(3, 5))
        assert torch.equal(optimizer.master_weights["group0.0"], expected[0])


def test_a_step_that_was_replaced_is_the_one_that_is_taken():
    called = []
    for make in (FUSED["SGD"], OTHER["SGD"]):
        (weight,) = parameters([(4,)])
        inner = make([weight])
        optimizer = MixedPrecisionOptimizer(inner, options("bf16"))
        own = inner.step
        inner.step = lambda own=own: (called.append(own), own())
        fill([weight], 0)
        assert optimizer.step()
    assert len(called) == 2


def test_so_is_one_that_a_scheduler_has_wrapped_since():
    called = []

    def own(inner, closure=None):
        called.append(inner)
        return type(inner).step(inner, closure)

    for make in (FUSED["SGD"], OTHER["SGD"]):
        (weight,) = parameters([(4,)])
        inner = make([weight])
        inner.step = types.MethodType(own, inner)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
        optimizer = MixedPrecisionOptimizer(inner, options("bf16"))
        fill([weight], 0)
        assert optimizer.step()
        scheduler.step()
    assert len(called) == 2


def test_a_step_by_parts_that_fails_leaves_weights_that_are_their_masters():
    weights = parameters([(BLOCK,), (BLOCK,)])
    optimizer = MixedPrecisionOptimizer(OTHER["SGD"](weights), options("bf16"))
    fill(weights, 0)
    assert optimizer.step()
    name = next(iter(optimizer.master_weights))
    optimizer.state[optimizer.master_weights["group0.1"]]["momentum_buffer"] = torch.ones(
        BLOCK, dtype=torch.int8
    )
    before = optimizer.master_weights[name].detach().clone()
    fill(weights, 1)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert not torch.equal(before, optimizer.master_weights[name])
    for weight, master in zip(weights, optimizer.master_weights.values(), strict=True):
        assert torch.equal(weight, master.bfloat16())
        assert master.grad is None


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("most", [None, 0.5])
@pytest.mark.parametrize("kind", OTHER)
def test_other_optimizers_are_bit_for_bit_themselves(kind, most, precision):
    chosen = options(precision, max_grad_norm=most)
    for optimizer, master, wanted, weight, _ in assert_steps_alike(OTHER[kind], SMALL, chosen):
        way = PlainStep if kind == "Adafactor" else PartedStep
        assert isinstance(optimizer._stepping, way)
        assert torch.equal(master, wanted)
        assert torch.equal(weight, wanted.to(weight.dtype))


@pytest.mark.parametrize("make", [FUSED["AdamW"], OTHER["AdamW"], OTHER["foreach"]])
def test_weights_in_other_orders_of_memory(make):
    """Channels last, transposed, with gaps, and gradients that lie otherwise than their weights."""

    def made():
        drawn = torch.Generator().manual_seed(1)
        return [
            nn.Parameter(
                torch.randn(4, 3, 5, 5, generator=drawn).to(memory_format=torch.channels_last)
            ),
            nn.Parameter(torch.randn(6, 9, generator=drawn).t()),
        ]

    weights, expected = made(), made()
    optimizer = MixedPrecisionOptimizer(make(weights), options("bf16"))
    reference = make(expected)
    for step in range(3):
        fill(weights, step)
        for weight, wanted in zip(weights, expected, strict=True):
            weight.grad = weight.grad.contiguous()
            # torch's fused kernels take it for granted that these lie alike.
            wanted.grad = torch.empty_like(wanted).copy_(weight.grad)
        assert optimizer.step()
        reference.step()
        for master, weight, wanted in zip(
            optimizer.master_weights.values(), weights, expected, strict=True
        ):
            assert torch.equal(master, wanted)
            assert torch.equal(weight, wanted.bfloat16())


def test_a_weight_with_gaps_has_a_master_without():
    weight = nn.Parameter(torch.randn(6, 8)[:, ::2])
    expected = copy.deepcopy(weight)
    optimizer = MixedPrecisionOptimizer(FUSED["SGD"]([weight]), options("bf16"))
    weight.grad = torch.ones(6, 4, dtype=torch.bfloat16)
    assert optimizer.step()
    (master,) = optimizer.master_weights.values()
    torch.testing.assert_close(master.detach(), expected.detach() - 0.1)
    assert torch.equal(weight, master.bfloat16())


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [1], [300, 200, 70], [640], [1400, 1, 1], [3, 1600, 4], [600, 640], [639, 99]],
)
def test_blocks_hold_every_element_once_and_cut_between_lanes(sizes):
    blocks = blocks_of(tuple(sizes), 640)
    spans = [span for block in blocks for span in block]
    assert all(0 < sum(span.size for span in block) <= 640 for block in blocks)
    assert all(span.start % LANES == 0 for span in spans)
    assert [(span.item, place) for span in spans for place in range(span.start, span.stop)] == [
        (item, place) for item, size in enumerate(sizes) for place in range(size)
    ]


def test_memory_of_the_masters_is_that_of_the_former_weights():
    weights = parameters(SMALL)
    before = [weight.data_ptr() for weight in weights]
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"](weights), options("bf16"))
    assert [master.data_ptr() for master in optimizer.master_weights.values()] == before


def test_state_that_was_there_is_carried_over():
    weights, expected = parameters(SMALL), parameters(SMALL)
    inner, reference = FUSED["AdamW"](weights), FUSED["AdamW"](expected)
    for both in (weights, expected):
        fill(both, 0)
    inner.step()
    reference.step()
    optimizer = MixedPrecisionOptimizer(inner, options("bf16"))
    assert optimizer.param_groups is inner.param_groups
    fill(weights, 1)
    for weight, wanted in zip(weights, expected, strict=True):
        assert weight.grad.dtype is torch.bfloat16
        wanted.grad = weight.grad.float()
    optimizer.step()
    reference.step()
    for master, wanted in zip(optimizer.master_weights.values(), expected, strict=True):
        assert torch.equal(master, wanted)


@pytest.mark.parametrize("kind", [FUSED["AdamW"], OTHER["AdamW"]])
def test_a_model_that_is_16_bit_already_and_has_stepped(kind):
    weights = [nn.Parameter(weight.detach().bfloat16()) for weight in parameters(SMALL)]
    inner = kind(weights)
    fill(weights, 0)
    inner.step()
    optimizer = MixedPrecisionOptimizer(inner, options("bf16"))
    for master, weight in zip(optimizer.master_weights.values(), weights, strict=True):
        assert torch.equal(master, weight.float())
        assert optimizer.state[master]["exp_avg"].dtype is torch.float32
    fill(weights, 1)
    assert optimizer.step()


def test_a_gradient_that_is_there_is_kept_in_the_dtype_of_the_weight():
    weights = parameters(SMALL)
    fill(weights, 0)
    kept = [weight.grad.clone() for weight in weights]
    MixedPrecisionOptimizer(FUSED["SGD"](weights), options("bf16"))
    for weight, gradient in zip(weights, kept, strict=True):
        assert torch.equal(weight.grad, gradient.bfloat16())


@pytest.mark.parametrize("make", [FUSED["AdamW"], OTHER["SGD"]])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_overflow_changes_no_weight_and_names_the_parameter(make, value):
    weights = parameters(SMALL)
    optimizer = MixedPrecisionOptimizer(make(weights), options("fp16"))
    fill(weights, 0, optimizer.scaler.scale)
    assert optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    fill(weights, 1, optimizer.scaler.scale)
    weights[0].grad[3, 2] = value
    weights[3].grad[0, 0, 0, 0] = value
    result = optimizer.step()
    assert not result
    assert not result.applied
    assert result.nonfinite == ("group0.0", "group0.3")
    assert result.scale == 2.0**16
    assert not math.isfinite(result.grad_norm)
    assert optimizer.scaler.scale == 2.0**15
    assert (optimizer.step_count, optimizer.skipped_steps) == (2, 1)
    after = optimizer.state_dict()
    for name, master in after["masters"].items():
        assert torch.equal(master, before["masters"][name])
    for name, held in after["inner"]["state"].items():
        for key, kept in held.items():
            assert torch.equal(
                torch.as_tensor(kept), torch.as_tensor(before["inner"]["state"][name][key])
            )
    fill(weights, 1, optimizer.scaler.scale)
    assert optimizer.step()
    assert optimizer.get_stats().applied_steps == 2
    assert optimizer.get_stats().skip_rate == pytest.approx(1 / 3)


@pytest.mark.parametrize("make", [FUSED["SGD"], lambda p: SGD(p, lr=0.1)])
def test_finite_gradients_whose_squares_overflow_are_applied(make):
    """1e30 is finite, and so is its step; only its square is not."""
    (weight,) = parameters([(50,)])
    before = weight.detach().clone()
    optimizer = MixedPrecisionOptimizer(make([weight]), options("bf16", max_grad_norm=1.0))
    weight.grad = torch.full((50,), 1e30, dtype=torch.bfloat16)
    result = optimizer.step()
    assert result.applied
    assert result.nonfinite == ()
    assert result.grad_norm == pytest.approx(1e30 * math.sqrt(50), rel=0.01)
    (master,) = optimizer.master_weights.values()
    step = (before - master) / 0.1
    assert step.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_the_norm_of_fp16_gradients_is_no_fp16_number():
    (weight,) = parameters([(1000,)])
    optimizer = MixedPrecisionOptimizer(FUSED["SGD"]([weight]), options("fp16", initial_scale=1.0))
    weight.grad = torch.full((1000,), 6e4, dtype=torch.float16)
    result = optimizer.step()
    assert result.applied
    assert result.grad_norm == pytest.approx(6e4 * math.sqrt(1000), rel=1e-3)


def test_a_storm_of_a_thousand_overflows():
    """The scale stays above its least, weights and masters as they were, and then it goes on."""
    weights = parameters(SMALL)
    chosen = options("fp16", max_consecutive_overflows=None)
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"](weights), chosen)
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.full_like(weight, math.inf)
    scales = []
    for _ in range(1000):
        assert not optimizer.step()
        scales.append(optimizer.scaler.scale)
    assert min(scales) == scales[-1] == 1.0
    assert all(map(torch.equal, before, weights))
    fill(weights, 0, optimizer.scaler.scale)
    assert optimizer.step()
    assert all(torch.isfinite(weight).all() for weight in weights)
    assert all(torch.isfinite(each).all() for each in optimizer.master_weights.values())


@pytest.mark.parametrize("make", [FUSED["AdamW"], OTHER["SGD"]])
def test_frozen_and_unused_parameters_stay_as_they_are(make):
    weights = parameters(SMALL)
    weights[1].requires_grad_(requires_grad=False)
    optimizer = MixedPrecisionOptimizer(make(weights), options("bf16"))
    before = copy.deepcopy(dict(optimizer.master_weights))
    fill([weights[0], weights[3]], 0)
    assert optimizer.step()
    after = optimizer.master_weights
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["group0.0", "group0.3"]
    assert not after["group0.1"].requires_grad
    assert set(optimizer.state_dict()["inner"]["state"]) == {"group0.0", "group0.3"}


def test_a_step_without_any_gradient():
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"](parameters(SMALL)), options("bf16"))
    result = optimizer.step()
    assert (result.applied, result.grad_norm) == (True, 0.0)


@pytest.mark.parametrize("make", [FUSED["momentum"], OTHER["SGD"]])
def test_a_parameter_that_joins_later(make):
    """Its momentum begins with its first gradient, the others' goes on."""
    weights, expected = parameters(SMALL), parameters(SMALL)
    optimizer = MixedPrecisionOptimizer(make(weights), options("bf16"))
    apart = [make([weight]) for weight in expected]
    for step, used in enumerate(([0, 2], [0, 1, 2, 3], [1, 3])):
        optimizer.zero_grad()
        fill([weights[number] for number in used], step)
        for number in used:
            expected[number].grad = weights[number].grad.float()
            apart[number].step()
        assert optimizer.step()
    for master, wanted in zip(optimizer.master_weights.values(), expected, strict=True):
        assert torch.equal(master, wanted)


@pytest.mark.parametrize("fused", [True, False])
def test_groups_have_their_own_hyper_parameters(fused):
    first, second = parameters([(9,), (8,)])
    groups = [{"params": [first], "lr": 0.0}, {"params": [second], "lr": 0.5}]
    optimizer = MixedPrecisionOptimizer(SGD(groups, fused=fused), options("bf16"))
    before = [first.detach().clone(), second.detach().clone()]
    fill([first, second], 0)
    optimizer.step()
    assert torch.equal(first, before[0])
    assert not torch.equal(second, before[1])
    assert list(optimizer.master_weights) == ["group0.0", "group1.0"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SparseAdam(p, lr=0.1),
        lambda p: SGD(p, lr=0.1),
        lambda p: Adagrad(p, lr=0.1),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad itself
def test_sparse_gradients(make, precision):
    """Rows that occur twice are added up in FP32: of FP16, their sum would overflow here."""
    (weight,), (expected,) = parameters([(10, 4)]), parameters([(10, 4)])
    optimizer = MixedPrecisionOptimizer(make([weight]), options(precision, max_grad_norm=1.0))
    reference = make([expected])
    for step in range(3):
        values = torch.full((3, 4), 4e4 / (step + 1))
        rows = torch.tensor([[1, 7, 7]])
        weight.grad = sparse(rows, values.to(weight.dtype))
        result = optimizer.step()
        assert result.applied
        wanted = weight.grad.float().coalesce().values() / result.scale
        assert result.grad_norm == pytest.approx(wanted.norm().item(), rel=1e-5)
        wanted = wanted / max(1.0, result.grad_norm + 1e-6)
        expected.grad = sparse(torch.tensor([[1, 7]]), wanted).coalesce()
        reference.step()
    (master,) = optimizer.master_weights.values()
    torch.testing.assert_close(master.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    untouched = [row for row in range(10) if row not in {1, 7}]
    assert torch.equal(master[untouched], parameters([(10, 4)])[0][untouched])


def test_sparse_gradients_that_a_fused_optimizer_does_not_take():
    (weight,) = parameters([(10, 4)])
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"]([weight]), options("bf16"))
    before = weight.detach().clone()
    weight.grad = torch.ones(10, 4, dtype=torch.bfloat16).to_sparse(1)
    with pytest.raises(RuntimeError, match=r"'group0\.0' is sparse"):
        optimizer.step()
    assert torch.equal(weight, before)
    assert optimizer.step_count == 0


@pytest.mark.parametrize("whose", ["weights", "masters"])
@pytest.mark.parametrize("make", [FUSED["AdamW"], OTHER["foreach"]])
def test_unscale_shows_gradients_that_may_be_changed(make, whose):
    """As GradScaler's users clip, by the model's parameters, or by the masters."""
    weights, expected = parameters(SMALL), parameters(SMALL)
    optimizer = MixedPrecisionOptimizer(make(weights), options("fp16"))
    reference = make(expected)
    fill(weights, 0, optimizer.scaler.scale)
    scaled = [weight.grad.clone() for weight in weights]
    optimizer.unscale_()
    masters = list(optimizer.master_weights.values())
    for master, weight, wanted, gradient in zip(masters, weights, expected, scaled, strict=True):
        assert torch.equal(master.grad, gradient.float() / 2**16)
        assert torch.equal(weight.grad, master.grad)
        wanted.grad = master.grad.clone()
    with pytest.raises(RuntimeError, match="already"):
        optimizer.unscale_()
    nn.utils.clip_grad_norm_(weights if whose == "weights" else masters, 0.25)
    nn.utils.clip_grad_norm_(expected, 0.25)
    result = optimizer.step()
    reference.step()
    assert result.grad_norm == pytest.approx(0.25, rel=1e-3)
    for master, wanted, weight in zip(masters, expected, weights, strict=True):
        assert torch.equal(master, wanted)
        assert master.grad is None
        assert weight.grad.dtype is weight.dtype
    optimizer.unscale_()  # once per step


def test_an_overflow_that_unscale_shows_is_skipped_too():
    weights = parameters(SMALL)
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"](weights), options("fp16"))
    fill(weights, 0)
    weights[2].grad.fill_(math.inf)
    optimizer.unscale_()
    result = optimizer.step()
    assert not result.applied
    assert result.nonfinite == ("group0.2",)


def test_zero_grad():
    weights = parameters(SMALL)
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"](weights), options("bf16"))
    fill(weights, 0)
    optimizer.unscale_()
    optimizer.zero_grad(set_to_none=False)
    assert all(not weight.grad.any() for weight in weights)
    assert all(master.grad is None for master in optimizer.master_weights.values())
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in weights)


def test_schedulers_take_it():
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"](parameters(SMALL)), options("bf16"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    rates = []
    for step in range(4):
        fill(optimizer.training_weights.values(), step)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.001, 0.001, 0.0001])


def test_a_scheduler_of_the_optimizer_inside_works_on():
    inner = FUSED["AdamW"](parameters(SMALL))
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.1)
    optimizer = MixedPrecisionOptimizer(inner, options("bf16"))
    fill(optimizer.training_weights.values(), 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("make", [FUSED["AdamW"], OTHER["SGD"]])
def test_hooks_are_called_before_anything_is_written(make):
    weights = parameters(SMALL)
    optimizer = MixedPrecisionOptimizer(make(weights), options("bf16"))
    before = [weight.detach().clone() for weight in weights]
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(all(map(torch.equal, before, weights))))
    optimizer.register_step_post_hook(
        lambda *_: seen.append(not all(map(torch.equal, before, weights)))
    )
    fill(weights, 0)
    optimizer.step()
    assert seen == [True, True]


def test_hooks_of_the_optimizer_inside_are_called():
    inner = FUSED["AdamW"](parameters(SMALL))
    seen = []
    inner.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer = MixedPrecisionOptimizer(inner, options("bf16"))
    fill(optimizer.training_weights.values(), 0)
    optimizer.step()
    assert seen == ["before"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_gradients_added_up_in_fp32(precision):
    """64 micro-batches, each of 1/64 and a bit: of BF16, the sum would stand still."""
    (weight,) = parameters([(256,)])
    chosen = options(precision, grad_accumulation="fp32", initial_scale=1.0)
    optimizer = MixedPrecisionOptimizer(FUSED["SGD"]([weight]), chosen)
    for _ in range(64):
        (weight.float() * 0.01).sum().backward()
    assert weight.grad.dtype is torch.float32
    once = float(torch.tensor(0.01).to(weight.dtype))
    torch.testing.assert_close(weight.grad, torch.full((256,), 64 * once), rtol=1e-6, atol=0)
    before = optimizer.master_weights["group0.0"].detach().clone()
    assert optimizer.step()
    step = before - optimizer.master_weights["group0.0"]
    torch.testing.assert_close(step.detach(), torch.full((256,), 6.4 * once), rtol=1e-4, atol=1e-6)
    assert torch.equal(weight, optimizer.master_weights["group0.0"].to(weight.dtype))


def test_fp64_parameters_stay_what_they_are():
    weight = nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = MixedPrecisionOptimizer(SGD([weight], lr=1.0), options("bf16"))
    weight.grad = torch.full((5,), 1e-9, dtype=torch.float64)
    before = weight.detach().clone()
    result = optimizer.step()
    assert weight.dtype is torch.float64
    assert torch.equal(weight, before - 1e-9)
    assert result.grad_norm == pytest.approx(1e-9 * math.sqrt(5))


def test_fp32_as_precision_is_the_optimizer_itself():
    weights, expected = parameters(SMALL), parameters(SMALL)
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"](weights), options("fp32"))
    reference = FUSED["AdamW"](expected)
    for step in range(2):
        fill(weights, step)
        fill(expected, step)
        optimizer.step()
        reference.step()
    assert all(map(torch.equal, weights, expected))
    assert list(optimizer.master_weights.values()) == weights


def test_it_agrees_with_the_grad_scaler_of_torch_to_rounding():
    """Which divides, and then clips: two roundings where one factor has one."""
    weights, expected = parameters(SMALL), parameters(SMALL)
    optimizer = MixedPrecisionOptimizer(FUSED["AdamW"](weights), options("fp16", max_grad_norm=0.5))
    reference = FUSED["AdamW"](expected)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    for step in range(6):
        fill(weights, step, optimizer.scaler.scale)
        for weight, wanted in zip(weights, expected, strict=True):
            wanted.grad = weight.grad.float()
        if step == 3:
            weights[0].grad[0, 0] = expected[0].grad[0, 0] = math.inf
        result = optimizer.step()
        scaler.unscale_(reference)
        nn.utils.clip_grad_norm_(expected, 0.5)
        scaler.step(reference)
        scaler.update()
        assert result.applied == (step != 3)
        assert optimizer.scaler.scale == scaler.get_scale()
    for master, wanted in zip(optimizer.master_weights.values(), expected, strict=True):
        torch.testing.assert_close(master.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
