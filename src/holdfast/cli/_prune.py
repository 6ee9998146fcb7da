"""``holdfast prune``: deletes what no rule keeps. The rules are those of ``holdfast.catalog``."""

import functools
import operator
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from holdfast.catalog import (
    Catalog,
    PruneReport,
    Retention,
    keep_best,
    keep_every,
    keep_last,
    keep_within,
)
from holdfast.cli._arguments import AsJson, StoreArgument
from holdfast.cli._exits import Exit, MisuseError, NothingThereError
from holdfast.cli._glance import glance
from holdfast.cli._place import find_store, nothing_in
from holdfast.cli._text import put, put_json, put_table

_HOURS: Final = {"m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}
_TIME: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([mhdw])")


def run(
    store: StoreArgument,
    *,
    last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", help="Keep the N newest.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--keep-every",
            metavar="N",
            help="Keep those whose step N divides, and those that have no step.",
        ),
    ] = None,
    best: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-best",
            metavar="METRIC",
            help="Keep the one with the lowest value; with METRIC:max the highest. Repeatable.",
        ),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option("--keep-within", metavar="TIME", help="Keep the younger ones: 12h, 7d, 2w."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete; without it nothing is changed.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """A checkpoint stays if any rule keeps it. The newest that is whole stays whatever the rules
    say, and so does what others refer to."""
    rules = _rules(last, every, best or [], within)
    catalog = find_store(store, whole=True)
    infos = glance(catalog).infos
    if not infos:
        raise nothing_in(catalog)
    _check_metrics(best or [], {name for info in infos for name in info.metrics})
    report = catalog.prune(rules, dry_run=not yes)
    if as_json:
        put_json(_document(catalog, rules, report, done=yes))
    else:
        _put(report, done=yes)
    return Exit.FOUND if report.failed else Exit.OK


def _rules(
    last: int | None, every: int | None, best: Sequence[str], within: str | None
) -> Retention:
    """All rules together, as ``|`` puts them."""
    try:
        rules = [keep_last(last)] if last is not None else []
        rules += [keep_every(every)] if every is not None else []
        for each in best:
            metric, mode = _metric(each)
            rules.append(keep_best(metric, mode="max" if mode == "max" else "min"))
        rules += [keep_within(_hours(within))] if within is not None else []
    except ValueError as error:
        raise MisuseError(str(error)) from error
    if not rules:
        raise MisuseError("say what to keep, as --keep-last 3 or --keep-best loss")
    return functools.reduce(operator.or_, rules)


def _metric(text: str) -> tuple[str, str]:
    """A metric's name may have colons of its own."""
    metric, colon, mode = text.rpartition(":")
    return (metric, mode) if colon and mode in {"min", "max"} else (text, "min")


def _hours(text: str) -> float:
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"--keep-within must be a time, as 30m, 12h, 7d or 2w, not {text!r}")
    return float(found[1]) * _HOURS[found[2]]


def _check_metrics(best: Sequence[str], known: set[str]) -> None:
    """A metric that no checkpoint has keeps nothing, which nobody means who names it."""
    for each in best:
        metric, _ = _metric(each)
        if metric not in known:
            have = f"there are {', '.join(sorted(known))}" if known else "none has any"
            raise NothingThereError(f"no checkpoint has a metric {metric!r}; {have}")


def _put(report: PruneReport, *, done: bool) -> None:
    gone = "deleted" if done else "would go"
    rows = [(name, "stays", "; ".join(reasons)) for name, reasons in report.kept.items()]
    rows += [(name, gone, "no rule keeps it") for name in reversed(report.deleted)]
    rows += [(name, "bad: stays", why) for name, why in report.failed.items()]
    put_table(("name", "what", "why"), rows)
    if not done and report.deleted:
        put(f"{len(report.deleted)} would be deleted; nothing was changed, --yes deletes them")


def _document(
    catalog: Catalog, rules: Retention, report: PruneReport, *, done: bool
) -> dict[str, Any]:
    return {
        "store": catalog.storage.url,
        "rules": repr(rules),
        "done": done,
        "deleted": report.deleted,
        "kept": {name: list(reasons) for name, reasons in report.kept.items()},
        "failed": dict(report.failed),
    }
