"""Campaign: an object store that behaves badly loses nothing.

A real S3 server behind a proxy that breaks requests, and on one bucket two writers, a reader, a
deleter and a collector, all at once. What each of them does and which requests break is decided by
the seed; which of them comes first is the machine's doing, and so differs from run to run.
"""

import contextlib
import importlib.util
import random
import re
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

# Makes the folders of the tests importable, so before what is in them.
import _paths  # noqa: F401

# isort: split

import numpy as np
from _servers import Fault, Request, moto_server, proxy_to

from _campaign import HOLDFAST, Campaign, Outcome
from holdfast.catalog import Catalog
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError
from holdfast.resilience import RetryBudget, RetryPolicy
from holdfast.storage import open_storage, retrying
from holdfast.storage._wrapped import WrappedStorage

NAMES: Final = ("step_0", "step_1", "step_2")
RACES: Final = ("race_0", "race_1")
"""Names that both writers want, neither overwrites and nobody deletes: one of them wins."""

SCHEDULES: Final = 4
_RETRIES: Final = 4
_TIMEOUT_S: Final = 1.5
_RESERVE: Final = 10.0
_REFUND: Final = 0.1
_TURN_S: Final = 1.0
_WAIT_S: Final = 20.0
_SHOWN: Final = 10
_BUCKET: Final = "bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What somebody did to a name, and when. ``value`` is what a save wrote, ``None`` for a
    deletion. One that was not ``acknowledged`` may have happened or not."""

    name: str
    value: int | None
    acknowledged: bool
    began_s: float
    ended_s: float


@dataclass(slots=True)
class World:
    """What happened on one bucket. Several threads write to it."""

    deeds: list[Deed] = field(default_factory=list)
    facts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: threading.Event = field(default_factory=threading.Event)
    """Something is there to be read or deleted."""

    def count(self, what: str) -> None:
        with self.lock:
            self.facts[what] += 1

    def complain(self, what: str) -> None:
        with self.lock:
            self.problems.append(what)


class Meter:
    """Counts calls, the attempts at them that reach a storage, and the retries that a budget paid.

    Of listings none: how many requests they take is not the caller's to say. A put that is in doubt
    reads back what is there, which is no attempt at it. Thread-safe; an attempt is made in the
    thread of its call.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.attempts = 0
        self.paid = 0
        self._here = threading.local()
        self._lock = threading.Lock()

    def begin(self, method: str) -> None:
        self._here.method = method
        with self._lock:
            self.calls += method != "list"

    def attempt(self, method: str) -> None:
        with self._lock:
            self.attempts += method == self._here.method != "list"

    def pay(self) -> None:
        with self._lock:
            self.paid += self._here.method != "list"

    @property
    def retries(self) -> int:
        return self.attempts - self.calls

    def problems(self) -> Iterator[str]:
        if self.retries > self.paid:
            yield f"{self.calls} calls were retried {self.retries} times, {self.paid} of them paid"
        if self.retries > _RESERVE + _REFUND * self.attempts:
            yield f"{self.calls} calls were retried {self.retries} times, more than can be paid"


class Told(WrappedStorage):
    """A storage whose calls are told to somebody."""

    def __init__(self, storage: Storage, tell: Callable[[str], None]) -> None:
        super().__init__(storage)
        self._tell = tell

    def _through(self, method: str, _key: str | None, call: Callable[[], Any], /) -> Any:
        self._tell(method)
        return call()


class CountedBudget(RetryBudget):
    """Tells of the retries that it paid for."""

    __slots__ = ("_meter",)

    def __init__(self, meter: Meter) -> None:
        super().__init__(reserve=_RESERVE, refund=_REFUND)
        self._meter = meter

    def take(self) -> bool:
        paid = super().take()
        if paid:
            self._meter.pay()
        return paid


def state_of(value: int) -> dict[str, Any]:
    """Nothing of which any other value has; two tensors, so that there is something to tear."""
    random_ = np.random.default_rng(value)
    return {"value": value, "w": random_.normal(size=500), "b": random_.integers(0, 2**40, 60)}


def value_of(state: Any) -> int | None:
    """Which state this is; ``None`` if it is none that was ever saved."""
    try:
        value = int(state["value"])
        wanted = state_of(value)
        same = np.array_equal(state["w"], wanted["w"]) and np.array_equal(state["b"], wanted["b"])
    except (KeyError, TypeError, ValueError):
        return None
    return value if same else None


def faults(
    rng: random.Random, rate: float, facts: Counter[str]
) -> Callable[[Request], Fault | None]:
    """What breaks, by chance. Conflicts are only answered where a store answers them."""
    lock = threading.Lock()

    def rule(request: Request) -> Fault | None:
        with lock:
            facts["requests"] += 1
            if rng.random() >= rate:
                return None
            fault = _fault(request, rng)
            facts[
                f"requests faulted: {fault.action}"
                + (f" {fault.status}" if fault.action == "answer" else "")
            ] += 1
            facts["requests faulted"] += 1
            return fault

    return rule


def _fault(request: Request, rng: random.Random) -> Fault:
    kinds = ["503", "503", "500", "reset", "reset", "lose", "lose", "twice"]
    if request.method == "GET":
        kinds += ["truncate"] * 3
    if rng.random() < 0.05:
        kinds = ["late"]
    if request.method == "PUT" and "metadata.json" in request.target:
        kinds += ["409", "412", "lose", "lose"]
    kind = rng.choice(kinds)
    if kind.isdigit():
        return Fault(action="answer", status=int(kind))
    delay_s = 2 * _TIMEOUT_S if kind == "late" else rng.choice((0.0, 0.05, 0.5))
    return Fault(action=kind, delay_s=delay_s)


def at(url: str, folder: str) -> Storage:
    return open_storage(
        f"s3://{_BUCKET}/{folder}",
        endpoint=url,
        access_key_id="key",
        secret_access_key="word",
        region="us-east-1",
        client_options={"timeout": f"{int(_TIMEOUT_S * 1000)}ms", "connect_timeout": "5s"},
    )


# --- who does what


def _writer(catalog: Catalog, world: World, rng: random.Random, values: Iterator[int]) -> None:
    plan = [(name, rng.random() < 0.7) for name in rng.choices(NAMES, k=4)]
    for name in rng.sample(RACES, len(RACES)):
        plan.insert(rng.randrange(len(plan) + 1), (name, False))
    for name, overwrite in plan:
        value = next(values)
        began_s = time.monotonic()
        acknowledged, refused = False, False
        try:
            catalog.write(name, state_of(value), overwrite=overwrite)
            acknowledged = True
            world.begun.set()
            world.count("saves acknowledged")
        except CheckpointExistsError:
            refused = True
            world.count("saves refused: the name is taken")
        except CheckpointError as error:
            world.count(f"saves failed: {type(error).__name__}")
        _told(world, name, value, acknowledged, began_s, refused=refused)


def _told(
    world: World, name: str, value: int | None, acknowledged: bool, began_s: float, *, refused: bool
) -> None:
    """A refused save is one that may have happened, too: its own first attempt may be what
    refused the next."""
    deed = Deed(
        name=name,
        value=value,
        acknowledged=acknowledged and not refused,
        began_s=began_s,
        ended_s=time.monotonic(),
    )
    with world.lock:
        world.deeds.append(deed)


def _deleter(catalog: Catalog, world: World, rng: random.Random, _: Iterator[int]) -> None:
    world.begun.wait(_WAIT_S)
    for name in rng.choices(NAMES, k=4):
        time.sleep(rng.random() * _TURN_S)
        began_s = time.monotonic()
        acknowledged = False
        try:
            catalog.delete(name)
            acknowledged = True
            world.count("deletions acknowledged")
        except CheckpointNotFoundError:
            world.count("deletions of nothing")
        except CheckpointError as error:
            world.count(f"deletions failed: {type(error).__name__}")
        _told(world, name, None, acknowledged, began_s, refused=False)


def _collector(catalog: Catalog, world: World, rng: random.Random, _: Iterator[int]) -> None:
    for _turn in range(4):
        time.sleep(rng.random() * _TURN_S)
        try:
            catalog.gc()
            world.count("collections")
        except CheckpointError as error:
            world.count(f"collections failed: {type(error).__name__}")


def _reader(catalog: Catalog, world: World, rng: random.Random, _: Iterator[int]) -> None:
    world.begun.wait(_WAIT_S)
    for name in rng.choices((*NAMES, *RACES), k=24):
        time.sleep(rng.random() * _TURN_S / 3)
        try:
            state = catalog.read(name)
        except CheckpointNotFoundError:
            world.count("reads of nothing")
        except CheckpointError as error:
            world.count(f"reads failed: {type(error).__name__}")
        else:
            world.count("reads")
            if value_of(state) is None:
                world.complain(f"a reader of {name} got a state that nobody saved")


_ACTORS: Final = (_writer, _writer, _reader, _deleter, _collector)


def _acting(
    act: Callable[..., None],
    catalog: Catalog,
    world: World,
    rng: random.Random,
    values: Iterator[int],
) -> None:
    try:
        act(catalog, world, rng, values)
    except Exception as error:  # noqa: BLE001 -- anything but a CheckpointError is what is looked for
        world.complain(f"{act.__name__.lstrip('_')} got {type(error).__name__}: {str(error)[:300]}")


# --- one schedule, and what must be true after it


def schedule(
    server: str, seed: int, rate: float = 0.06, wrap: Callable[[Storage], Storage] = lambda s: s
) -> World:
    """Let all of them work on a folder of their own; ``wrap`` is put around what each has."""
    rng = random.Random(seed)
    folder = f"run-{seed}-{time.time_ns()}"
    world = World()
    meter = Meter()
    budget = CountedBudget(meter)
    with proxy_to(server) as proxy:
        proxy.rule = faults(random.Random(rng.random()), rate, world.facts)
        threads = []
        for number, act in enumerate(_ACTORS):
            own = random.Random(rng.random())
            tried = Told(at(proxy.url, folder), meter.attempt)
            policy = RetryPolicy(max_retries=_RETRIES, initial_delay_s=0.01, max_delay_s=0.1)
            again = Told(retrying(tried, policy, budget=budget, rng=own), meter.begin)
            catalog = Catalog(wrap(again))
            values = iter(range(seed * 1000 + number * 100, seed * 1000 + number * 100 + 100))
            threads.append(
                threading.Thread(target=_acting, args=(act, catalog, world, own, values))
            )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    world.facts["storage calls"] += meter.calls
    world.facts["retries"] += meter.retries
    for problem in meter.problems():
        world.complain(problem)
    judge(Catalog(at(server, folder)), world)
    return world


def judge(true: Catalog, world: World) -> None:
    """Look at what is there, straight and in peace, and compare it with what was said."""
    listed = {info.prefix for info in true.list()}
    found: dict[str, int | None] = {}
    for name in listed:
        if not true.verify(name).is_intact:
            world.complain(f"{name} is damaged: {true.verify(name).damage[:2]}")
            continue
        found[name] = value_of(true.read(name))
        if found[name] is None:
            world.complain(f"{name} is a state that nobody saved")
    for name in (*NAMES, *RACES):
        deeds = [deed for deed in world.deeds if deed.name == name]
        value = found.get(name)
        if name in listed and value is None:
            continue
        if not _explained(value, deeds):
            told = sorted(
                (round(d.began_s, 2), round(d.ended_s, 2), d.value, d.acknowledged) for d in deeds
            )
            world.complain(
                f"{name} has {value}, which nothing explains that was done to it: {told}"
            )
    for name in RACES:
        winners = [deed.value for deed in world.deeds if deed.name == name and deed.acknowledged]
        if len(winners) > 1:
            world.complain(f"{name} was won by {winners}")


def _explained(value: int | None, deeds: Sequence[Deed]) -> bool:
    """Whether something that nothing acknowledged came after made it so. Where nothing is there,
    a deletion did, or nothing was ever acknowledged."""
    last = max((deed.began_s for deed in deeds if deed.acknowledged), default=float("-inf"))
    possible = [deed for deed in deeds if deed.ended_s >= last]
    if value is None and not any(deed.acknowledged and deed.value is not None for deed in deeds):
        return True
    return any(deed.value == value for deed in possible)


# --- the campaign


@contextlib.contextmanager
def server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, moto_server(Path(folder) / "log") as url:
        request = urllib.request.Request(f"{url}/{_BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield url


def run(subject: str, seed: int) -> Outcome:  # noqa: ARG001 -- there is only holdfast
    facts: Counter[str] = Counter()
    problems: list[str] = []
    with server() as url:
        for nth in range(SCHEDULES):
            number = seed * SCHEDULES + nth
            rate = (0.03, 0.06, 0.12, 0.25)[nth % 4]
            world = schedule(url, number, rate)
            facts += world.facts
            problems += [f"schedule {number}: {problem}" for problem in world.problems]
    saves = sum(count for what, count in facts.items() if re.match("saves ", what))
    return Outcome(
        cases=saves,
        violated=len(problems),
        violations=tuple(problems[:_SHOWN]),
        facts=dict(facts),
    )


def _unavailable(_: str) -> str | None:
    return None if importlib.util.find_spec("moto") else "moto, an S3 server, is not installed"


CAMPAIGN: Final = Campaign(
    name="object store",
    promise="an object store that answers late, wrongly or not at all loses and tears no commit",
    counted="saves to S3 through a proxy that breaks requests",
    cases=2000,
    run=run,
    subjects=(HOLDFAST,),
    unavailable=_unavailable,
)


if __name__ == "__main__":
    import sys

    print(run(HOLDFAST, int(sys.argv[1]) if len(sys.argv) > 1 else 0))
