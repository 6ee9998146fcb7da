"""Words for people: sizes, ages, tables, one line of trouble. Knows terminals, not checkpoints.

Names come from checkpoints that anybody may have written, so nothing is printed that could move a
cursor or be taken for markup.
"""

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.errors import StorageError

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_KIBI: Final = 1024
_FOLDED_CHARS: Final = 14
"""A column of a drawn table is not folded to less than that."""

_AGES: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def clean(text: object) -> str:
    """Text on one line, with whatever a terminal would act on written as an escape."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )


def say(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"holdfast: {clean(text.replace(chr(10), '; '))}\n")


def size(nbytes: float) -> str:
    """A number of bytes, as ``1.5 GiB``."""
    value, unit = float(nbytes), 0
    while value >= _KIBI and unit < len(_UNITS) - 1:
        value, unit = value / _KIBI, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{value:.0f} B"


def age(seconds: float) -> str:
    """A time that has passed, in its largest unit: ``3 d``."""
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


def shape(dims: Sequence[int]) -> str:
    """``[3, 4]``, and ``[]`` for a single number."""
    return f"[{', '.join(map(str, dims))}]"


def counted(number: int, what: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def terminal() -> bool:
    """Whether somebody is looking at what is printed."""
    return sys.stdout.isatty()


def put(text: str = "") -> None:
    """A line on stdout."""
    with _printing():
        sys.stdout.write(f"{text}\n")


def flush() -> None:
    """Be sure that all lines were written."""
    with _printing():
        sys.stdout.flush()


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"what was to be printed cannot be written: {error.strerror}") from error


def put_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """A table: drawn on a terminal that has room for it, aligned text elsewhere. Columns named in
    ``right`` are aligned there. Cells are cleaned here."""
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    least = [min(width, _FOLDED_CHARS) for width in widths]
    room = shutil.get_terminal_size().columns - 2 * (len(header) - 1)
    if terminal() and sum(least) <= room:
        _draw(header, cells, right, least)
        return
    for row in (header, *cells):
        words = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        put("  ".join(words).rstrip())


def _draw(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
    least: Sequence[int],
) -> None:
    from rich import box  # noqa: PLC0415 -- an optional dependency, and not for pipes
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for name, width in zip(header, least, strict=True):
        justify: Any = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", min_width=width)
    for row in rows:
        bad = any(cell.startswith(("DAMAGED", "bad")) for cell in row)
        style = "red" if bad else "yellow" if {"warn", "NEWER"} & {*row} else ""
        table.add_row(*(Text(cell, style=style) for cell in row))
    Console().print(table)


def put_json(document: Mapping[str, Any]) -> None:
    """One JSON document. Numbers that JSON has no word for are ``"nan"``, ``"inf"``, ``"-inf"``."""
    put(json.dumps(_plain(document), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
