"""What ``--slice "0:10,3"`` means for a tensor of some shape. Pure."""

from dataclasses import dataclass

from holdfast.cli._exits import MisuseError
from holdfast.reshard import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A box of a tensor, and the shape of what is left once the dimensions that a single number
    stood for are dropped."""

    box: Box
    shape: tuple[int, ...]


def parse_slice(text: str | None, shape: tuple[int, ...]) -> Slice:
    """As Python reads ``tensor[text]``, without steps and ``...``. What else there is is misuse."""
    words = [] if text is None else [word.strip() for word in text.strip("[] ").split(",")]
    if len(words) > len(shape):
        raise MisuseError(
            f"--slice {text!r} has {len(words)} parts for a tensor of {len(shape)} dimensions"
        )
    start, stop, left = [0] * len(shape), [*shape], [*shape]
    for dim, word in enumerate(words):
        low, high, single = _bounds(word, shape[dim], f"--slice {text!r}, dimension {dim}")
        start[dim], stop[dim] = low, max(low, high)
        left[dim] = -1 if single else stop[dim] - low
    return Slice(
        box=Box(tuple(start), tuple(stop)), shape=tuple(extent for extent in left if extent >= 0)
    )


def _bounds(word: str, extent: int, where: str) -> tuple[int, int, bool]:
    """From, up to, and whether it is a single index."""
    first, colon, rest = word.partition(":")
    if ":" in rest:
        raise MisuseError(f"{where}: {word!r} has a step, and steps are not offered")
    try:
        low = int(first) if first or not colon else None
        high = int(rest) if rest else None
    except ValueError:
        raise MisuseError(
            f"{where}: {word!r} must be a number or two, as 3, 0:10, :10, -2:"
        ) from None
    if not colon:
        index = low or 0
        if not -extent <= index < extent:
            raise MisuseError(f"{where}: {index} is outside, the size is {extent}")
        return index % extent, index % extent + 1, True
    return *slice(low, high).indices(extent)[:2], False
