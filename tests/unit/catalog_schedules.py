"""Several actors on one storage, in an order that a seed decides, one storage call at a time.

Every actor is a thread that waits before each of its calls; the scheduler lets one of them make
its next call, or lets time pass. Calls fail now and then, before or after they took effect.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.contracts import ObjectInfo
from holdfast.errors import CheckpointError, TransientStorageError
from holdfast.format import decode_record, decode_value
from holdfast.storage import MemoryStorage, retrying
from holdfast.storage._wrapped import WrappedStorage
from holdfast.testing import FakeClock

FAILURES = 0.02
LOST_ANSWERS = 0.03
LOST_ANSWERS_OF_RECORDS = 0.2
TIME_PASSES = 0.05


@dataclass(frozen=True)
class Event:
    """What an actor made of a commit record: ``number`` is that of the state, or ``None`` for a
    tombstone or nothing."""

    actor: str
    state: str
    number: int | None


class Watched(WrappedStorage):
    """A storage that tells the time by a clock of the test's, and keeps the history of records."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(MemoryStorage())
        self.clock = clock
        self.actor = "nobody"
        self.history: dict[str, list[Event]] = {}
        self._times: dict[tuple[str, str], float] = {}

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter([self._timed(info) for info in self._inner.list(prefix)])

    def _through(self, method, key, call, /):
        before = self._version(key)
        result = call()
        if key is not None and key.endswith("/metadata.json") and self._version(key) != before:
            self.history.setdefault(key.rpartition("/")[0], []).append(self._event(key))
        return self._timed(result) if isinstance(result, ObjectInfo) else result

    def _timed(self, info: ObjectInfo) -> ObjectInfo:
        written_s = self._times.setdefault((info.key, info.version), self.clock.now())
        return replace(info, modified_s=written_s)

    def _version(self, key: str | None) -> str | None:
        found = [info for info in self._inner.list(key or "") if info.key == key]
        return found[0].version if found else None

    def _event(self, key: str) -> Event:
        if self._version(key) is None:
            return Event(self.actor, "gone", None)
        record = decode_record(self._inner.read(key), path=key)
        state: Any = decode_value(record.tree, leaf=lambda ref: None)
        return Event(self.actor, record.state, state["n"] if state else None)


class Actor:
    """Something that is done in a thread of its own, step by step."""

    def __init__(self, name: str, world: "World", act: Callable[[Any, FakeClock], object]) -> None:
        self.name = name
        self.result: object = None
        self.error: CheckpointError | None = None
        self.crash: BaseException | None = None
        self.done = False
        self._world = world
        self._act = act
        self._go = _taken_lock()
        self._waits = _taken_lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._waits.acquire()

    def step(self) -> None:
        """Let it make one call, and go on to its next."""
        self._world.storage.actor = self.name
        self._go.release()
        self._waits.acquire()

    def wait(self) -> None:
        self._waits.release()
        self._go.acquire()

    def _run(self) -> None:
        clock = FakeClock()
        rng = random.Random(self._world.rng.random())
        storage = retrying(_Stepped(self._world, self), clock=clock, rng=rng)
        try:
            self.result = self._act(storage, self._world.clock)
        except CheckpointError as error:
            self.error = error
        except BaseException as error:
            self.crash = error
        self.done = True
        self._waits.release()


def _taken_lock() -> threading.Lock:
    """For one thread to wait until another releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Stepped(WrappedStorage):
    def __init__(self, world: "World", actor: Actor) -> None:
        super().__init__(world.storage)
        self._world = world
        self._actor = actor

    def _through(self, method, key, call, /):
        self._actor.wait()
        draw = self._world.rng.random()
        if draw < FAILURES:
            raise TransientStorageError("failed", path=key)
        result = call()
        writes_record = method in {"create", "replace"} and key.endswith("/metadata.json")
        if draw < FAILURES + (LOST_ANSWERS_OF_RECORDS if writes_record else LOST_ANSWERS):
            self._world.let_time_pass()
            raise TransientStorageError("the answer was lost", path=key)
        return result


@dataclass
class World:
    """A storage, its time, and who acts on it."""

    seed: int
    lease_s: float = 10.0
    clock: FakeClock = field(default_factory=FakeClock)
    actors: dict[str, Actor] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.storage = Watched(self.clock)

    def run(self, acts: Mapping[str, Callable[[Any, FakeClock], object]]) -> None:
        """Let all of them act, until all are done."""
        self.actors = {name: Actor(name, self, act) for name, act in acts.items()}
        while busy := [actor for actor in self.actors.values() if not actor.done]:
            if self.rng.random() < TIME_PASSES:
                self.let_time_pass()
            actor = self.rng.choice(busy)
            for _ in range(self.rng.choice([1, 1, 3, 10, 40])):
                if not actor.done:
                    actor.step()
                    self.steps += 1
        self.storage.actor = "nobody"
        for actor in self.actors.values():
            if actor.crash is not None:
                raise actor.crash

    def let_time_pass(self) -> None:
        """Less than a lease, or more."""
        self.clock.advance(self.rng.choice([0.3, 1.5]) * self.lease_s)
