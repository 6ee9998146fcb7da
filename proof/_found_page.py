"""Results as one HTML page that needs nothing else: no script, no font, no network."""

from html import escape
from pathlib import Path

from _campaign import HOLDFAST
from _found import Results, Row
from _wording import (
    by_campaign,
    duration,
    facts,
    first_line,
    number,
    percent,
    sentence,
    summary,
    target,
    tried,
    verdict,
    violated,
)

STYLE = Path(__file__).with_name("_found_page.css")


def page(results: Results) -> str:
    """The whole page."""
    ours = [row for row in results.rows if row.subject == HOLDFAST]
    peers = [row for row in results.rows if row.subject != HOLDFAST]
    figures = [
        (number(sum(row.tried for row in ours)), "cases against holdfast"),
        (number(sum(row.violated for row in ours)), "violations by holdfast"),
        (number(sum(row.tried for row in peers)), "cases against its peers"),
        (number(sum(row.violated for row in peers)), "violations by its peers"),
        (duration(sum(row.seconds for row in results.rows)), "of work"),
    ]
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>holdfast: proof</title><style>\n{STYLE.read_text('utf-8')}</style></head>",
            "<body><main>\n",
            "<h1>What could be broken, and what could not</h1>",
            f'<p class="lead">{escape(summary(results))}</p>\n<div class="figures">',
            *(
                f'<div class="figure"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
                for value, what in figures
            ),
            "</div>\n",
            *(_campaign(name, rows) for name, rows in by_campaign(results.rows)),
            "<section><h2>What it was run on</h2><p></p><dl>",
            *(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in results.run.items()),
            "</dl></section>\n</main></body></html>\n",
        ]
    )


def _campaign(name: str, rows: list[Row]) -> str:
    heads = [("", "subject"), ("n", "tried"), ("n", "violations"), ("n", "target")]
    said = f"{sentence(rows[0].promise)} Counted: {rows[0].counted}."
    return "".join(
        [
            f'<section id="{escape(name)}"><h2>{escape(name.replace("_", " "))}</h2>',
            f"<p>{escape(said)}</p><table><thead><tr>",
            *(f'<th class="{kind}">{escape(head)}</th>' for kind, head in heads),
            "<th>result</th></tr></thead><tbody>",
            *map(_row, rows),
            f"</tbody></table>{_told(rows)}</section>\n",
        ]
    )


def _row(row: Row) -> str:
    kind = row.verdict.replace(" ", "-")
    counted = " ".join(f"<span>{escape(each)}</span>" for each in facts(row))
    ours = ' class="ours"' if row.subject == HOLDFAST else ""
    return "".join(
        [
            f"<tr{ours}>",
            f'<td class="who" data-is="subject">{escape(row.subject)}</td>',
            f'<td class="n" data-is="tried">{tried(row)}</td>',
            f'<td class="n" data-is="violations">{escape(violated(row))}</td>',
            f'<td class="n" data-is="target">{target(row)}</td>',
            f'<td data-is="result"><div><span class="{kind}">{escape(verdict(row))}</span>',
            f'<div class="facts">{counted}</div>' if counted else "",
            _bar(row),
            "</div></td></tr>",
        ]
    )


def _bar(row: Row) -> str:
    """How much of the target was tried, and the part of it that broke."""
    if not row.tried:
        return ""
    bad = min(row.violated / row.tried, 1.0) * row.share
    title = f"{percent(row.share)} of the target tried"
    return (
        f'<div class="bar" title="{escape(title)}"><i class="bad" style="width:{bad:.2%}"></i>'
        f'<i style="width:{row.share - bad:.2%}"></i></div>'
    )


def _told(rows: list[Row]) -> str:
    told = [(row, each) for row in rows for each in row.told]
    if not told:
        return ""
    items = (
        f"<li>{escape(row.subject)}: {escape(first_line(each.words, 600))}"
        f"<br><code>{escape(each.again)}</code></li>"
        for row, each in told
    )
    return f"<details><summary>Some of what went wrong</summary><ul>{''.join(items)}</ul></details>"
