"""Every recipe of the table is exact: what was dropped comes back bit for bit, in the same strides,
whatever the dtype, the layout and the values were."""

import contextlib

import pytest
import torch
from recipe_cases import CASES
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

from holdfast.activation._recipes.table import RECIPES

SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42, -1e-42, 3e38, 1e4)


def test_every_recipe_has_cases():
    assert CASES.keys() == RECIPES.keys()


def _plain(tensor):
    return tensor


def _transposed(tensor):
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def _apart(tensor):
    """Every other element of a larger memory, from the seventh on."""
    memory = torch.full((7 + 2 * tensor.numel(),), float("nan"), dtype=tensor.dtype)
    strides = [2 * stride for stride in torch.empty(tensor.shape).stride()]
    return torch.as_strided(memory, tensor.shape, strides, 7).copy_(tensor)


def _channels_last(tensor):
    forms = {4: torch.channels_last, 5: torch.channels_last_3d}
    form = forms.get(tensor.dim(), torch.contiguous_format)
    return tensor.contiguous(memory_format=form)


def _special(tensor):
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(tensor.dtype)
    flat = tensor.flatten()
    some = flat[:: max(1, flat.numel() // 30)]
    some.copy_(values.repeat(1 + len(some) // len(values))[: len(some)])
    return flat.view(tensor.shape)


LAYOUTS = {
    "plain": _plain,
    "transposed": _transposed,
    "apart": _apart,
    "channels last": _channels_last,
    "special": _special,
}
# Their statistics are rounded more than the arithmetic was, so the epsilon cannot be checked.
REFUSED = {("NativeLayerNormBackward0", torch.bfloat16)}
DTYPES = {
    "float32": (torch.float32, LAYOUTS),
    "float64": (torch.float64, ("plain", "special")),
    "bfloat16": (torch.bfloat16, ("plain", "transposed", "special")),
}


def _leaves(shapes, dtype, layout):
    generator = torch.Generator().manual_seed(3)
    made = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [layout(each).detach().requires_grad_() for each in made]


def _call(function, leaves):
    """The function of tensors that are no leaves, and what uses its results and saves them."""
    torch.default_generator.manual_seed(5)  # torch.manual_seed notes a stack for each device
    made = function(*(each.neg() for each in leaves))
    return [each.sin() for each in tensors_in(made) if each.grad_fn is not None]


def _kernel_is_missing(error):
    return "not implemented for" in str(error) or "only supported for" in str(error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CASES)
def test_what_is_dropped_comes_back_bit_for_bit(kind, dtype):
    tried = 0
    with without_onednn() if dtype == "bfloat16" else contextlib.nullcontext():
        for number, (function, shapes) in enumerate(CASES[kind]):
            for layout in DTYPES[dtype][1]:
                leaves = _leaves(shapes, DTYPES[dtype][0], LAYOUTS[layout])
                try:
                    expected = gradients(loss_of(_call(function, leaves)), leaves)
                except (RuntimeError, NotImplementedError) as error:
                    if not _kernel_is_missing(error):
                        raise
                    continue
                tried += _check(kind, (number, layout), function, leaves, expected)
    if not tried:
        pytest.skip(f"torch has no {kind} of {dtype} here")


def _check(kind, case, function, leaves, expected):
    output = _call(function, leaves)
    found = compiled(output, alive=leaves)
    if kind not in {entry.kind for entry in found.graph.nodes}:
        return 0  # in this layout torch does something else
    if kind not in {step.kind for item in found.items for step in item.steps}:
        assert (kind, leaves[0].dtype) in REFUSED, (case, found.items)
        return 1
    before = saved_in(found.graph)
    shapes = {place: (each.size(), each.stride()) for place, each in before.items()}
    before = {place: each.detach().clone() for place, each in before.items()}
    tried = found.dropping().tried(roots_of(output), 1)
    assert all(each.is_exact for each in tried), (case, found.items, tried)
    assert found.dropping().drop(roots_of(output)), case
    after = saved_in(graph_of(output))
    assert after.keys() == before.keys()
    for place, tensor in after.items():
        assert (tensor.size(), tensor.stride()) == shapes[place], (case, place)
        assert same(tensor, before[place]), (case, place)
    got = gradients(loss_of(output), leaves)
    assert all_same(got, expected), case
    return 1
