"""Who takes part in an operation, and what one of its collectives is. Knows no store."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

from holdfast.coordination._liveness import Liveness
from holdfast.errors import ClosedError

GIVEN_UP = "given-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who takes part, where their keys are, how it is known that they live, and when this
    stops being asked."""

    home: str
    rank: int
    world_size: int
    liveness: Liveness | None
    silence_s: float
    is_closed: Callable[[], bool]

    def lost(self) -> dict[int, str]:
        """Who is lost, and how. ``ClosedError`` if it is this side that has left."""
        if self.is_closed():
            raise ClosedError("the coordinator was closed while ranks were waiting")
        return {} if self.liveness is None else self.liveness.lost()

    def at(self, rank: int, name: str = "") -> str:
        """Where a rank says in which collective it is: of all, or of the operations of a name."""
        return f"{self.home}/at/{rank}/{name}"

    def joined(self) -> set[int]:
        return {self.rank} if self.liveness is None else self.liveness.joined()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One collective: its keys in the store, its words for people, its end."""

    base: str
    what: str
    timeout_s: float
    deadline: float
    last: bool

    def key(self, name: str) -> str:
        return f"{self.base}/{name}"

    @property
    def given_up(self) -> str:
        """Where who gathers tells that it has given up, before it takes what came."""
        return self.key(GIVEN_UP)

    def arrivals(self, world_size: int) -> dict[int, str]:
        """The key that each rank sets when it comes."""
        return {rank: self.key(str(rank)) for rank in range(world_size)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Said by who gathered: whom it waited for in vain, and who had come, so that it takes what
    they gave. Who comes later takes its own back."""

    missing: list[int]
    came: list[int]

    @classmethod
    def of(cls, said: bytes) -> Self:
        return cls(**json.loads(said))

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()
