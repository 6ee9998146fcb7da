"""Numbers and names in few words. Knows units and what a terminal or a page can show, no plan."""

import unicodedata
from collections.abc import Sequence
from typing import Final

_KIBI: Final = 1024
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def unit_of(count: int) -> tuple[int, str]:
    """The largest unit in which ``count`` is at least 1, as bytes and as a word."""
    size, power = abs(count), 0
    # 1023.7 KiB would be shown as 1,024 KiB: the next unit says it better.
    while power < len(_UNITS) - 1 and size >= (_KIBI - 0.5) * _KIBI**power:
        power += 1
    return _KIBI**power, _UNITS[power]


def in_bytes(count: int) -> str:
    """Three digits and a unit, such as ``1.41 GiB``."""
    unit, word = unit_of(count)
    return f"{count} B" if unit == 1 else f"{three_digits(count / unit)} {word}"


def exactly(count: int) -> str:
    return f"{count:,} bytes"


def in_seconds(duration: float) -> str:
    """Three digits and a unit, such as ``412 ms``."""
    if duration == 0:
        return "0 s"
    for factor, word in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(duration) * factor >= 0.9995:  # noqa: PLR2004 -- what is shown as 1.00
            return f"{three_digits(duration * factor)} {word}"
    return f"{three_digits(duration * 1e9)} ns"


def more(duration: float) -> str:
    """A duration over another one, such as ``+1.20 ms``."""
    return f"{_sign(duration)}{in_seconds(abs(duration))}"


def more_by_share(share: float) -> str:
    """A share over a whole, such as ``+11.3 %``."""
    shown = f"{abs(share):.1%}".replace("%", " %")
    return f"{'' if shown == '0.0 %' else _sign(share)}{shown}"


def as_share(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def plain(name: str) -> str:
    """``name`` without what would move the cursor, turn the text round or break its encoding.

    Module names are any string: a terminal must not obey them.
    """
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )


def shared_prefix(names: Sequence[str]) -> int:
    """How many letters up to a dot all names share: ``blocks.0`` and ``blocks.1`` are 0 and 1."""
    first, last = min(names, default=""), max(names, default="")
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return first.rfind(".", 0, same) + 1


def columns(text: str) -> int:
    """How many columns of a terminal ``text`` takes."""
    return sum(map(_columns_of, text))


def shortened(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, its middle left out: names differ at their ends."""
    if columns(text) <= width:
        return text
    if width < 2:  # noqa: PLR2004 -- no room for a letter and the dots
        return "…"[:width]
    tail = _cut(text[::-1], (width - 1) * 2 // 3)[::-1]
    return f"{_cut(text, width - 1 - columns(tail))}…{tail}"


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` columns, broken at spaces where there are any."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if columns(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        line = word
        while columns(line) > width:
            head = _cut(line, width) or line[0]
            lines.append(head)
            line = line[len(head) :]
    return [*lines, line] if line else lines


def three_digits(value: float) -> str:
    size = abs(value)
    for digits, below in ((2, 9.995), (1, 99.95)):
        if size < below:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def _sign(value: float) -> str:
    return "\N{MINUS SIGN}" if value < 0 else "+"


def _columns_of(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _cut(text: str, width: int) -> str:
    taken = 0
    for place, letter in enumerate(text):
        taken += _columns_of(letter)
        if taken > width:
            return text[:place]
    return text
