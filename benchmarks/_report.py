"""What was found, as tables: aligned for a terminal, and as Markdown. Measures nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from _measure import Measurement, spread
from _results import Outcome, Run

HEADER = ("benchmark", "measured", "value", "range", "target", "result")

NO_NUMBERS = "it shows that all works. Its numbers mean nothing."

Row = Sequence[str]


def as_lines(results: Mapping[str, Iterable[Measurement]]) -> list[str]:
    return aligned([HEADER, *rows(results)])


def rows(results: Mapping[str, Iterable[Measurement]], *, judged: bool = True) -> list[Row]:
    return [
        (
            name,
            found.name,
            f"{found.value:.4g} {found.unit}".strip(),
            found.spread,
            found.target,
            verdict(found, judged=judged),
        )
        for name, measurements in results.items()
        for found in measurements
    ]


def verdict(found: Measurement, *, judged: bool) -> str:
    if found.target == "-":
        return ""
    if not judged:
        return "not judged"
    return "met" if found.met else "MISSED"


def aligned(table: Sequence[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def tables(name: str, outcome: Outcome, *, judged: bool) -> list[tuple[str, list[Row]]]:
    """The tables of one benchmark, each with a title, which the first may lack: what was measured,
    one in a row, and then what was measured at several places, one place in a row."""
    plain = [each for each in outcome.measurements if each.place is None or each.place.at is None]
    found: list[tuple[str, list[Row]]] = []
    if plain:
        shown = rows({name: plain}, judged=judged)
        found.append(("", [HEADER[1:], *(row[1:] for row in shown)]))
    return [*found, *_by_place(outcome.measurements)]


def _by_place(measurements: Iterable[Measurement]) -> list[tuple[str, list[Row]]]:
    charts: dict[str, list[Measurement]] = {}
    for each in measurements:
        if each.place is not None and each.place.at is not None:
            charts.setdefault(f"{each.place.chart} ({each.unit})", []).append(each)
    return [(title, _matrix(title, found)) for title, found in charts.items()]


def _matrix(title: str, measurements: Sequence[Measurement]) -> list[Row]:
    cells = {
        (each.place.at, each.place.series): each
        for each in measurements
        if each.place is not None and each.place.at is not None
    }
    names = list(dict.fromkeys(series for _, series in cells))
    across = list(dict.fromkeys(at for at, _ in cells))
    show = shown_at(title)
    return [
        ("", *names),
        *((show(at), *(_cell(cells.get((at, name))) for name in names)) for at in across),
    ]


def _cell(found: Measurement | None) -> str:
    if found is None:
        return "not measured"
    if len(found.values) < 2:
        return f"{found.value:.3g}"
    digits = max(0, 3 - len(f"{int(found.value)}")) if found.value >= 1 else 4
    return f"{found.value:.3g} ({spread(found.values, digits=digits)})"


def shown_at(chart: str) -> Callable[[float], str]:
    """How the places of a chart are written."""
    return in_bytes if ", by bytes" in chart else in_thousands


def in_bytes(value: float) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


def in_thousands(value: float) -> str:
    return f"{value:,.0f}"


def markdown(run: Run, pictures: Mapping[str, Sequence[str]]) -> str:
    """``pictures`` are files, by benchmark."""
    judged = run.extent == "full"
    lines = ["# Benchmarks", ""]
    if not judged:
        lines += [f"**A {run.extent} run: {NO_NUMBERS}**", ""]
    lines += [f"- {key}: {value}" for key, value in run.facts.items()]
    for name, outcome in run.outcomes.items():
        lines += ["", f"## {name}", "", told_of(outcome)]
        lines += [f"\n![{name}]({file})" for file in pictures.get(name, ())]
        for title, table in tables(name, outcome, judged=judged):
            lines += ["", *([f"**{title}**", ""] if title else [])]
            header, *rest = ([cell.replace("|", "\\|") for cell in row] for row in table)
            lines += [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rest)]
    return "\n".join(lines) + "\n"


def told_of(outcome: Outcome) -> str:
    began = f"{outcome.date}, {outcome.seconds:.0f} s, load {outcome.load} when it began."
    return began if outcome.error is None else f"{began} **It failed: {outcome.error}**"
