"""Results as a table in Markdown."""

from _found import Results, Row
from _wording import (
    by_campaign,
    facts,
    first_line,
    sentence,
    summary,
    target,
    tried,
    verdict,
    violated,
)

HEADER = ("campaign", "subject", "tried", "violations", "target", "result", "of these")


def markdown(results: Results) -> str:
    """All of it: what it was run on, the table, every promise, every violation that is told."""
    lines = [summary(results), "", *(f"- {key}: {value}" for key, value in results.run.items())]
    lines += ["", _line(HEADER), f"|{' --- |' * len(HEADER)}"]
    lines += [_line(_cells(row)) for row in results.rows]
    lines += ["", "What is tried, and counted:", ""]
    for name, rows in by_campaign(results.rows):
        if rows[0].promise:
            said = f"{sentence(rows[0].promise)} Counted: {rows[0].counted}."
            lines.append(f"- **{_plain(name)}**: {_plain(said)}")
    told = [(row, each) for row in results.rows for each in row.told]
    if told:
        lines += ["", "Some of what went wrong, and how to see each again:", ""]
    for row, each in told:
        words = _plain(first_line(each.words, 600))
        lines.append(f"- {row.campaign}, {row.subject}: {words} `{each.again}`")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.campaign,
        row.subject,
        tried(row),
        violated(row),
        target(row),
        verdict(row),
        ", ".join(facts(row)),
    )


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(map(_plain, cells))} |"


def _plain(words: str) -> str:
    """Nothing in it is taken for markup."""
    for sign in "\\|*_`<[":
        words = words.replace(sign, f"\\{sign}")
    return words.replace("\n", " ")
