"""A run as one HTML page that needs nothing else: its charts, and below them every number."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from _report import NO_NUMBERS, Row, tables, told_of
from _results import Outcome, Run

STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --ink: #1d2430; --soft: #5d6778;
  --rule: #d9dee6; --bad: #b3261e; --good: #00796b; }
@media (prefers-color-scheme: dark) { :root { --back: #12161d; --card: #1b212b; --ink: #e7ebf2;
  --soft: #a3adbd; --rule: #39414f; --bad: #ff8a80; --good: #3cc9b4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 4px 0 12px; color: var(--soft); max-width: 75ch; }
.warning { color: var(--bad); font-weight: 600; }
.charts { columns: 372px; column-gap: 12px; }
figure { margin: 0 0 12px; break-inside: avoid; padding: 6px; background: var(--card);
  border: 1px solid var(--rule); border-radius: 8px; }
figure svg { width: 100%; height: auto; max-width: 480px; display: block; margin: 0 auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 14px; margin: 12px 0;
  font-size: 13px; } dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: 10px 0; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; padding: 8px 12px; }
summary { cursor: pointer; } summary b { margin-right: 8px; } summary span { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; width: 100%;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 10px 0 2px; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; } th { color: var(--soft); font-weight: 500;
  white-space: nowrap; } .list td:first-child { min-width: 15em; }
.missed { color: var(--bad); font-weight: 600; }
"""

SECTIONS = {
    "Saving and loading": ("storage", "distributed", "dcp", "s3", "incremental", "compression"),
    "How cost grows": ("scaling",),
    "Beside training": ("saving_async", "activation", "precision"),
}
"""Benchmarks whose charts stand together."""

READING = (
    "Candidates take turns in every repeat; a number is the median, and a whisker or a band the "
    "range from the 10th to the 90th percentile. Ratios are of the same repeat. Look at ratios "
    "first: speeds are those of this machine."
)
PLANS = (
    "A step under a plan of holdfast, and under the fastest of torch's own choices that fits the "
    "same budget. Bands are 95 % intervals. By a thorough run of "
    "<code>benchmarks/fitting.py</code>."
)


def page(
    run: Run, charts: Mapping[str, Sequence[str]], plans: tuple[Mapping[str, str], Sequence[str]]
) -> str:
    of_plans, curves = plans
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>holdfast: benchmarks</title><style>{STYLE}</style></head><body><main>",
        "<h1>holdfast, measured beside its peers</h1>",
        *_summary(run),
        _facts(run.facts),
        *_sections(charts),
        "<h2>Making models fit</h2>",
        f"<p>{PLANS} From {escape(of_plans['date'])}.</p>",
        f'<div class="charts">{_figures(curves)}</div>',
        "<h2>Every number</h2>",
        *(_numbers(name, each, run) for name, each in run.outcomes.items()),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _summary(run: Run) -> list[str]:
    if run.extent != "full":
        return [f'<p class="warning">A {escape(run.extent)} run: {NO_NUMBERS}</p>']
    judged = [
        each
        for outcome in run.outcomes.values()
        for each in outcome.measurements
        if each.target != "-"
    ]
    minutes = sum(each.seconds for each in run.outcomes.values()) / 60
    met = f"{sum(each.met for each in judged)} of {len(judged)} targets met"
    return [f"<p>{met}, in {minutes:.0f} minutes. {READING}</p>"]


def _sections(charts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Charts of one subject side by side, whichever benchmark they are of."""
    named = {name for names in SECTIONS.values() for name in names}
    others = tuple(name for name in charts if name not in named)
    for title, names in {**SECTIONS, "More": others}.items():
        if found := [chart for name in names for chart in charts.get(name, ())]:
            yield f'<h2>{title}</h2><div class="charts">{_figures(found)}</div>'


def _facts(facts: Mapping[str, str]) -> str:
    listed = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items()
    )
    return f"<dl>{listed}</dl>"


def _figures(charts: Sequence[str]) -> str:
    return "".join(f"<figure>{chart}</figure>" for chart in charts)


def _numbers(name: str, outcome: Outcome, run: Run) -> str:
    judged = run.extent == "full"
    missed = sum(not each.met for each in outcome.measurements) if judged else 0
    said = f"{missed} missed" if missed else ""
    failed = "" if outcome.error is None else f'<p class="warning">{escape(outcome.error)}</p>'
    shown = "".join(
        f'<div class="wide">{_table(title, table)}</div>'
        for title, table in tables(name, outcome, judged=judged)
    )
    about = told_of(outcome).partition("**")[0]
    return (
        f"<details><summary><b>{escape(name)}</b><span>{escape(about)} "
        f'<span class="missed">{said}</span></span></summary>{failed}{shown}</details>'
    )


def _table(title: str, table: Sequence[Row]) -> str:
    header, *rest = table
    start = f"<table><caption>{escape(title)}</caption>" if title else '<table class="list">'
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rest)
    return f"{start}<tr>{heads}</tr>{body}</table>"


def _cell(text: str) -> str:
    style = ' class="missed"' if text == "MISSED" else ""
    return f"<td{style}>{escape(text)}</td>"
