"""What keeps a saved state from fitting an optimizer, in words. Compares, and changes nothing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from holdfast.precision._hyperparameters import hyper_problems
from holdfast.precision._kernels import are_fused
from holdfast.precision._masters import Pair, is_cast
from holdfast.precision._options import Precision
from holdfast.precision._state_tree import StateTree
from holdfast.precision._structure import unsound

_AS_LARGE: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def weight_problems(
    pairs: Mapping[str, Pair], tree: StateTree, now: StateTree, *, with_masters: bool
) -> Iterator[str]:
    """Masters, unless they are not asked for, and training weights, if there are any."""
    if with_masters:
        yield from _named("master", pairs, tree.masters)
        yield from _misfit_masters(pairs, tree.masters)
        # One that is frozen may be anything, as a mask of infinities.
        trained = {name for name, pair in pairs.items() if pair.weight.requires_grad}
        yield from unsound({name: m for name, m in tree.masters.items() if name in trained})
    if tree.training:
        yield from _named("training weight", pairs, tree.training)
        yield from _misfits(pairs, tree, now)
        if with_masters:
            yield from _mismatches(pairs, tree)
        else:
            yield from unsound(tree.training)


def state_problems(pairs: Mapping[str, Pair], tree: StateTree, now: StateTree) -> Iterator[str]:
    """All but the weights, compared with what the optimizer is ``now``."""
    yield from _inner_problems(pairs, tree.inner, now.inner)
    if not 0 <= tree.skipped_steps <= tree.step_count:
        yield f"{tree.skipped_steps} of {tree.step_count} steps were skipped"


def listed(problems: Sequence[str]) -> str:
    return "".join(f"\n- {problem}" for problem in problems)


def _named(what: str, pairs: Mapping[str, Pair], found: Mapping[str, Any]) -> list[str]:
    missing = [f"no {what} of {name!r}" for name in pairs if name not in found]
    return missing + [f"a {what} of {name!r}, unknown here" for name in found if name not in pairs]


def _both(
    pairs: Mapping[str, Pair], found: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Pair, torch.Tensor]]:
    for name, pair in pairs.items():
        if name in found:
            yield pair, found[name]


def _misfit_masters(pairs: Mapping[str, Pair], found: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for pair, value in _both(pairs, found):
        if value.shape != pair.weight.shape:
            yield f"the master of {pair.name!r} is {_shape(value)}, not {_shape(pair.weight)}"
        elif value.dtype is not pair.dtype:
            yield f"the master of {pair.name!r} is {value.dtype}, not {pair.dtype}"


def _misfits(pairs: Mapping[str, Pair], tree: StateTree, now: StateTree) -> Iterator[str]:
    """Training weights that are not what the checkpoint itself says they are."""
    other_precision = tree.options.precision is not now.options.precision
    for pair, value in _both(pairs, tree.training):
        is_narrow = not pair.stays and not tree.has_fallback
        wanted = tree.options.precision.dtype if is_narrow else pair.dtype
        if value.shape != pair.weight.shape:
            yield f"training weight {pair.name!r} is {_shape(value)}, not {_shape(pair.weight)}"
        elif other_precision or isinstance(pair.weight, DTensor):
            continue
        elif value.dtype is not wanted:
            yield f"training weight {pair.name!r} is {value.dtype}, not {wanted}"


def _mismatches(pairs: Mapping[str, Pair], tree: StateTree) -> Iterator[str]:
    half_up = tree.options.master_storage == "remainder"
    for pair, weight in _both(pairs, tree.training):
        master = tree.masters.get(pair.name)
        if master is None or master.shape != weight.shape:
            continue
        if not is_cast(master, weight, half_up=half_up):
            yield (
                f"the training weight {pair.name!r} is not what its master rounds to; say which is "
                "to be believed, by masters_from='checkpoint' without training weights, or 'model'"
            )


def _inner_problems(
    pairs: Mapping[str, Pair], saved: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    if saved["class"] != now["class"]:
        yield f"it is the state of {saved['class']}, and the optimizer is {now['class']}"
        return
    held = [sorted(group["params"]) for group in saved["groups"]]
    if held != [sorted(group["params"]) for group in now["groups"]]:
        yield "its parameter groups hold other parameters than the optimizer's"
    else:
        yield from hyper_problems(saved["groups"], now["groups"])
    if not are_fused(saved["groups"]) and any(p.remainder is not None for p in pairs.values()):
        yield (
            "its optimizer was not fused, and master_storage='remainder' is for fused ones: load "
            "it with master_storage='fp32'"
        )
    for name, state in saved["state"].items():
        if name not in pairs:
            yield f"state of {name!r}, unknown here"
            continue
        for key in _needed(saved, name) if state else ():
            if not isinstance(state.get(key), torch.Tensor):
                yield f"there is no {key} of {name!r}, or it is no tensor"
        for key, value in state.items():
            live = now["state"].get(name, {}).get(key)
            yield from _unlike(f"{key} of {name!r}", key, value, live, pairs[name])


def _needed(saved: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Tensors that a parameter has in its state if it has any."""
    if saved["class"] not in {"Adam", "AdamW"}:
        return ()
    own = [group for group in saved["groups"] if name in group["params"]]
    is_amsgrad = any(group.get("amsgrad") for group in own)
    return ("step", *_AS_LARGE[: 3 if is_amsgrad else 2])


def _unlike(what: str, key: Any, value: object, live: object, pair: Pair) -> Iterator[str]:
    """What is in the state beside what is there now, or, if there is nothing, beside the weight."""
    if not isinstance(key, str):
        yield f"{what} is no name"
    elif isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            yield f"{what} is a {value.layout} tensor on {value.device}"
        elif isinstance(live, torch.Tensor):
            if value.shape != live.shape or value.dtype is not live.dtype:
                yield f"{what} is {value.dtype} {_shape(value)}, not {live.dtype} {_shape(live)}"
        elif key in _AS_LARGE and (value.shape, value.dtype) != (pair.weight.shape, pair.dtype):
            shape, wanted = _shape(value), _shape(pair.weight)
            yield f"{what} is {value.dtype} {shape}, not {pair.dtype} {wanted}"
        elif key == "step" and value.numel() != 1:
            yield f"{what} is {_shape(value)}, not a number"
    elif (isinstance(live, torch.Tensor) or key in _AS_LARGE) and value is not None:
        yield f"{what} is {value!r:.60}, not a tensor"


def takes(own: Precision, saved: Precision) -> bool:
    """Whether an optimizer of one precision goes on with what was trained in another. One of FP32
    does: the masters have it all."""
    return own in {saved, Precision.FP32}


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
