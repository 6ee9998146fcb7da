"""Which charts a run is shown in: bars where holdfast is set beside others, lines where cost grows,
and the curves of plans, which are those of the last thorough run of ``fitting.py``."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _charts import Point, Series, bars, lines
from _measure import Measurement, low_and_high
from _report import shown_at
from _results import Run

FASTER = "times as fast as ...; left of 1: slower"
TIME = "time, of that of ...; left of 1: faster"

BARS = {
    ("storage", "x"): ("One process, 2 GiB", FASTER),
    ("distributed", "x"): ("Ranks, model and Adam", FASTER),
    ("dcp", "x"): ("dcp.save and dcp.load, our storage", FASTER),
    ("s3", "x"): ("An S3 server", FASTER),
    ("incremental", "x"): ("Saving what has changed", FASTER),
    ("saving_async", "ms"): ("save_async: training held up", "ms a save"),
    ("saving_async", "of the steps"): ("save_async: a loop is slower by", "part of its time"),
    ("compression", "of raw"): ("Compression: what is stored", "of the bytes"),
    ("precision", "x"): ("Mixed precision: an optimizer's step", TIME),
    ("activation", "x"): ("checkpoint(): a training step", TIME),
}
"""By benchmark and unit: a title, and what the axis means."""


def figures(run: Run) -> dict[str, list[str]]:
    """The charts of each benchmark that has some, as SVG."""
    found = {
        name: [*_bars(name, outcome.measurements), *_lines(outcome.measurements)]
        for name, outcome in run.outcomes.items()
    }
    return {name: charts for name, charts in found.items() if charts}


def _bars(benchmark: str, measurements: Iterable[Measurement]) -> list[str]:
    groups: dict[str, dict[str, dict[str, Point]]] = {}
    for each in measurements:
        if each.place is not None and each.place.at is None:
            by_chart = groups.setdefault(each.unit, {})
            by_chart.setdefault(each.place.chart, {})[each.place.series] = _point(each)
    return [
        bars(title, by_chart, x=axis, around_one=unit == "x")
        for unit, by_chart in groups.items()
        for title, axis in [BARS.get((benchmark, unit), (benchmark, unit))]
    ]


def _lines(measurements: Iterable[Measurement]) -> list[str]:
    """Of amounts; how amounts compare can be seen in them, and is in the tables."""
    charts: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for each in measurements:
        if each.place is not None and each.place.at is not None and each.unit != "x":
            series = charts.setdefault((each.place.chart, each.unit), {})
            series.setdefault(each.place.series, []).append(_point(each, each.place.at))
    return [
        lines(
            chart,
            series,
            x=chart.partition(", by ")[2],
            y=unit,
            show_x=shown_at(chart),
        )
        for (chart, unit), series in charts.items()
    ]


def _point(found: Measurement, at: float = 0.0) -> Point:
    low, high = low_and_high(found.values or (found.value,))
    return Point(value=found.value, low=low, high=high, at=at)


def plans(path: Path) -> tuple[Mapping[str, str], list[str]]:
    """The facts of the thorough run whose results are at ``path``, and one chart for each model."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return data["machine"], [_plan(name, found) for name, found in data["results"].items()]


def _plan(name: str, found: Mapping[str, Any]) -> str:
    whole = found["plain_bytes"]
    curves: dict[str, list[Point]] = {
        "holdfast": _curve(found["outcomes"], "over_plain", whole),
        "torch's best": _curve(found["outcomes"], "torch_over_plain", whole),
    }
    series: Series = {label: points for label, points in curves.items() if points}
    return lines(
        name,
        series,
        x="budget, in percent of what saving everything takes",
        y="time of a step, of saving everything",
        log=False,
    )


def _curve(outcomes: Sequence[Mapping[str, Any]], of: str, whole: int) -> list[Point]:
    """At budgets that torch reaches: below, a step takes a multiple and would flatten the rest."""
    return [
        Point(
            value=each[of]["median"],
            low=each[of]["low"],
            high=each[of]["high"],
            at=100 * each["budget_bytes"] / whole,
        )
        for each in outcomes
        if each["percent"] is not None and each[of] is not None
    ]
