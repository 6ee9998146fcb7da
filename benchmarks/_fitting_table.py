"""Shows what was found as Markdown, for people and for the documentation. Measures nothing."""

import statistics
from collections.abc import Iterable, Sequence

from _fitting_compare import Outcome, Ratio
from _fitting_search import TorchsBest

MB = 1e6
Row = Sequence[str]


def torch_table(found: Iterable[tuple[str, TorchsBest]]) -> list[str]:
    """Torch's floor for each model, and its fastest choice at each budget."""
    header = ("model", "budget", "MB", "fastest of torch's that fit", "peak", "time")
    rows: list[Row] = []
    for name, torchs in found:
        everything = f"{torchs.plain_bytes / MB:.1f}"
        rows.append((name, "all", everything, "save everything", everything, "1"))
        for level in torchs.levels:
            choice, seconds = level.best[0]
            rows.append(
                (
                    name,
                    _percent(level.percent),
                    f"{level.budget_bytes / MB:.1f}",
                    choice.label,
                    f"{torchs.peaks[choice] / MB:.1f}",
                    f"{seconds / torchs.plain_s:.2f}",
                )
            )
    return _table(header, rows)


def compared_table(found: Iterable[tuple[str, Sequence[Outcome]]]) -> list[str]:
    """Ours and torch's best at each budget, and budgets that only ours reaches."""
    header = (
        "model",
        "budget",
        "MB",
        "torch's best that fits",
        "torch",
        "holdfast",
        "holdfast / torch (95 %)",
        "peak / budget",
        "exact",
    )
    rows = [
        (
            name,
            "below torch's floor" if each.percent is None else _percent(each.percent),
            f"{each.budget_bytes / MB:.1f}",
            each.torchs or "none",
            _median(each.torch_over_plain),
            _median(each.over_plain),
            _interval(each.over_torch),
            f"{each.peak_bytes / each.budget_bytes:.2f}",
            "yes" if each.exact else "NO",
        )
        for name, outcomes in found
        for each in outcomes
    ]
    return _table(header, rows)


def models_table(
    found: Iterable[tuple[str, str, TorchsBest, int, Sequence[Outcome]]],
) -> list[str]:
    """The models, and what they can be made to take. Each: name, what it is, torch's best, the
    smallest budget of ours, the outcomes."""
    header = (
        "model",
        "what",
        "step",
        "save everything",
        "torch's floor",
        "holdfast's",
        "planning, in steps (most)",
    )
    rows = [
        (
            name,
            what,
            f"{1000 * outcomes[0].plain_s:.0f} ms",
            f"{torchs.plain_bytes / MB:.1f} MB",
            f"{torchs.floor_bytes / MB:.1f} MB ({torchs.floor.label})",
            f"{smallest / MB:.1f} MB",
            _median_and_most([each.planning_s / each.plain_s for each in outcomes]),
        )
        for name, what, torchs, smallest, outcomes in found
    ]
    return _table(header, rows)


def _median_and_most(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({max(values):.0f})"


def _percent(percent: int) -> str:
    return "torch's floor" if percent == 0 else f"{percent} %"


def _median(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f}"


def _interval(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.median:.3f} ({ratio.low:.3f}\N{EN DASH}{ratio.high:.3f})"


def _table(header: Row, rows: Iterable[Row]) -> list[str]:
    lines = [header, ("---",) * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
