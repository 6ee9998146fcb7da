"""The names of entries in a shard: a tensor's name, and the box of it that is stored.

Knows nothing of files. A whole tensor keeps its name. A slice's entry is ``name[a:b,c:d]``, start
and stop of every dimension. A whole tensor whose own name could be mistaken for a slice's or
for one of the format's names carries its whole box too (``[]`` if it has no dimensions).
"""

from collections.abc import Sequence
from typing import Final

from holdfast._checks import text

Bounds = tuple[tuple[int, int], ...]
"""Start and stop per dimension of a tensor."""

MAX_NAME_CHARS: Final = 65_536
MAX_DIMS: Final = 64
MAX_EXTENT: Final = 2**63 - 1
SHOWN_CHARS: Final = 200
"""How much of a name an error shows."""

_BOX_CHARS: Final = frozenset("0123456789:,")
_DIGITS: Final = frozenset("0123456789")
_MAX_DIGITS: Final = len(str(MAX_EXTENT))
_RESERVED_START: Final = "__holdfast"
_METADATA_KEY: Final = "__metadata__"


def entry_name(name: str, shape: Sequence[int], box: Bounds | None) -> str:
    """The entry that holds ``box`` of the tensor, or, with ``None``, all of it.

    ``shape`` is that of the box. ``ValueError`` if the name is empty, too long or not Unicode.
    """
    check_name(name)
    if box is None:
        if not needs_box(name):
            return name
        box = whole_box(shape)
    return f"{name}[{','.join([f'{start}:{stop}' for start, stop in box])}]"


def entry_of_box(name: str, tensor_shape: Sequence[int], box: Bounds) -> str:
    """The entry that holds ``box`` of a tensor of ``tensor_shape``: the rule of the format, by
    which a reader finds a box in a shard."""
    whole = whole_box(tensor_shape)
    return entry_name(name, tensor_shape, None if box == whole else box)


def parse_entry_name(entry: str) -> tuple[str, Bounds | None]:
    """The tensor's name, and the box if the entry carries one; undoes ``entry_name``.

    ``ValueError`` for what ``entry_name`` never returns.
    """
    opening = _box_opening(entry)
    if opening is None:
        if _is_reserved(entry):
            raise ValueError("the name is reserved")
        check_name(entry)
        return entry, None
    name = entry[:opening]
    check_name(name)
    return name, _parse_box(entry[opening + 1 : -1])


def whole_box(shape: Sequence[int]) -> Bounds:
    """The box that is all of a tensor of that shape."""
    return tuple([(0, size) for size in shape])


def box_shape(box: Bounds) -> tuple[int, ...]:
    """How large a box is."""
    return tuple([stop - start for start, stop in box])


def needs_box(name: str) -> bool:
    """Whether an entry for this whole tensor must carry its box to be told apart."""
    return _is_reserved(name) or _box_opening(name) is not None


def check_name(name: str) -> None:
    """``ValueError`` unless a tensor can have that name."""
    if not (type(name) is str and name.isascii() and 0 < len(name) <= MAX_NAME_CHARS):
        text("name", name, most=MAX_NAME_CHARS)


def _is_reserved(name: str) -> bool:
    return name == _METADATA_KEY or name.startswith(_RESERVED_START)


def _box_opening(entry: str) -> int | None:
    if not entry.endswith("]"):
        return None
    opening = entry.rfind("[")
    if opening < 0 or not _BOX_CHARS.issuperset(entry[opening + 1 : -1]):
        return None
    return opening


def _parse_box(inner: str) -> Bounds:
    if not inner:
        return ()
    parts = inner.split(",", MAX_DIMS)
    if len(parts) > MAX_DIMS:
        raise ValueError(f"the box has more than {MAX_DIMS} dimensions")
    return tuple([_parse_range(part) for part in parts])


def _parse_range(part: str) -> tuple[int, int]:
    start, colon, stop = part.partition(":")
    if not colon or not _is_canonical(start) or not _is_canonical(stop):
        raise ValueError(f"{part[:60]!r} is no range of a box")
    first, last = int(start), int(stop)
    if not first <= last <= MAX_EXTENT:
        raise ValueError(f"{part!r} is no range of a box")
    return first, last


def _is_canonical(digits: str) -> bool:
    return (
        0 < len(digits) <= _MAX_DIGITS
        and _DIGITS.issuperset(digits)
        and (digits[0] != "0" or digits == "0")
    )
