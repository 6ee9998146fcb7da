"""Rows of stages that are told in one. Knows what makes rows alike, not how they are shown."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.activation._reporting.report import StageRow

Kind = Literal["keep", "recipes", "input", "segment", "moved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Neighbouring stages as one row; bytes and seconds are of all of them together.

    ``alike``: all keep the same bytes. Otherwise there is one stage, or they are one segment.
    """

    first: str
    last: str
    count: int
    alike: bool
    choice: str
    kept_bytes: int
    kept_all_bytes: int
    extra_s: float
    forward_s: float
    detail: str


def kind_of(choice: str) -> Kind:
    """The kind of a choice, without which stages a segment has. ``ValueError`` for any other: it
    becomes a class on the page, where no text of others' may stand."""
    match choice.split(" ", 1)[0]:
        case "keep" | "recipes" | "input" | "segment" | "moved" as kind:
            return kind
        case _:
            raise ValueError(f"no stage is run by the choice {choice!r:.200}")


def folded(rows: Iterable[StageRow]) -> tuple[Fold, ...]:
    """The rows in their order, each run of alike ones and each segment as one."""
    return tuple(_fold(tuple(run)) for _, run in itertools.groupby(rows, _likeness))


def _likeness(row: StageRow) -> tuple[str | int, ...]:
    # Times are measured, and no two are equal: they make no difference.
    if kind_of(row.choice) == "segment":
        return (row.choice,)
    return (row.choice, row.kept_bytes, row.kept_all_bytes, row.detail)


def _fold(run: Sequence[StageRow]) -> Fold:
    return Fold(
        first=run[0].name,
        last=run[-1].name,
        count=len(run),
        alike=len(run) > 1 and kind_of(run[0].choice) != "segment",
        choice=run[0].choice,
        kept_bytes=sum(row.kept_bytes for row in run),
        kept_all_bytes=sum(row.kept_all_bytes for row in run),
        extra_s=sum(row.extra_s for row in run),
        forward_s=sum(row.forward_s for row in run),
        detail="; ".join(dict.fromkeys(row.detail for row in run if row.detail)),
    )


def number(fold: Fold) -> str:
    """How many they are, such as ``38 alike``; nothing for one."""
    if fold.count == 1:
        return ""
    return f"{fold.count} alike" if fold.alike else f"{fold.count} together"
