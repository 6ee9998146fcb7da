"""Masters as BF16 weights and 16-bit remainders: nothing is lost, and steps are the same."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from holdfast.precision import MixedPrecisionOptimizer, MixedPrecisionOptions
from holdfast.precision._blocks import FUSED_BLOCK
from holdfast.precision._remainder import joined, rounded, split_into

PART = 1 << 22
EDGES = [
    *(0x00000000, 0x80000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF),
    *(0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F817FFF, 0x3F818000, 0x3F818001, 0xBF808000),
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),
]
NANS = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF80FFFF, 0x7FFF8000, 0xFFFF7FFF]


def patterns(bits):
    """FP32 values of these bits."""
    wide = torch.as_tensor(bits, dtype=torch.int64)
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32).view(torch.float32)


def assert_exact(values):
    upper = torch.empty_like(values, dtype=torch.bfloat16)
    remainder = torch.empty_like(values, dtype=torch.int16)
    split_into(values.clone(), upper, remainder)
    back = joined(upper, remainder)
    nan = values.isnan()
    same = back.view(torch.int32) == values.view(torch.int32)
    assert (same | nan).all()
    assert torch.equal(back.isnan(), nan)
    assert torch.equal(upper.isnan(), nan)
    return upper


def test_edges():
    values = patterns(EDGES + NANS)
    upper = assert_exact(values)
    finite = values[values.abs() < 3.38e38]  # the largest of BF16, from where all is infinite
    error = (rounded(finite).double() - finite.double()).abs()
    nearest = (finite.bfloat16().double() - finite.double()).abs()
    assert torch.equal(error, nearest)  # half up or half to even: as near
    assert upper[EDGES.index(0x3F808000)].item() == 1 + 2**-7
    assert upper[EDGES.index(0xBF808000)].item() == -(1 + 2**-7)  # away from 0, either way
    assert upper[EDGES.index(0x7F7FFFFF)].item() == float("inf")


def test_a_sample_of_all_bits():
    drawn = torch.Generator().manual_seed(0)
    assert_exact(patterns(torch.randint(0, 1 << 32, (1 << 21,), generator=drawn)))
    for top in (0x0000, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xFF80, 0xFFFF):
        assert_exact(patterns((top << 16) + torch.arange(1 << 16)))


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sixteenth", range(16))
def test_all_bits(sixteenth):
    """2³² patterns, of which 16 tests have a sixteenth each."""
    for start in range(sixteenth << 28, (sixteenth + 1) << 28, PART):
        assert_exact(patterns(torch.arange(start, start + PART)))


FUSED = {
    "AdamW": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adam": lambda p: Adam(p, lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda p: SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def made(make, storage, shapes=((37, 5), (11,), (), (4, 3, 2, 2))):
    drawn = torch.Generator().manual_seed(3)
    weights = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]
    if len(shapes) == 4:
        weights[3].data = weights[3].data.to(memory_format=torch.channels_last)
    chosen = MixedPrecisionOptions.for_bf16(master_storage=storage, max_grad_norm=1.0)
    return MixedPrecisionOptimizer(make(weights), chosen)


def trained(optimizer, steps=4):
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        for weight in optimizer.training_weights.values():
            weight.grad = torch.randn(weight.shape, generator=drawn).to(weight)
        assert optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", FUSED)
def test_masters_are_those_of_fp32_storage(kind):
    whole, split = trained(made(FUSED[kind], "fp32")), trained(made(FUSED[kind], "remainder"))
    for name, master in whole.master_weights.items():
        assert torch.equal(split.master_weights[name], master)
        assert split.master_weights[name].dtype is torch.float32
        assert torch.equal(split.training_weights[name], rounded(master))


def test_in_blocks():
    shapes = ((FUSED_BLOCK + 12_345,), (7,))
    whole = trained(made(FUSED["AdamW"], "fp32", shapes), 2)
    split = trained(made(FUSED["AdamW"], "remainder", shapes), 2)
    for name, master in whole.master_weights.items():
        assert torch.equal(split.master_weights[name], master)


def test_bytes_per_parameter():
    """2 of weight, 2 of remainder, 8 of moments."""
    optimizer = trained(made(FUSED["AdamW"], "remainder", ((1000,),)), 1)
    (weight,) = optimizer.training_weights.values()
    ((pair,),) = (optimizer.masters.pairs,)
    held = [weight, pair.remainder, *optimizer.state[weight].values()]
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held
    }
    assert sum(sizes.values()) == 12 * 1000 + 4


@pytest.mark.parametrize(("saved", "loaded"), [("remainder", "fp32"), ("fp32", "remainder")])
def test_a_state_fits_either_storage(saved, loaded):
    first = trained(made(FUSED["AdamW"], saved))
    state = copy.deepcopy(first.state_dict())
    other = made(FUSED["AdamW"], loaded)
    other.load_state_dict(state)
    trained(first)
    trained(other)
    for name, master in first.master_weights.items():
        assert torch.equal(other.master_weights[name], master)


def test_falling_back_loses_nothing():
    optimizer = trained(made(FUSED["AdamW"], "remainder"))
    before = optimizer.master_weights
    optimizer.set_fallback(fallback=True)
    for name, weight in optimizer.training_weights.items():
        assert torch.equal(weight, before[name])
        assert weight.dtype is torch.float32
    trained(optimizer, 1)


@pytest.mark.parametrize("make", [AdamW, torch.optim.RMSprop])
def test_other_optimizers_have_no_remainders(make):
    with pytest.raises(ValueError, match="fused=True"):
        made(make, "remainder")
