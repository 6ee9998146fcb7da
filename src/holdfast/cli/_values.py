"""The plain values of a state by their place: ``optimizer.lr``. Leaves tensors out. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.format import LeafRef, PerRank

_SHOWN_CHARS = 100


def flat_values(value: object) -> dict[str, object]:
    """Every value that is neither a tensor nor a container, by where it stands."""
    return dict(_walk(value, ""))


def _walk(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, LeafRef):
        return
    if isinstance(value, Mapping):
        inner = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, PerRank):
        inner = [(f"@{rank}", each) for rank, each in enumerate(value.values)]
    elif isinstance(value, list | tuple) and any(_is_inner(each) for each in value):
        inner = [(str(nth), each) for nth, each in enumerate(value)]
    else:
        yield path, value
        return
    for step, each in inner:
        yield from _walk(each, f"{path}.{step}" if path else step)


def _is_inner(value: object) -> bool:
    """Whether a list that has this is shown by its members, and not as one value."""
    return isinstance(value, LeafRef | Mapping | PerRank | list | tuple)


def shown(value: object) -> str:
    """A value as Python writes it, cut if it is long."""
    text = repr(value)
    return (
        text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"
    )


def plain(value: object) -> Any:
    """A value for JSON: lists and tuples as arrays, what it has no word for as Python writes it."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
