"""The command line of ``proof/run.py``: finds the campaigns, runs them, writes what they found."""

import argparse
import importlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import _paths
from _campaign import Campaign
from _child import Child
from _code import Code, code_of
from _found import Results, Row, again, broken_row, machine, rows_of
from _found_page import page
from _ledger import Ledger, LedgerInUseError, RunKey
from _markdown import markdown
from _running import CodeChangedError, Run, jobs_here, run
from _screen import screen, told
from _turns import standings
from _wording import duration, summary

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where campaigns are, and where batches and results go."""

    campaigns: Path = _paths.PROOF
    ledger: Path = _paths.REPO / "build" / "proof" / "batches.jsonl"
    results: Path = _paths.PROOF / "results"


def main(arguments: Sequence[str] | None = None, places: Places | None = None) -> int:
    """Exit code 1 if holdfast broke a promise, 2 if a campaign is broken, 130 if interrupted."""
    places = places or Places()
    options = _parser(places).parse_args(arguments)
    sys.path.insert(0, str(places.campaigns))
    if options.again:
        return _again(places, *options.again)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return _all(places, options)


def _parser(places: Places) -> argparse.ArgumentParser:
    known = ", ".join(_names(places))
    parser = argparse.ArgumentParser(
        prog="proof/run.py",
        description="Try to break every promise, of holdfast and of its peers, and say what broke.",
    )
    parser.add_argument("names", nargs="*", metavar="campaign", help=f"of: {known}; all if none")
    parser.add_argument(
        "--minutes", type=float, default=120, help="how long new batches are begun (default 120)"
    )
    parser.add_argument("--seed", type=int, default=1, help="another seed is another run")
    parser.add_argument("--jobs", type=int, default=jobs_here(), help="batches at a time")
    parser.add_argument(
        "--fresh", action="store_true", help="forget what this seed found on this code"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--again",
        nargs=3,
        metavar=("CAMPAIGN", "SUBJECT", "SEED"),
        help="run one batch again, as a violation says",
    )
    return parser


def _names(places: Places) -> list[str]:
    return sorted(
        path.stem
        for path in places.campaigns.glob("*.py")
        if not path.stem.startswith("_") and path.stem != "run"
    )


def _all(places: Places, options: argparse.Namespace) -> int:
    names = options.names or _names(places)
    if unknown := sorted(set(names) - set(_names(places))):
        return _refuse(f"no campaign {', '.join(unknown)}; there are {', '.join(_names(places))}")
    if options.minutes < 0 or options.jobs < 1:
        return _refuse("--minutes must be at least 0 and --jobs at least 1")
    code = code_of(_paths.REPO)
    ledger = Ledger(places.ledger, RunKey(seed=options.seed, code=code.key))
    try:
        with ledger.held():
            return _run_all(places, options, names, code, ledger)
    except LedgerInUseError as error:
        return _refuse(f"{error}; wait for it, or work in another clone")


def _run_all(
    places: Places, options: argparse.Namespace, names: list[str], code: Code, ledger: Ledger
) -> int:
    if options.fresh:
        ledger.forget()
    rows, reasons, unusable = _rows(names)
    _tell_beginning(ledger, code, options)
    plan = Run(
        folder=places.campaigns,
        rows=[row for row in rows if (row[0].name, row[1]) not in reasons],
        seed=options.seed,
        jobs=options.jobs,
        ledger=ledger,
        screen=screen(),
        is_same_code=lambda: code_of(_paths.REPO).key == code.key,
    )
    began_s = time.monotonic()
    ending = _run(plan, until_s=began_s + options.minutes * 60)
    batches = ledger.batches()
    found = rows_of(standings(rows, batches), batches, reasons)
    facts = {
        **machine(),
        "code": code.shown,
        "seed": str(options.seed),
        "time": f"{duration(time.monotonic() - began_s)} of {options.minutes:g} minutes, "
        f"{options.jobs} batches at a time",
        "work": f"{duration(sum(batch.seconds for batch in batches))} in {len(batches)} batches",
        **({"ended early": ending} if ending else {}),
    }
    results = Results(run=facts, rows=tuple(sorted((*found, *unusable), key=_campaign_name)))
    sys.stdout.write(as_json(results) if options.json else markdown(results))
    _say(summary(results))
    if names == _names(places):
        write(results, places.results)
        _say(f"written to {places.results}/latest.md, latest.html and latest.json")
    if ending:
        _say(f"ended early: {ending}; the same command goes on from here")
    return results.exit_code or (INTERRUPTED if ending else 0)


def _tell_beginning(ledger: Ledger, code: Code, options: argparse.Namespace) -> None:
    _say(
        f"code {code.shown}, seed {options.seed}, {options.minutes:g} minutes, {options.jobs} jobs"
    )
    if before := len(ledger.batches()):
        _say(f"goes on after {before} batches of this code and seed; --fresh begins anew")
    if others := ledger.others():
        _say(f"{others} batches of other code or seeds are not counted")


def _run(plan: Run, *, until_s: float) -> str | None:
    """Returns why it ended before its time, if it did."""
    try:
        run(plan, until_s=until_s)
    except KeyboardInterrupt:
        return "interrupted"
    except CodeChangedError as error:
        return str(error)
    finally:
        plan.screen.close()
    return None


def _campaign_name(row: Row) -> str:
    return row.campaign


def _rows(
    names: Sequence[str],
) -> tuple[list[tuple[Campaign, str]], dict[tuple[str, str], str], list[Row]]:
    """Every campaign with each of its subjects; why some of these cannot be run here; and a row for
    each campaign that cannot even say so."""
    rows: list[tuple[Campaign, str]] = []
    reasons: dict[tuple[str, str], str] = {}
    unusable: list[Row] = []
    for name in names:
        try:
            campaign = _campaign(name)
            found = {subject: campaign.unavailable(subject) for subject in campaign.subjects}
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is told in a row
            unusable.append(broken_row(name, error))
            continue
        rows += [(campaign, subject) for subject in found]
        reasons |= {(name, subject): why for subject, why in found.items() if why is not None}
    return rows, reasons, unusable


def _campaign(name: str) -> Campaign:
    """By the name of its module, whatever it calls itself: a batch finds it by that."""
    campaign: Campaign = importlib.import_module(name).CAMPAIGN
    return replace(campaign, name=name)


def _again(places: Places, name: str, subject: str, seed: str) -> int:
    """One batch, shown with all that it printed."""
    child = Child(places.campaigns, _campaign(name), subject, int(seed))
    try:
        while (batch := child.poll()) is None:
            time.sleep(0.05)
        sys.stdout.write(child.log())
    finally:
        child.close()
    print("\n".join(told(batch, again(batch))))
    for what, count in sorted(batch.facts.items()):
        print(f"  {count} {what}")
    return 1 if batch.violated else 2 if batch.trouble else 0


def write(results: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest.json").write_text(as_json(results), encoding="utf-8")
    (folder / "latest.md").write_text(markdown(results), encoding="utf-8")
    (folder / "latest.html").write_text(page(results), encoding="utf-8")


def as_json(results: Results) -> str:
    return json.dumps(asdict(results), indent=2, ensure_ascii=False) + "\n"


def _refuse(words: str) -> int:
    _say(words)
    return 2


def _say(words: str) -> None:
    print(f"proof: {words}", file=sys.stderr, flush=True)
