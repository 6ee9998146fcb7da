"""How results read, in a table of any kind: numbers, targets, verdicts, what else was counted."""

from collections.abc import Sequence
from itertools import groupby

from _campaign import HOLDFAST
from _found import Results, Row


def number(value: int) -> str:
    return f"{value:,}"


def tried(row: Row) -> str:
    return "\N{EN DASH}" if row.verdict in ("skipped", "not run") else number(row.tried)


def violated(row: Row) -> str:
    """Of how many, where it is not nothing."""
    if row.verdict in ("skipped", "not run") or (row.verdict == "broken" and not row.tried):
        return "\N{EN DASH}"
    if not row.violated or row.violated > row.tried:
        return number(row.violated)
    return f"{number(row.violated)} ({percent(row.violated / row.tried)})"


def target(row: Row) -> str:
    """How many were to be tried; of a list that ends, all that there are."""
    if row.ends:
        return f"all {number(row.wanted)}" if row.is_all else f"all, about {number(row.wanted)}"
    return number(row.wanted)


def percent(share: float) -> str:
    """Never rounded to none or all."""
    shown = f"{share:.0%}"
    if shown == "0%" and share > 0:
        return "< 1%"
    return "> 99%" if shown == "100%" and share < 1 else shown


def verdict(row: Row) -> str:
    told = {
        "held": "held",
        "so far": f"held so far, {percent(row.share)} of the target",
        "violated": "VIOLATED" if row.subject == HOLDFAST else "violated",
        "broken": "BROKEN",
        "skipped": "skipped",
        "not run": "not run",
    }[row.verdict]
    return f"{told}: {first_line(row.why)}" if row.why and row.verdict != "so far" else told


def facts(row: Row) -> list[str]:
    """What else was counted, if it was anything."""
    return [f"{number(count)} {what}" for what, count in sorted(row.facts.items()) if count]


def sentence(words: str) -> str:
    """With a capital and a full stop."""
    if not words:
        return ""
    return words[0].upper() + words[1:] + ("" if words.endswith(".") else ".")


def first_line(words: str, most: int = 300) -> str:
    line = words.strip().split("\n", 1)[0]
    return line if len(line) <= most else line[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def by_campaign(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(name, list(mine)) for name, mine in groupby(rows, key=lambda row: row.campaign)]


def summary(results: Results) -> str:
    """One sentence of what holdfast did."""
    ours = [row for row in results.rows if row.subject == HOLDFAST]
    held = sum(row.verdict in ("held", "so far") for row in ours)
    reached = sum(row.verdict == "held" for row in ours)
    cases = sum(row.tried for row in ours)
    broken = sum(row.violated for row in ours)
    idle = sum(not row.batches for row in ours)
    wrecked = sum(row.verdict == "broken" and row.batches > 0 for row in ours)
    said = (
        f"holdfast: {number(cases)} cases in {len(ours) - idle} campaigns, "
        f"{number(broken)} violations; {held} of {len(ours)} promises held, "
        f"{reached} of them to their target"
    )
    if wrecked:
        said += f"; campaigns of which a batch ended early: {wrecked}"
    return said + (f"; not tried, for the reasons given: {idle}" if idle else "") + "."
