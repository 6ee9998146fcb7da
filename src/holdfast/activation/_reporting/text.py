"""A plan's report for a terminal. Knows lines of a width, and what is coloured in them.

The lines are laid out here, and rich only colours them: where it is not installed, or no colour is
wanted, they are the same.
"""

import io
import itertools
import shutil
from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.activation._reporting.chart import SOLID, chart, legend
from holdfast.activation._reporting.folding import Fold, folded, number
from holdfast.activation._reporting.report import CurvePoint, PlanReport
from holdfast.activation._reporting.summary import closing, figures, share_of_step, subject, verdict
from holdfast.activation._reporting.words import (
    columns,
    in_bytes,
    more,
    more_by_share,
    plain,
    shortened,
    wrapped,
)

_LEAST: Final = 60  # columns; below, a table cannot be read whatever is done
_MOST: Final = 120
_CURVE_ROWS: Final = 7
_BAR: Final = 20
_CHOICE: Final = 20
# Whole lines that are headings, then letters and words wherever they stand.
_STYLES: Final = (
    (r"(?m)^(Activation plan|Memory over|Time against|Stages|Notes).*$", "bold"),
    (r"(?m)^It fits", "bold green"),
    (r"(?m)^It does not fit", "bold red"),
    (r"░+", "bright_black"),
    (r"[▁▂▃▄▅▆▇█]+", "cyan"),
    (r"┄+|budget \d[\d.,]* [KMGTP]?i?B", "yellow"),
    (r"\bkeep\b(?=  )", "bright_black"),
    (r"\brecipes\b(?=  )", "blue"),
    (r"\binput\b(?=  )", "yellow"),
    (r"\bsegment [\d-]+(?=  )", "magenta"),
)


def text(report: PlanReport, width: int | None = None, *, colour: bool = False) -> str:
    """The report in lines of at most ``width`` columns, the terminal's if it is not given.

    Less than 60 are taken for 60, more than 120 for 120. ``colour`` has it coloured for a terminal,
    if rich is installed.
    """
    wide = shutil.get_terminal_size().columns if width is None else width
    lines = "\n".join(_lines(report, min(max(wide, _LEAST), _MOST)))
    return _coloured(lines) if colour else lines


def _lines(report: PlanReport, width: int) -> Iterator[str]:
    yield from wrapped(f"Activation plan of {plain(report.model)}", width)
    yield from wrapped(subject(report), width)
    yield from wrapped(verdict(report), width)
    yield ""
    yield from _figures(report, width)
    yield ""
    yield f"Memory over one step ({legend(report)})"
    yield from chart(report, width)
    yield ""
    yield "Time against memory (the least extra time within a budget)"
    yield from _curve(report)
    yield ""
    yield "Stages"
    yield from _table(folded(report.rows), width)
    yield ""
    if report.notes:
        yield "Notes"
        yield from itertools.chain(*(_hung("- ", plain(note), width) for note in report.notes))
        yield ""
    yield from wrapped(closing(report), width)


def _figures(report: PlanReport, width: int) -> Iterator[str]:
    shown = figures(report)
    names = max(len(figure.name) for figure in shown)
    numbers = max(columns(figure.shown) for figure in shown)
    for figure in shown:
        head = f"{figure.name:<{names}}  {figure.shown:<{numbers}}  "
        yield from _hung(head, figure.about, width)


def _curve(report: PlanReport) -> Iterator[str]:
    points = sorted(report.curve, key=lambda point: point.budget_bytes)
    if not points:
        yield "  no other budget was looked at"
        return
    chosen = CurvePoint(
        budget_bytes=report.predicted_peak_bytes, extra_s=report.predicted_step_s - report.step_s
    )
    rows = [(point, "") for point in _spread(points)]
    rows.append((chosen, "← chosen"))
    most = max(point.extra_s for point, _ in rows)
    for point, note in sorted(rows, key=lambda row: row[0].budget_bytes):
        bar = SOLID * round(point.extra_s / most * _BAR if most > 0 else 0)
        share = more_by_share(share_of_step(report, point.extra_s))
        line = f"  {in_bytes(point.budget_bytes):>10}  {share:>9}  {f'{bar} {note}'.strip()}"
        yield line.rstrip()


def _spread(points: Sequence[CurvePoint]) -> Sequence[CurvePoint]:
    """A few of the points, the first and the last among them."""
    if len(points) <= _CURVE_ROWS:
        return points
    last = len(points) - 1
    return [points[last * row // (_CURVE_ROWS - 1)] for row in range(_CURVE_ROWS)]


def _table(folds: Sequence[Fold], width: int) -> Iterator[str]:
    """A line for each fold, or, where names are too long for that, one for its name before it."""
    numbers = [("choice", "kept", "of", "extra"), *map(_numbers, folds), _total(folds)]
    widths = [max(map(columns, column)) for column in zip(*numbers, strict=True)]
    names = ["stage", *map(_name, folds), "all"]
    widest = max(map(columns, names))
    beside = widest + sum(widths) + 2 * len(widths) <= width
    details = ["", *(plain(fold.detail) for fold in folds), ""]
    for name, row, detail in zip(names, numbers, details, strict=True):
        choice, *others = zip(row, widths, strict=True)
        line = "  ".join([_padded(*choice), *(_padded(*other, right=True) for other in others)])
        if beside:
            line = f"{_padded(name, widest)}  {line}"
        else:
            yield from wrapped(name, width)
            line = f"  {line}"
        if not detail or columns(line) + 2 + columns(detail) <= width:
            yield f"{line}  {detail}".rstrip()
        else:
            yield line
            yield from _hung("    ", detail, width)


def _name(fold: Fold) -> str:
    if fold.count == 1:
        return plain(fold.first)
    return f"{plain(fold.first)} … {plain(fold.last)}, {number(fold)}"


def _numbers(fold: Fold) -> tuple[str, str, str, str]:
    extra = more(fold.extra_s) if fold.extra_s else "none"
    choice = shortened(plain(fold.choice), _CHOICE)
    return choice, in_bytes(fold.kept_bytes), in_bytes(fold.kept_all_bytes), extra


def _total(folds: Sequence[Fold]) -> tuple[str, str, str, str]:
    kept = sum(fold.kept_bytes for fold in folds)
    kept_all = sum(fold.kept_all_bytes for fold in folds)
    extra = sum(fold.extra_s for fold in folds)
    return "", in_bytes(kept), in_bytes(kept_all), more(extra) if extra else "none"


def _padded(text: str, width: int, *, right: bool = False) -> str:
    space = " " * (width - columns(text))
    return f"{space}{text}" if right else f"{text}{space}"


def _hung(head: str, words: str, width: int) -> Iterator[str]:
    """``words`` beside ``head``, their further lines below the first."""
    indent = columns(head)
    for place, line in enumerate(wrapped(words, width - indent) or [""]):
        yield f"{' ' * indent if place else head}{line}".rstrip()


def _coloured(lines: str) -> str:
    try:
        from rich.console import Console  # noqa: PLC0415 -- an optional dependency
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        return lines
    styled = Text(lines)
    for pattern, style in _STYLES:
        styled.highlight_regex(pattern, style)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=_MOST)
    console.print(styled, end="", soft_wrap=True)
    return out.getvalue()
