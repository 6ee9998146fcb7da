"""Runs the benchmarks: ``python benchmarks/run.py [name ...]``, all of them if none is named.

A benchmark is a module beside this one that has ``measure() -> list[Measurement]``; a name that
begins with ``_`` is none. The results are printed; those of a full run are also written to
``benchmarks/results/latest.json`` and ``latest.md``. The exit code is 0 even if a target is
missed: a number from a busy machine is news, not a failed check.
"""

import argparse
import datetime as dt
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from _measure import Measurement

HERE = Path(__file__).parent
HEADER = ("benchmark", "measured", "value", "p10\N{EN DASH}p90", "target", "result")


def main(arguments: Sequence[str] | None = None) -> None:
    available = sorted(
        path.stem
        for path in HERE.glob("*.py")
        if not path.stem.startswith("_") and path.stem != Path(__file__).stem
    )
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of: {', '.join(available)}")
    names = parser.parse_args(arguments).names or available
    unknown = sorted(set(names) - set(available))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(available)}")

    results: dict[str, list[Measurement]] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = importlib.import_module(name).measure()

    facts = machine_facts()
    table = [HEADER, *rows(results)]
    missed = [row for row in table[1:] if row[-1] != "met"]
    print("\n".join(aligned(table)))
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    for row in missed:
        print(f"TARGET MISSED: {row[0]}: {row[1]}: {row[2]}, target {row[4]}")
    if names == available:
        write(facts, results, table)


def machine_facts() -> dict[str, str]:
    """What the numbers depend on. Leaves out the machine's name."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": str(os.cpu_count()),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch,
    }


def rows(results: dict[str, list[Measurement]]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            found.name,
            f"{found.value:.4g} {found.unit}",
            found.spread,
            found.target,
            "met" if found.met else "MISSED",
        )
        for name, measurements in results.items()
        for found in measurements
    ]


def aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def write(
    facts: dict[str, str],
    results: dict[str, list[Measurement]],
    table: Sequence[tuple[str, ...]],
) -> None:
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    values = {name: [asdict(found) for found in results[name]] for name in results}
    as_json = json.dumps({"machine": facts, "results": values}, indent=2, ensure_ascii=False)
    (folder / "latest.json").write_text(as_json + "\n", encoding="utf-8")
    lines = [f"- {key}: {value}" for key, value in facts.items()]
    lines += ["", *(f"| {' | '.join(row)} |" for row in table)]
    lines.insert(len(facts) + 2, f"|{' --- |' * len(HEADER)}")
    (folder / "latest.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
