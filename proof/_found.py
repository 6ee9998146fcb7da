"""What a run has found: one row for each campaign and subject, added up from its batches.

Pure, but for the versions of what is installed. How it is shown is for ``_markdown`` and
``_found_page``.
"""

import datetime as dt
import importlib.metadata
import os
import platform
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from _campaign import HOLDFAST
from _ledger import Batch
from _turns import Standing

MOST_TOLD = 5  # violations of one row
PACKAGES = ("torch", "numpy", "safetensors", "orbax-checkpoint", "obstore", "hypothesis", "atheris")

FOLDERS = re.compile(r"(?<![\w/.:])(?:/[\w.+@~-]+)+/")

Verdict = Literal["held", "so far", "violated", "broken", "skipped", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A violation in words, and the command that runs its batch again."""

    words: str
    again: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One campaign against one subject. ``why`` explains a verdict that needs it; ``broken`` are
    the batches that prove nothing."""

    campaign: str
    subject: str
    promise: str
    counted: str
    tried: int
    violated: int
    wanted: int
    ends: bool
    is_all: bool
    facts: Mapping[str, int]
    batches: int
    broken: int
    seconds: float
    verdict: Verdict
    why: str
    told: tuple[Told, ...]

    @property
    def share(self) -> float:
        """How much of what was wanted is done, from 0 to 1."""
        return 1.0 if self.is_all else min(self.tried / self.wanted, 1.0) if self.wanted else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A whole run. ``run`` says what it was run on, with which seed and for how long."""

    run: Mapping[str, str]
    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        """1 if holdfast broke a promise, 2 if a campaign is broken and proves nothing."""
        if any(row.subject == HOLDFAST and row.violated for row in self.rows):
            return 1
        return 2 if any(row.broken for row in self.rows) else 0


def row_of(standing: Standing, batches: Collection[Batch], unavailable: str | None) -> Row:
    """``batches`` are those of this row."""
    campaign = standing.campaign
    facts: Counter[str] = Counter()
    for batch in batches:
        facts.update(batch.facts)
    troubles = [batch for batch in batches if batch.trouble is not None]
    broken = [batch for batch in troubles if not batch.is_subjects]
    violated = sum(batch.violated for batch in batches)
    verdict, why = _verdict(standing, violated, unavailable, broken)
    return Row(
        campaign=campaign.name,
        subject=standing.subject,
        promise=campaign.promise,
        counted=campaign.counted,
        tried=standing.cases,
        violated=violated,
        wanted=standing.cases if campaign.ends and standing.has_ended else standing.wanted,
        ends=campaign.ends,
        is_all=standing.is_all,
        facts=dict(facts),
        batches=standing.batches,
        broken=len(broken),
        seconds=round(standing.seconds, 1),
        verdict=verdict,
        why=why,
        told=tuple(_told(batches)[:MOST_TOLD]),
    )


def _verdict(
    standing: Standing, violated: int, unavailable: str | None, broken: Sequence[Batch]
) -> tuple[Verdict, str]:
    if violated:
        killed = standing.troubles - len(broken)
        besides = {"hung or died": killed, "were broken": len(broken)}
        return "violated", ", ".join(f"{n} batches {what}" for what, n in besides.items() if n)
    if broken:
        return "broken", without_folders(broken[0].trouble or "")
    if unavailable is not None:
        return "skipped", unavailable
    if not standing.batches:
        return "not run", "there was no time for it"
    if standing.is_all:
        return "held", ""
    return "so far", "the time was over before its target was reached"


def _told(batches: Collection[Batch]) -> list[Told]:
    """Violations first, one of each batch before a second of any."""
    told = []
    for batch in batches:
        words = [*batch.violations, *([batch.trouble] if batch.trouble is not None else [])]
        words = [without_folders(each) for each in words]
        told += [(nth, said, again(batch)) for nth, said in enumerate(words)]
    return [Told(words=words, again=command) for _, words, command in sorted(told, key=_first)]


def _first(each: tuple[int, str, str]) -> int:
    return each[0]


def without_folders(words: str) -> str:
    """The same with files but without the folders they are in, which are this machine's affair."""
    return FOLDERS.sub("\N{HORIZONTAL ELLIPSIS}/", words)


def again(batch: Batch) -> str:
    """The command that runs just this batch again."""
    return shlex.join(
        ["python", "proof/run.py", "--again", batch.campaign, batch.subject, str(batch.seed)]
    )


def rows_of(
    everybody: Sequence[Standing],
    batches: Collection[Batch],
    unavailable: Mapping[tuple[str, str], str],
) -> tuple[Row, ...]:
    return tuple(
        row_of(
            each,
            [b for b in batches if (b.campaign, b.subject) == (each.campaign.name, each.subject)],
            unavailable.get((each.campaign.name, each.subject)),
        )
        for each in everybody
    )


def broken_row(name: str, error: BaseException) -> Row:
    """A campaign that cannot even be imported, or say whether it can be run."""
    return Row(
        campaign=name,
        subject=HOLDFAST,
        promise="",
        counted="cases",
        tried=0,
        violated=0,
        wanted=0,
        ends=False,
        is_all=False,
        facts={},
        batches=0,
        broken=1,
        seconds=0.0,
        verdict="broken",
        why=without_folders(f"it cannot be used: {type(error).__name__}: {error}"),
        told=(),
    )


def machine() -> dict[str, str]:
    """What the results depend on. Leaves out the machine's name."""
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": str(os.cpu_count()),
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
