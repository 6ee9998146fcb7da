"""Which modules of a model can be checkpointed. Knows names and classes, not tensors.

The repeated layers of a model are found by its shape: modules of one class, two or more, side by
side in a ``ModuleList``, ``ModuleDict`` or ``Sequential``. Lists inside such a list are looked
through, and the outermost such layers are taken: blocks, not the experts inside each of them. That
is also its blind spot: of stages that each hold blocks, the stages are taken.
"""

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Role = Literal["list", "chain", "plain", "layer"]
"""``list``: holds others and has no forward. ``chain``: a ``Sequential``. ``plain``: a single
operation of torch, of which nothing but the input is kept. ``layer``: any other."""

_TOLD_NAMES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module and what is inside it, as far as the choice of layers goes."""

    name: str
    kind: str
    role: Role
    identity: int
    """Equal where one module is found under several names."""

    parts: tuple["Part", ...] = ()


def part_of(module: Any, name: str = "") -> Part:
    """``module`` as a part, called ``name``."""
    cls = type(module)
    inside = name and f"{name}."
    return Part(
        name=name,
        kind=f"{cls.__module__}.{cls.__qualname__}",
        role=_role(module),
        identity=id(module),
        parts=tuple(
            part_of(child, inside + key)
            for key, child in module._modules.items()  # noqa: SLF001 -- named_children() hides repeats
            if child is not None
        ),
    )


def repeated(model: Part, naming: str = "CheckpointConfig(layers=...)") -> tuple[Part, ...]:
    """The repeated layers of ``model`` in its order, or ``ValueError`` if it has none, which tells
    how layers are named by hand: ``naming``."""
    found = _each_once(_repeated(model))
    if not found:
        raise ValueError(
            f"{model.kind} has no repeated layers: no ModuleList, ModuleDict or Sequential in it "
            "holds two modules of one class that are more than a single operation. Name the "
            f"layers, as in {naming}; it has {_listed(_callable(model))}"
        )
    return _apart(found, "layers")


def named(model: Part, patterns: Iterable[str], what: str = "layers") -> tuple[Part, ...]:
    """What ``patterns`` name in ``model``, in its order; ``ValueError`` where one names nothing,
    or a module that has no forward, or modules of which one is inside another. ``what`` the
    argument is called."""
    parts = tuple(_callable(model))
    wanted = {
        part.identity for pattern in patterns for part in _matching(model, parts, pattern, what)
    }
    return _apart(_each_once(part for part in parts if part.identity in wanted), what)


def _role(module: Any) -> Role:
    forward = module.__dict__.get("forward", type(module).forward)
    if forward is nn.Module.forward:
        return "list"
    if forward is nn.Sequential.forward:
        return "chain"
    of_torch = type(module).__module__.startswith("torch.nn.")
    # A recurrent layer is one module, but keeps the gates of every step.
    if of_torch and not module._modules and not isinstance(module, nn.RNNBase):  # noqa: SLF001 -- as above
        return "plain"
    return "layer"


def _repeated(part: Part) -> Iterator[Part]:
    if part.role in {"layer", "plain"}:
        for each in part.parts:
            yield from _repeated(each)
        return
    members = [(each, tuple(_repeated(each))) for each in _members(part)]
    counts = Counter(each.kind for each, inner in members if _is_one(each, inner))
    for each, inner in members:
        if _is_one(each, inner) and counts[each.kind] > 1:
            yield each
        else:
            yield from inner


def _members(part: Part) -> Iterator[Part]:
    for each in part.parts:
        if each.role == "list":
            yield from _members(each)
        else:
            yield each


def _is_one(part: Part, inner: tuple[Part, ...]) -> bool:
    """Whether a part counts as one layer. A chain of repeated layers is not: it is a place."""
    return part.role == "layer" or (part.role == "chain" and not inner)


def _callable(part: Part) -> Iterator[Part]:
    """All parts inside ``part`` that have a forward, outer ones first."""
    for each in part.parts:
        if each.role != "list":
            yield each
        yield from _callable(each)


def _matching(model: Part, parts: Sequence[Part], pattern: str, what: str) -> Iterator[Part]:
    last = ""
    matched = False
    for part in parts:
        if part.name == pattern or fnmatch.fnmatchcase(part.name, pattern):
            matched = True
            if not last or not part.name.startswith(f"{last}."):
                last = part.name
                yield part
    if not matched:
        near = difflib.get_close_matches(pattern, [part.name for part in parts], _TOLD_NAMES, 0.5)
        told = (
            f"near to it are {', '.join(map(repr, near))}" if near else f"it has {_listed(parts)}"
        )
        raise ValueError(
            f"{what}: {pattern!r} matches no module with a forward in {model.kind}; {told}"
        )


def _each_once(parts: Iterable[Part]) -> tuple[Part, ...]:
    found: dict[int, Part] = {}
    for part in parts:
        found.setdefault(part.identity, part)
    return tuple(found.values())


def _apart(parts: tuple[Part, ...], what: str) -> tuple[Part, ...]:
    chosen = {part.identity: part for part in parts}
    for outer in parts:
        for inner in _callable(outer):
            if inner.identity in chosen:
                raise ValueError(
                    f"{what}: {inner.name!r} is inside {outer.name!r}, and both are named: it "
                    "would be recomputed twice. Name one of them"
                )
    return parts


def _listed(parts: Iterable[Part]) -> str:
    names = [repr(part.name) for part in parts]
    more = len(names) - _TOLD_NAMES
    told = ", ".join(names[:_TOLD_NAMES]) or "no modules with a forward"
    return f"{told} and {more} more" if more > 0 else told
