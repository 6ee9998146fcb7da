"""A model made to fit a budget by ``holdfast.plan``, beside the best that torch offers.

Torch's choices: checkpointing of any number of the blocks, ``checkpoint_sequential`` with any
number of segments, and selective checkpointing that saves products and convolutions on n blocks
after m whole ones. The lowest peak of them all is torch's floor. Budgets are percents of the way
from there to saving everything. At each, torch's choices that fit are timed, and the fastest are
set beside a plan for the same bytes, in paired steps. A peak is over what is resident when a step
begins, gradients included. Each model has a process of its own, with the allocator fixed.

All eight models at six budgets take half an hour: ``python benchmarks/fitting.py`` does that, and
writes ``results/fitting.json`` and ``fitting.md``, which the charts of plans are drawn from. As one
of the benchmarks of ``run.py`` it takes three of the models at four budgets.
``fitting.py [--quick] [--torch] [case ...]`` tries some of it: quickly, torch's side only, the
cases named.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import _fitting_ours
from _facts import machine_facts
from _fitting_compare import Fit, Outcome, compare
from _fitting_models import CASES
from _fitting_search import Bench, Effort, TorchsBest, settle_process, torchs_best
from _fitting_table import compared_table, models_table, torch_table
from _measure import FULL, Extent, Measurement, in_a_process
from _report import as_lines

THOROUGH = Effort(
    levels=(90, 75, 50, 25, 10, 0),
    judged=(75, 50, 25),
    lines=12,
    tried=4,
    compared=2,
    pairs=21,
    pairs_elsewhere=9,
)
USUAL = replace(THOROUGH, levels=(75, 50, 25, 0))
USUAL_CASES = ("gpt-12-dropout", "resnet", "llama")
"""Attention with random numbers to draw again, convolutions, and a model of another library."""

HASTY = Effort(levels=(50,), judged=(50,), lines=4, tried=3, compared=1, pairs=7, pairs_elsewhere=3)
MOST_ELSEWHERE = 1.02
MOST_OF_BUDGET = 1.05
MOST_PLANNING = 30.0
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that was found of a case. ``unreached`` are the levels for which there was no plan."""

    name: str
    torchs: TorchsBest
    outcomes: tuple[Outcome, ...]
    unreached: tuple[int, ...]

    @property
    def smallest_bytes(self) -> int:
        return min(each.smallest_bytes for each in self.outcomes)


def measure(extent: Extent = FULL) -> list[Measurement]:
    if extent == FULL:
        return fitted(USUAL, USUAL_CASES)
    return fitted(HASTY, USUAL_CASES[: extent.most])


def fitted(effort: Effort, names: Sequence[str]) -> list[Measurement]:
    found: list[Found] = []
    for name in names:
        _tell(name)
        found.append(in_a_process(_run, name, effort))
        if effort == THOROUGH and set(names) == set(CASES):  # after each: it takes half an hour
            _write(_page(found), found)
    print("\n".join(_page(found)))
    return [each for case in found for each in _measurements(case, effort)]


def _run(name: str, effort: Effort) -> Found:
    settle_process()
    return run(name, effort, _fitting_ours.fit)


def run(name: str, effort: Effort, fit: Fit) -> Found:
    """The case in this process, with any planner."""
    case = CASES[name]
    torchs = torchs_best(Bench(case), effort)
    outcomes, unreached = [], []
    for level in torchs.levels:
        _tell(f"{name}: {level.percent} %")
        outcome = compare(
            case,
            fit,
            level.budget_bytes,
            pairs=effort.pairs if level.percent in effort.judged else effort.pairs_elsewhere,
            percent=level.percent,
            choices=level.compared(effort.compared),
        )
        if outcome is None:
            unreached.append(level.percent)
        else:
            outcomes.append(outcome)
    least = min((each.smallest_bytes for each in outcomes), default=torchs.floor_bytes)
    if least < torchs.floor_bytes:
        _tell(f"{name}: below torch's floor")
        lowest = compare(case, fit, least, pairs=effort.pairs_elsewhere)
        outcomes += [] if lowest is None else [lowest]
    return Found(name=name, torchs=torchs, outcomes=tuple(outcomes), unreached=tuple(unreached))


def _run_torch(name: str, effort: Effort) -> TorchsBest:
    settle_process()
    return torchs_best(Bench(CASES[name]), effort)


def _tell(what: str) -> None:
    print(f"  {what} ...", file=sys.stderr, flush=True)


def _measurements(found: Found, effort: Effort) -> list[Measurement]:
    told = [
        _time(found.name, each, judged=each.percent in effort.judged)
        for each in found.outcomes
        if each.over_torch is not None
    ]
    outcomes = found.outcomes
    return [
        *told,
        _most(f"{found.name}: peak, of the budget", _peaks(outcomes), "x", MOST_OF_BUDGET),
        _most(f"{found.name}: planning", _plannings(outcomes), "steps", MOST_PLANNING),
        _exact(found.name, outcomes),
        _reached(found),
    ]


def _time(name: str, outcome: Outcome, *, judged: bool) -> Measurement:
    ratio = outcome.over_torch
    assert ratio is not None
    return Measurement(
        name=f"{name}: time at {outcome.percent} %, of torch's best",
        value=ratio.median,
        unit="x",
        target="95 % interval below 1" if judged else f"<= {MOST_ELSEWHERE:g}",
        met=ratio.high < 1 if judged else ratio.median <= MOST_ELSEWHERE,
        spread=f"{ratio.low:.3f}\N{EN DASH}{ratio.high:.3f} (95 %)",
    )


def _peaks(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.peak_bytes / each.budget_bytes for each in outcomes]


def _plannings(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.planning_s / each.plain_s for each in outcomes]


def _most(name: str, values: Sequence[float], unit: str, most: float) -> Measurement:
    """The largest of ``values``."""
    return Measurement(
        name=f"{name}, the most of {len(values)} budgets",
        value=max(values),
        unit=unit,
        target=f"<= {most:g}",
        met=max(values) <= most,
        spread=f"{min(values):.2f}\N{EN DASH}{max(values):.2f} (all)",
    )


def _exact(name: str, outcomes: Sequence[Outcome]) -> Measurement:
    exact = sum(each.exact for each in outcomes)
    return Measurement(
        name=f"{name}: budgets at which gradients and buffers are the same bits",
        value=exact,
        unit=f"of {len(outcomes)}",
        target="all",
        met=exact == len(outcomes),
        spread="-",
    )


def _reached(found: Found) -> Measurement:
    missing = ", ".join(f"{percent} %" for percent in found.unreached)
    return Measurement(
        name=f"{found.name}: budgets torch reaches and we do not" + (missing and f": {missing}"),
        value=len(found.unreached),
        unit="",
        target="none",
        met=not found.unreached,
        spread="-",
    )


def _page(found: Sequence[Found]) -> list[str]:
    return [
        *models_table(
            (each.name, CASES[each.name].what, each.torchs, each.smallest_bytes, each.outcomes)
            for each in found
        ),
        "",
        *compared_table((each.name, each.outcomes) for each in found),
    ]


def _write(lines: Sequence[str], found: Sequence[Found]) -> None:
    facts = machine_facts()
    page = [*(f"- {key}: {value}" for key, value in facts.items()), "", *lines]
    values = {
        each.name: {
            "plain_bytes": each.torchs.plain_bytes,
            "floor_bytes": each.torchs.floor_bytes,
            "floor": each.torchs.floor.label,
            "smallest_bytes": each.smallest_bytes,
            "peaks": {choice.label: peak for choice, peak in each.torchs.peaks.items()},
            "outcomes": [asdict(outcome) for outcome in each.outcomes],
        }
        for each in found
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fitting.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    as_json = json.dumps({"machine": facts, "results": values}, indent=2, ensure_ascii=False)
    (RESULTS / "fitting.json").write_text(as_json + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Try this benchmark; run.py runs it in earnest.")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="one budget, few choices and repeats")
    parser.add_argument("--torch", action="store_true", help="torch's side only")
    given = parser.parse_args()
    unknown = sorted(set(given.cases) - CASES.keys())
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    names, effort = given.cases or list(CASES), HASTY if given.quick else THOROUGH
    if given.torch:
        found = [(name, in_a_process(_run_torch, name, effort)) for name in names]
        print("\n".join(torch_table(found)))
        return
    print("\n".join(as_lines({"fitting": fitted(effort, names)})))


if __name__ == "__main__":
    main()
