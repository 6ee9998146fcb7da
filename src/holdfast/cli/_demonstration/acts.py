"""What happened in a run, put together from what its ranks told. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.cli._demonstration.jobs import (
    Began,
    Ended,
    Event,
    Killed,
    Lost,
    Planned,
    Resumed,
    Saved,
    Stepped,
)
from holdfast.cli._demonstration.launching import Exited


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save that was committed, of all its ranks: the longest waits, and all that they wrote."""

    step: int
    ranks: int
    stall_s: float
    total_s: float
    written_bytes: int


@dataclass(slots=True, kw_only=True)
class Run:
    """What is known of a run; grows until the run has ended."""

    began: Began | None = None
    planned: Planned | None = None
    resumed: Resumed | None = None
    killed: Killed | None = None
    lost: list[Lost] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    saved: list[Saved] = field(default_factory=list)
    digest: str | None = None
    code: int | None = None

    def hear(self, event: Event | Exited) -> None:
        match event:
            case Began():
                self.began = event
            case Planned():
                self.planned = event
            case Resumed():
                self.resumed = event
            case Killed():
                self.killed = event
            case Lost():
                self.lost.append(event)
            case Stepped(step=step, loss=loss):
                self.losses[step] = loss
            case Saved():
                self.saved.append(event)
            case Ended(digest=digest):
                self.digest = digest
            case Exited(code=code):
                self.code = code

    @property
    def saves(self) -> tuple[Save, ...]:
        """Those that all ranks have told of, in the order of their steps."""
        return tuple(_saves(self.saved))

    @property
    def knew_s(self) -> float | None:
        """How long after a rank was killed the last of the others knew."""
        if self.killed is None or not self.lost:
            return None
        return max(each.at_s for each in self.lost) - self.killed.at_s


def _saves(told: Iterable[Saved]) -> Iterator[Save]:
    steps: dict[int, list[Saved]] = {}
    for each in told:
        steps.setdefault(each.step, []).append(each)
    for step, parts in sorted(steps.items()):
        if len(parts) == parts[0].ranks:
            yield Save(
                step=step,
                ranks=parts[0].ranks,
                stall_s=max(part.stall_s for part in parts),
                total_s=max(part.total_s for part in parts),
                written_bytes=sum(part.written_bytes for part in parts),
            )
