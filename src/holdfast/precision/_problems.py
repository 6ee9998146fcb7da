"""What keeps a saved state from fitting an optimizer, in words. Compares, and changes nothing."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor

from holdfast.precision._masters import Pair, local_of
from holdfast.precision._remainder import rounded

if TYPE_CHECKING:
    from holdfast.precision._state import StateTree

_AS_LARGE: Final = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}


def weight_problems(
    pairs: Mapping[str, Pair], tree: "StateTree", *, with_masters: bool
) -> Iterator[str]:
    """Masters, unless they are not asked for, and training weights, if there are any."""
    if with_masters:
        yield from _named("master", pairs, tree.masters)
        yield from _unsound(pairs, tree.masters)
    if tree.training:
        yield from _named("training weight", pairs, tree.training)
        yield from _misfits(pairs, tree)
        if with_masters:
            yield from _mismatches(pairs, tree)


def state_problems(pairs: Mapping[str, Pair], tree: "StateTree", now: "StateTree") -> Iterator[str]:
    """All but the weights, compared with what the optimizer is ``now``."""
    yield from _inner_problems(pairs, tree.inner, now.inner)
    for problem in tree.scaler.problems():
        yield f"loss scaler: {problem}"
    if not 0 <= tree.skipped_steps <= tree.step_count:
        yield f"{tree.skipped_steps} of {tree.step_count} steps were skipped"


def _named(what: str, pairs: Mapping[str, Pair], found: Mapping[str, Any]) -> list[str]:
    missing = [f"no {what} of {name!r}" for name in pairs if name not in found]
    return missing + [f"a {what} of {name!r}, unknown here" for name in found if name not in pairs]


def _both(
    pairs: Mapping[str, Pair], found: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Pair, torch.Tensor]]:
    for name, pair in pairs.items():
        if name in found:
            yield pair, found[name]


def _unsound(pairs: Mapping[str, Pair], found: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for pair, value in _both(pairs, found):
        wanted = torch.float32 if pair.remainder is not None else pair.master.dtype
        if value.shape != pair.weight.shape:
            yield f"the master of {pair.name!r} is {_shape(value)}, not {_shape(pair.weight)}"
        elif value.dtype is not wanted:
            yield f"the master of {pair.name!r} is {value.dtype}, not {wanted}"
        elif not torch.isfinite(local_of(value)).all():
            yield f"the master of {pair.name!r} is not finite"


def _misfits(pairs: Mapping[str, Pair], tree: "StateTree") -> Iterator[str]:
    """Training weights that are not what the checkpoint itself says they are."""
    for pair, value in _both(pairs, tree.training):
        is_narrow = not pair.stays and not tree.has_fallback
        whole = torch.float32 if pair.remainder is not None else pair.master.dtype
        wanted = tree.options.precision.dtype if is_narrow else whole
        if value.shape != pair.weight.shape:
            yield f"training weight {pair.name!r} is {_shape(value)}, not {_shape(pair.weight)}"
        elif not isinstance(pair.weight, DTensor) and value.dtype is not wanted:
            yield f"training weight {pair.name!r} is {value.dtype}, not {wanted}"


def _mismatches(pairs: Mapping[str, Pair], tree: "StateTree") -> Iterator[str]:
    half_up = tree.options.master_storage == "remainder"
    for pair, training in _both(pairs, tree.training):
        master = tree.masters.get(pair.name)
        if master is None or master.shape != training.shape:
            continue
        value, weight = local_of(master), local_of(training)
        half = half_up and weight.dtype is torch.bfloat16
        if not torch.equal(rounded(value) if half else value.to(weight.dtype), weight):
            yield (
                f"the training weight {pair.name!r} is not what its master rounds to; say which is "
                "to be believed, by masters_from='checkpoint' without training weights, or 'model'"
            )


def _inner_problems(
    pairs: Mapping[str, Pair], saved: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    if saved.get("class") != now["class"]:
        yield f"it is the state of {saved.get('class')}, and the optimizer is {now['class']}"
        return
    held = [sorted(group["params"]) for group in saved.get("groups", [])]
    if held != [sorted(group["params"]) for group in now["groups"]]:
        yield "its parameter groups hold other parameters than the optimizer's"
    for name, state in saved.get("state", {}).items():
        if name not in pairs:
            yield f"state of {name!r}, unknown here"
            continue
        live = now["state"].get(name, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield from _unlike(f"{key} of {name!r}", key, value, live.get(key), pairs[name])


def _unlike(what: str, key: str, value: torch.Tensor, live: object, pair: Pair) -> Iterator[str]:
    """A tensor of the state beside the one that is there now, or, if there is none, beside the
    weight."""
    if isinstance(live, torch.Tensor):
        if value.shape != live.shape or value.dtype is not live.dtype:
            yield f"{what} is {value.dtype} {_shape(value)}, not {live.dtype} {_shape(live)}"
    elif key in _AS_LARGE and value.shape != pair.weight.shape:
        yield f"{what} is {_shape(value)}, not {_shape(pair.weight)}"


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
