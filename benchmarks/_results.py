"""What a run of the benchmarks found, and how it is kept as JSON. Measures and draws nothing."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _measure import Measurement, Place

VARYING = {"date"}
"""Facts that may differ between two parts of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one benchmark found, or why it ended without. ``load`` is how busy the machine was when
    it began, by the system's own measure: 0 is idle."""

    date: str
    seconds: float
    load: str
    measurements: tuple[Measurement, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    extent: str
    facts: Mapping[str, str]
    outcomes: Mapping[str, Outcome]

    def with_outcome(self, name: str, outcome: Outcome) -> "Run":
        return replace(self, outcomes={**self.outcomes, name: outcome})

    def differs(self, other: "Run") -> list[str]:
        """What keeps the two from being one run, in words."""
        mine, theirs = ({**each.facts, "extent": each.extent} for each in (self, other))
        return [
            f"{key} is {mine.get(key)} and was {theirs.get(key)}"
            for key in {**mine, **theirs}
            if key not in VARYING and mine.get(key) != theirs.get(key)
        ]

    def missed(self) -> list[tuple[str, Measurement]]:
        return [
            (name, found)
            for name, outcome in self.outcomes.items()
            for found in outcome.measurements
            if not found.met
        ]


def as_json(run: Run) -> str:
    return json.dumps(asdict(run), indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> Run:
    data = json.loads(text)
    return Run(
        extent=data["extent"],
        facts=data["facts"],
        outcomes={name: _outcome(each) for name, each in data["outcomes"].items()},
    )


def replace_file(path: Path, text: str) -> None:
    """In one step, so that who breaks off the run finds the old file or the new one."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)  # noqa: PTH105 -- one of them says what it does


def _outcome(data: dict[str, Any]) -> Outcome:
    return Outcome(**{**data, "measurements": tuple(map(_measurement, data["measurements"]))})


def _measurement(data: dict[str, Any]) -> Measurement:
    place = None if data["place"] is None else Place(**data["place"])
    return Measurement(**{**data, "values": tuple(data["values"]), "place": place})
