"""What a run of the demo is asked for, and what its ranks tell of it. Knows values, no torch.

Both go between processes as JSON: a job as the argument of every rank, what ranks tell as lines.
"""

from typing import Final, TypeAlias

import msgspec

PARTS: Final = 6
"""A step's batch in so many parts, for 1, 2, 3 or 6 ranks. Each part's gradient is computed by
itself, and all are added up in one order, so that no sum depends on how many ranks there are."""

KILLED_RANK: Final = 1


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model, and of one part of a batch: ``rows`` texts of ``context`` characters."""

    width: int
    blocks: int
    heads: int
    context: int
    rows: int


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """How the training goes: ``steps`` of them, saved after each ``every``. In the save after step
    ``killed_in`` a rank is killed, and a bit of the checkpoint before that one is flipped.

    Ranks write no more than ``write_bytes_per_s`` each: a state this small would be on the disk
    before anybody could see a save go on, or kill it half-way. A save tells how far it is every
    0.1 s, and must not get from half of its bytes to the end meanwhile.
    """

    size: Size
    steps: int
    every: int
    killed_in: int
    write_bytes_per_s: float
    budget: str

    @property
    def flipped(self) -> int:
        return self.killed_in - self.every

    @property
    def resumed(self) -> int:
        """The step of the newest checkpoint that is left then."""
        return self.flipped - self.every


FULL: Final = Course(
    size=Size(width=128, blocks=4, heads=4, context=96, rows=4),
    steps=60,
    every=10,
    killed_in=40,
    write_bytes_per_s=4e6,
    budget="45%",
)
QUICK: Final = Course(
    size=Size(width=64, blocks=3, heads=2, context=48, rows=2),
    steps=12,
    every=3,
    killed_in=9,
    write_bytes_per_s=1e6,
    budget="60%",
)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Without a ``store`` nothing is saved. ``plan`` is a file: the plan that is in it is
    followed, and if it is not there yet a plan is made and written to it; ``None`` has no plan."""

    course: Course
    store: str | None = None
    plan: str | None = None
    is_killed: bool = False


class Began(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    ranks: int
    parameters: int
    characters: int


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bytes of a step's activations: when all are kept, under the plan, and the budget."""

    before_bytes: int
    after_bytes: int
    budget_bytes: int
    planning_s: float


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    step: int
    loss: float


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a save took on one rank."""

    step: int
    rank: int
    ranks: int
    stall_s: float
    total_s: float
    written_bytes: int


class Killed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Said by a rank that kills itself next. ``at_s`` is of the clock that all processes share."""

    rank: int
    step: int
    done_bytes: int
    total_bytes: int
    at_s: float


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a save ended that came to nothing, as a rank was told that is still there."""

    rank: int
    step: int
    story: str
    at_s: float


class Resumed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    prefix: str
    step: int
    saved_by: int
    ranks: int
    passed_over: tuple[tuple[str, str], ...]
    """Names of newer checkpoints, each with what is wrong with it."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``digest`` is of all weights, masters and moments."""

    digest: str


Event: TypeAlias = Began | Planned | Stepped | Saved | Killed | Lost | Resumed | Ended
