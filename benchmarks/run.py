"""Runs the benchmarks: ``python benchmarks/run.py [name ...]``, all of them if none is named.

A benchmark is a module beside this one that has ``measure(extent) -> list[Measurement]``; a name
that begins with ``_`` is none. Each runs in a process of its own, one after the other. A run of all
takes about an hour and writes ``results/latest.json``, ``latest.md``, ``latest.html`` and its
charts after each benchmark; broken off, it goes on with ``--resume``. One of named benchmarks only
prints, unless a folder is given with ``--into``. ``--quick`` is a run of minutes on smaller states,
which shows that all works; its results are ``quick.*``.

A missed target is news, from a busy machine even expected: the exit code is 0. It is 1 if a
benchmark failed to measure.
"""

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from _facts import load, machine_facts
from _figures import figures, plans
from _measure import EXTENTS, FULL, QUICK, Extent, Measurement, in_a_process
from _page import page
from _report import NO_NUMBERS, aligned, as_lines, markdown
from _results import Outcome, Run, as_json, from_json, replace_file

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    available = sorted(
        path.stem
        for path in HERE.glob("*.py")
        if not path.stem.startswith("_") and path.stem != Path(__file__).stem
    )
    given = _parser(available).parse_args(arguments)
    extent: Extent = EXTENTS[given.extent]
    names = given.names or available
    folder: Path = given.into or RESULTS
    keep = given.into is not None or given.resume or not given.names
    run = Run(extent=extent.name, facts=machine_facts(), outcomes={})
    if given.resume:
        run = _resumed(run, folder)
    left = [
        name for name in names if name not in run.outcomes or run.outcomes[name].error is not None
    ]
    for number, name in enumerate(left, 1):
        _tell(f"{name} ({number} of {len(left)}) ...")
        outcome = _outcome(name, extent)
        _tell(f"{name}: {outcome.seconds:.0f} s")
        run = run.with_outcome(name, outcome)
        if keep:
            write(run, folder)
    _print(run, names)
    return 1 if any(run.outcomes[name].error for name in names) else 0


def _parser(available: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    # No choices of argparse: those refuse an empty list.
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        type=lambda name: _one_of(name, available),
        help=f"of: {', '.join(available)}",
    )
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument(
        "--quick",
        dest="extent",
        action="store_const",
        const=QUICK.name,
        help="small states and few repeats: minutes instead of an hour, to see that all works",
    )
    how_much.add_argument("--extent", choices=list(EXTENTS), help=argparse.SUPPRESS)
    parser.add_argument(
        "--resume", action="store_true", help="measure only what the results there do not have"
    )
    parser.add_argument("--into", type=Path, help="where the results go instead of results/")
    parser.set_defaults(extent=FULL.name)
    return parser


def _one_of(name: str, available: Sequence[str]) -> str:
    if name not in available:
        message = f"no benchmark {name}; there are {', '.join(available)}"
        raise argparse.ArgumentTypeError(message)
    return name


def _resumed(run: Run, folder: Path) -> Run:
    """The run in ``folder``, if it is of the same code on the same machine."""
    path = folder / f"{_stem(run)}.json"
    if not path.exists():
        return run
    try:
        found = from_json(path.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError) as failure:
        sys.exit(
            f"{path} is no run that can be gone on with ({failure!r}). Nothing was measured or "
            "changed; without --resume a new run replaces it."
        )
    if differing := run.differs(found):
        sys.exit(
            f"{path} is another run: {'; '.join(differing)}. Nothing was measured or changed; "
            "without --resume a new run replaces it."
        )
    return found


def _outcome(name: str, extent: Extent) -> Outcome:
    """Whatever goes wrong in it: the others are measured all the same."""
    date, busy, began = machine_facts()["date"], load(), time.monotonic()
    found: list[Measurement] = []
    error = None
    try:
        found = in_a_process(_measure, name, extent)
    except Exception as failure:  # noqa: BLE001
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    return Outcome(
        date=date,
        seconds=time.monotonic() - began,
        load=busy,
        measurements=tuple(found),
        error=error,
    )


def _measure(name: str, extent: Extent) -> list[Measurement]:
    found: list[Measurement] = importlib.import_module(name).measure(extent)
    return found


def write(run: Run, folder: Path) -> None:
    stem = _stem(run)
    charts = folder / f"{stem}-charts"
    charts.mkdir(parents=True, exist_ok=True)
    drawn = figures(run)
    pictures: dict[str, list[str]] = {
        name: [f"{charts.name}/{name}-{number}.svg" for number in range(1, len(each) + 1)]
        for name, each in drawn.items()
    }
    for name, files in pictures.items():
        for file, svg in zip(files, drawn[name], strict=True):
            replace_file(folder / file, svg)
    replace_file(folder / f"{stem}.json", as_json(run))
    replace_file(folder / f"{stem}.md", markdown(run, pictures))
    replace_file(folder / f"{stem}.html", page(run, drawn, plans(RESULTS / "fitting.json")))


def _stem(run: Run) -> str:
    return "latest" if run.extent == FULL.name else run.extent


def _print(run: Run, names: Sequence[str]) -> None:
    print("\n".join(as_lines({name: run.outcomes[name].measurements for name in names})))
    print("\n".join(aligned([(key, value) for key, value in run.facts.items()])))
    if run.extent != FULL.name:
        print(f"A {run.extent} run: {NO_NUMBERS}")
        return
    for name, found in run.missed():
        print(f"TARGET MISSED: {name}: {found.name}: {found.value:.4g}, target {found.target}")


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
