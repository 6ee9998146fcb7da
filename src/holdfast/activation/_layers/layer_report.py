"""What became of a model's layers, in a table for people. Knows rows, not where they come from."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One candidate. ``dropped_bytes`` is ``None`` as long as nobody measured it."""

    name: str
    recomputed: bool
    dropped_bytes: int | None
    replays: int
    replay_ms: float


_HEAD: Final = ("layer", "activations", "bytes", "replays", "total ms")


def table(rows: Iterable[LayerRow]) -> str:
    """A line for each row below a line of headings, in columns. ``total ms`` is of all replays."""
    cells = [_HEAD, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(_line(line, widths) for line in cells)


def _cells(row: LayerRow) -> tuple[str, ...]:
    return (
        row.name,
        "recomputed" if row.recomputed else "kept",
        "-" if row.dropped_bytes is None else f"{row.dropped_bytes:,}",
        str(row.replays),
        f"{row.replay_ms:.1f}",
    )


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    words, numbers = cells[:2], cells[2:]
    left = [cell.ljust(width) for cell, width in zip(words, widths, strict=False)]
    right = [cell.rjust(width) for cell, width in zip(numbers, widths[2:], strict=True)]
    return "  ".join([*left, *right])
