"""Draws charts as SVG: lines with bands on two axes, and bars with whiskers. Knows no benchmark.

A chart is as wide as a phone, so that its text can be read there; a page sets several side by side.
Colours follow the reader's light or dark scheme. Whoever points at a mark is told its numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 360
LEFT, RIGHT = 48, 12
PLOT_HEIGHT = 190
LINE = 15
LETTER = 6.8
"""The height of a line of text, and how wide a letter of it is, about."""

STYLE = """
.hf { --ink: #1d2430; --soft: #5d6778; --rule: #d9dee6;
  --c0: #00796b; --c1: #c2571a; --c2: #5b5fc7; --c3: #7d8899; --c4: #b0307a; --c5: #a47a00; }
@media (prefers-color-scheme: dark) { .hf { --ink: #e7ebf2; --soft: #a3adbd; --rule: #39414f;
  --c0: #3cc9b4; --c1: #f0955a; --c2: #9ea2ff; --c3: #7d8899; --c4: #f07ab8; --c5: #e0b840; } }
.hf text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.hf .title { font-weight: 600; font-size: 13px; fill: var(--ink); }
.hf .label { fill: var(--ink); }
.hf .rule { stroke: var(--rule); stroke-width: 1; }
.hf .one { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
.hf .whisker { stroke: var(--ink); stroke-width: 1.2; }
.hf rect { opacity: .92; }
.hf .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.hf .band { stroke: none; opacity: .16; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A number and the range it was found in. A bar has no ``at``."""

    value: float
    low: float
    high: float
    at: float = 0.0


COLOURS = 6
KNOWN = {"holdfast": 0, "torch": 1, "safetensors": 2, "DCP at its best": 4, "DCP": 3, "Orbax": 5}
"""Colours of those that are in many charts, by how their names begin."""

Series = Mapping[str, Sequence[Point]]
Show = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From the least to the most that is shown, and the numbers that are written at it."""

    least: float
    most: float
    ticks: Sequence[float]
    show: Show
    log: bool

    def share(self, value: float) -> float:
        """How far along it ``value`` is, from 0 to 1."""
        if self.log:
            value = max(value, self.least)
            return math.log(value / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)


def number(value: float) -> str:
    """Short: 0.0004, 0.25, 3, 40, 5k, 2M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.0e}"


def lines(
    title: str, series: Series, *, x: str, y: str, show_x: Show = number, log: bool = True
) -> str:
    """One line for each of ``series``, with a band from low to high."""
    points = [point for each in series.values() for point in each]
    across = sorted({point.at for point in points})
    heights = [edge for point in points for edge in (point.low, point.high)]
    horizontal = (
        Axis(least=across[0], most=across[-1], ticks=_thinned(across), show=show_x, log=True)
        if log and len(across) > 1
        else linear([0.0, *across], show_x)
    )
    vertical = (
        decades(heights) if log and min(heights) > 0 else linear([min(1.0, *heights), *heights])
    )
    colours = _colours(list(series))
    legend, top = _legend(list(series), colours)
    top += 20
    bottom = top + PLOT_HEIGHT

    def place(at: float, value: float) -> str:
        across_px = LEFT + horizontal.share(at) * (WIDTH - LEFT - RIGHT)
        return f"{across_px:.1f},{bottom - vertical.share(value) * PLOT_HEIGHT:.1f}"

    parts = [*legend, f'<text x="4" y="{top - 9}">{escape(y)}</text>']
    for tick in vertical.ticks:
        height = bottom - vertical.share(tick) * PLOT_HEIGHT
        parts.append(_rule(LEFT, height, WIDTH - RIGHT, height))
        parts.append(_text(LEFT - 5, height + 4, vertical.show(tick), anchor="end"))
    for tick in horizontal.ticks:
        across_px = LEFT + horizontal.share(tick) * (WIDTH - LEFT - RIGHT)
        anchor = _anchor(horizontal, tick)
        parts.append(_text(across_px, bottom + LINE, horizontal.show(tick), anchor=anchor))
    parts.append(_text((LEFT + WIDTH) / 2, bottom + 2 * LINE + 1, x, anchor="middle"))
    for name, unsorted in series.items():
        each = sorted(unsorted, key=lambda point: point.at)
        colour = colours[name]
        there = [place(point.at, point.high) for point in each]
        back = [place(point.at, point.low) for point in reversed(each)]
        middle = [place(point.at, point.value) for point in each]
        parts.append(f'<polygon class="band" fill="{colour}" points="{" ".join(there + back)}"/>')
        parts.append(f'<polyline class="line" stroke="{colour}" points="{" ".join(middle)}"/>')
        for point, position in zip(each, middle, strict=True):
            cx, cy = position.split(",")
            said = f"{name}, {show_x(point.at)}: {_range(point)}"
            parts.append(
                f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}"><title>{escape(said)}</title>'
                "</circle>"
            )
    return _svg(title, parts, bottom + 2 * LINE + 8)


def bars(title: str, groups: Mapping[str, Mapping[str, Point]], *, x: str, around_one: bool) -> str:
    """One bar for each point: from 1 to either side on an axis of ratios, or from 0. Names that
    several groups have in common are in a legend, others above their bars."""
    points = [point for group in groups.values() for point in group.values()]
    edges = [edge for point in points for edge in (point.low, point.high)]
    axis = _around_one(edges) if around_one else linear([0.0, *edges])
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    in_common = len(groups) > 1 and len(names) <= COLOURS
    colours = _colours(names) if in_common else dict.fromkeys(names, "var(--c0)")
    parts, top = _legend(names, colours) if in_common else ([], 24)
    room = WIDTH - 2 * RIGHT - 48

    def place(value: float) -> float:
        return RIGHT + axis.share(min(max(value, axis.least), axis.most)) * room

    origin = place(1.0 if around_one else 0.0)
    height = float(top)
    for group, members in groups.items():
        if len(groups) > 1:
            parts.append(_text(RIGHT, height + 12, group))
            height += 17
        for name, point in members.items():
            if not in_common:
                parts.append(_text(RIGHT, height + 12, name))
                height += 16
            bar = _bar(point, place, origin=origin, top=height, colour=colours[name])
            parts += [
                f"<g><title>{escape(f'{group}, {name}: {_range(point)}')}</title>",
                *bar,
                "</g>",
            ]
            height += 13
            height += 0 if in_common else 3
        height += 5
    rules = [
        f'<line class="{"one" if around_one and tick == 1 else "rule"}" x1="{place(tick):.1f}" '
        f'y1="{top}" x2="{place(tick):.1f}" y2="{height:.1f}"/>'
        for tick in axis.ticks
    ]
    below = [
        _text(place(tick), height + 13, axis.show(tick), anchor=_anchor(axis, tick))
        for tick in axis.ticks
    ]
    caption = _text(RIGHT, height + 30, x)
    return _svg(title, [*rules, *parts, *below, caption], height + 38)


def _bar(
    point: Point, place: Callable[[float], float], *, origin: float, top: float, colour: str
) -> list[str]:
    end = place(point.value)
    box = f'x="{min(origin, end):.1f}" y="{top:.1f}" width="{max(abs(end - origin), 1):.1f}"'
    whisker = f'x1="{place(point.low):.1f}" x2="{place(point.high):.1f}"'
    beyond = max(place(point.high), end, origin) + 6
    return [
        f'<rect {box} height="10" rx="1.5" fill="{colour}"/>',
        f'<line class="whisker" {whisker} y1="{top + 5:.1f}" y2="{top + 5:.1f}"/>',
        _text(beyond, top + 9, number(point.value), style="label"),
    ]


def linear(values: Sequence[float], show: Show = number) -> Axis:
    least, most = min(values), max(values)
    step = _round_step((most - least or abs(most) or 1.0) / 4)
    first, last = math.floor(least / step), math.ceil(most / step)
    last = last if last > first else first + 1
    ticks = [n * step for n in range(first, last + 1)]
    return Axis(least=ticks[0], most=ticks[-1], ticks=ticks, show=show, log=False)


def decades(values: Sequence[float]) -> Axis:
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = last if last > first else first + 1
    ticks = [10.0**n for n in range(first, last + 1)]
    return Axis(least=ticks[0], most=ticks[-1], ticks=ticks, show=number, log=True)


def _around_one(values: Sequence[float]) -> Axis:
    """Whole octaves, or powers of four or more where there are many."""
    low, high = max(min(values), 1e-3), min(max(values), 1e3)
    first, last = min(0, math.floor(math.log2(low))), max(1, math.ceil(math.log2(high)))
    by = max(1, math.ceil((last - first) / 5))
    ticks = [2.0**n for n in range(first, last + 1) if n % by == 0]
    return Axis(least=2.0**first, most=2.0**last, ticks=ticks, show=number, log=True)


def _anchor(axis: Axis, tick: float) -> str:
    """So that what is written at an end does not stand out."""
    return {0.0: "start", 1.0: "end"}.get(axis.share(tick), "middle")


def _round_step(step: float) -> float:
    size = 10.0 ** math.floor(math.log10(step))
    return next(size * times for times in (1, 2, 2.5, 5, 10) if size * times >= step)


def _thinned(values: Sequence[float]) -> list[float]:
    """So few that they do not run into each other, the last among them."""
    every = -(-len(values) // 5)
    return [value for n, value in enumerate(reversed(values)) if n % every == 0][::-1]


def _colours(names: Sequence[str]) -> dict[str, str]:
    """Who is known has the same in every chart; others get what is left, while there is some."""
    given: dict[str, int] = {}
    for name in names:
        place = next((place for start, place in KNOWN.items() if name.startswith(start)), None)
        if place is not None and place not in given.values():
            given[name] = place
    free = [n for n in (*range(1, COLOURS), 0) if n not in given.values()] or [0]
    strangers = [name for name in names if name not in given]
    given |= {name: free[n % len(free)] for n, name in enumerate(strangers)}
    return {name: f"var(--c{given[name]})" for name in names}


def _legend(names: Sequence[str], colours: Mapping[str, str]) -> tuple[list[str], int]:
    """Its marks, and where it ends."""
    parts, across, height = [], float(RIGHT), 38
    for name in names:
        width = 22 + LETTER * len(name)
        if across + width > WIDTH - RIGHT and across > RIGHT:
            across, height = float(RIGHT), height + LINE + 2
        parts.append(
            f'<rect x="{across:.1f}" y="{height - 9}" width="10" height="10" rx="2" '
            f'fill="{colours[name]}"/>'
        )
        parts.append(_text(across + 14, height, name, style="label"))
        across += width
    return parts, height + 10


def _range(point: Point) -> str:
    if point.low == point.high:
        return number(point.value)
    return f"{number(point.value)} ({number(point.low)}\N{EN DASH}{number(point.high)})"


def _text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _svg(title: str, parts: Sequence[str], height: float) -> str:
    name = escape(title, {'"': "&quot;"})
    return (
        f'<svg class="hf" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{name}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}">'
        f"<style>{STYLE}</style>"
        f'<text class="title" x="{RIGHT}" y="17">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )
