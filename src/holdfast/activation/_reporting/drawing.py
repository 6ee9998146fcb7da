"""Elements, axes and labels of a page's pictures. Knows HTML and SVG, not what is drawn.

Only ``words`` and ``element`` make ``Markup`` of what they are given, and both escape: a name that
is ``<script>`` is shown as such, wherever it comes from.
"""

import html
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NewType, TypeAlias

from holdfast.activation._reporting.words import columns, plain, three_digits, unit_of

Markup = NewType("Markup", str)
_Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom

_VOID: Final = frozenset({"meta"})
_LETTER: Final = 7.4  # of bold 12 px in a wide font: better too wide than a label cut off
_LINE: Final = 15


def words(text: str) -> Markup:
    """``text`` as text: whatever is in it, no element."""
    return Markup(html.escape(plain(text)))


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("".join(parts))


def element(tag: str, *inside: Markup, **attributes: str | float) -> Markup:
    """An element; ``class_`` stands for class, other ``_`` in attributes' names for ``-``."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{words(_attribute(value))}"'
        for name, value in attributes.items()
    )
    if tag in _VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{''.join(inside)}</{tag}>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A picture's size, its margins, and the values along its sides."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    across: tuple[float, float]
    up: tuple[float, float]

    @property
    def right_edge(self) -> int:
        return self.width - self.right

    @property
    def floor(self) -> int:
        return self.height - self.bottom

    def x(self, value: float) -> float:
        return self.left + _share(value, self.across) * (self.right_edge - self.left)

    def y(self, value: float) -> float:
        return self.floor - _share(value, self.up) * (self.floor - self.top)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a picture is, and how many points it is drawn from."""

    class_: str
    width: int
    height: int
    left: int
    points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Words for a point, given in the picture's own units."""

    x: float
    y: float
    text: str
    class_: str


def picture(frame: Frame, about: str, class_: str, inside: Iterable[Markup]) -> Markup:
    """An inline SVG; ``about`` is what someone is told who does not see it."""
    return element(
        "svg",
        *inside,
        class_=f"picture {class_}",
        viewBox=f"0 0 {frame.width} {frame.height}",
        role="img",
        aria_label=about,
    )


def hint(text: str) -> Markup:
    """What is shown when the pointer rests on the element around it."""
    return element("title", words(text))


def line(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    return element("path", class_=class_, d=_path(points))


def area(points: Sequence[tuple[float, float]], floor: float, class_: str) -> Markup:
    """What is under a line, down to ``floor``."""
    closed = [(points[0][0], floor), *points, (points[-1][0], floor)] if points else []
    return element("path", class_=class_, d=f"{_path(closed)}Z" if closed else "")


def level(frame: Frame, y: float, class_: str) -> Markup:
    """A line straight across."""
    return line([(frame.left, y), (frame.right_edge, y)], class_)


def written(x: float, y: float, text: str, class_: str, anchor: str = "start") -> Markup:
    return element("text", words(text), x=x, y=y, class_=class_, text_anchor=anchor)


def byte_ticks(most: float, count: int) -> tuple[tuple[float, str], ...]:
    """Round numbers of one unit from 0 to ``most``, about ``count`` of them."""
    unit, word = unit_of(int(most))
    return tuple(
        (at * unit, f"{at:g} {word}" if at else "0") for at in ticks(0, most / unit, count)
    )


def ticks(least: float, most: float, count: int) -> tuple[float, ...]:
    """Round numbers from ``least`` to ``most``, about ``count`` of them."""
    rough = (most - least) / max(count, 1)
    if rough <= 0:
        return (least,)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= rough * 0.999)
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return tuple(round(at * step, 12) for at in range(first, last + 1))


def up_axis(frame: Frame, marks: Iterable[tuple[float, str]]) -> Iterator[Markup]:
    """Lines across at the marks, with their words at the left."""
    for value, text in marks:
        yield level(frame, frame.y(value), "grid")
        yield written(frame.left - 8, frame.y(value) + 4, text, "tick", "end")


def labelled(
    frame: Frame, labels: Iterable[Label], drawn: Iterable[tuple[float, float]]
) -> Iterator[Markup]:
    """Each label near its point: inside the picture, on no label before it, and on as little of
    what is ``drawn``, points on lines, as it can be without going far."""
    taken: list[_Box] = []
    strokes = tuple(drawn)
    for label in labels:
        wide = columns(label.text) * _LETTER
        spots = [
            (away + _covered(box, strokes) / 4, box)
            for away, box in _spots(label, wide)
            if _inside(box, frame) and not _hits(box, taken)
        ]
        # Where there is no room the label is at least whole.
        left = min(max(label.x - wide / 2, 0), max(frame.width - wide, 0))
        above = (left, label.y - 8 - _LINE, left + wide, label.y - 8)
        _, box = min(spots, key=operator.itemgetter(0), default=(0, above))
        taken.append(box)
        yield written(box[0], box[3] - 4, label.text, f"label {label.class_}")


def dense(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """A line's corners, and as many points between them that no label fits in between."""
    for (x, y), (end_x, end_y) in itertools.pairwise(points):
        pieces = max(int(max(abs(end_x - x), abs(end_y - y)) / 5), 1)
        for piece in range(pieces + 1):
            yield x + (end_x - x) * piece / pieces, y + (end_y - y) * piece / pieces


def percent(share: float) -> str:
    return f"{three_digits(share * 100).removesuffix('.00').removesuffix('.0')} %"


def _spots(label: Label, wide: float) -> Iterator[tuple[float, _Box]]:
    """Where a label could stand, and how far that is, in steps of a third of a line."""
    for away in range(10):
        for bottom in (label.y - 5 - away * _LINE / 3, label.y + 5 + _LINE + away * _LINE / 3):
            for left in (label.x + 8, label.x - 8 - wide, label.x - wide / 2):
                yield away, (left, bottom - _LINE, left + wide, bottom)


def _covered(box: _Box, points: Iterable[tuple[float, float]]) -> int:
    left, top, right, bottom = box
    return sum(left <= x <= right and top <= y <= bottom for x, y in points)


def _inside(box: _Box, frame: Frame) -> bool:
    left, top, right, bottom = box
    return left >= frame.left and right <= frame.width and top >= 0 and bottom <= frame.floor


def _hits(box: _Box, others: Iterable[_Box]) -> bool:
    left, top, right, bottom = box
    return any(
        left < other[2] and other[0] < right and top < other[3] and other[1] < bottom
        for other in others
    )


def _share(value: float, ends: tuple[float, float]) -> float:
    least, most = ends
    return (value - least) / (most - least) if most > least else 0.0


def _attribute(value: str | float) -> str:
    return value if isinstance(value, str) else _number(value)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _path(points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return ""
    return "M" + "L".join(f"{_number(x)},{_number(y)}" for x, y in points)
