"""Saves, overwrites, deletes and collects on a recorded disk, crashes it everywhere, and judges
what is left. Knows what a catalog promises; the crashes themselves are the explorer's.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from explorer import Disk, Image
from recorder import Killed, RecordingSystem
from recovered import Recovered, visible

from holdfast.catalog import Catalog
from holdfast.catalog._committed import find_record
from holdfast.contracts import COMMIT_RECORD
from holdfast.errors import CheckpointError
from holdfast.storage import LocalStorage

ROOT = "runs"
PLAIN = "plain/"

MEMORY = Path("/dev/shm")


def state_of(value: int, elements: int = 900) -> dict[str, object]:
    """A state that no other value has any block of."""
    rng = np.random.default_rng(value)
    return {
        "step": value,
        "weight": rng.standard_normal(elements, dtype=np.float32),
        "model": {"bias": rng.integers(0, 2**31, 7), "name": f"value {value}"},
    }


def value_of(tree: object) -> str:
    """Which state this is, or what is wrong with it."""
    try:
        value = tree["step"]
        wanted = state_of(value, len(tree["weight"]))
        same = (
            np.array_equal(tree["weight"], wanted["weight"])
            and np.array_equal(tree["model"]["bias"], wanted["model"]["bias"])
            and tree["model"]["name"] == wanted["model"]["name"]
            and tree.keys() == wanted.keys()
        )
    except (KeyError, TypeError, IndexError) as error:
        return f"a mixture: {error!r}"
    return f"value {value}" if same else "a mixture"


class Run:
    """One process on a recorded disk. Says in the log what it begins and what it was promised."""

    def __init__(self, base: Path, recorder: RecordingSystem) -> None:
        self.recorder = recorder
        self.storage = LocalStorage(base / ROOT, system=recorder)
        self.catalog = Catalog(self.storage)

    def save(self, prefix: str, value: int, **options) -> None:
        with self._promised(f"checkpoint {prefix}", f"value {value}"):
            self.catalog.write(prefix, state_of(value), step=value, **options)

    def delete(self, prefix: str) -> None:
        with self._promised(f"checkpoint {prefix}", None):
            self.catalog.delete(prefix)

    def create(self, key: str, data: bytes) -> None:
        with self._promised(f"object {key}", data):
            self.storage.create(key, data)

    def replace(self, key: str, data: bytes) -> None:
        with self._promised(f"object {key}", data):
            self.storage.replace(key, data, self.storage.stat(key).version)

    def write(self, key: str, data: bytes) -> None:
        with self._promised(f"object {key}", data), self.storage.open_writer(key) as writer:
            writer.write_at(0, data)
            writer.finish()

    def remove(self, key: str) -> None:
        with self._promised(f"object {key}", None):
            self.storage.delete(key)

    @contextmanager
    def _promised(self, subject: str, value: object) -> Iterator[None]:
        self.recorder.mark("begin", subject, value)
        yield
        self.recorder.mark("promised", subject, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``before`` happens on a disk that is then synced; ``run`` is recorded and crashed. If
    ``then`` is given, ``run`` is killed once before each of its operations, and ``then`` is what
    the next process does."""

    name: str
    run: Callable[[Run], None]
    before: Callable[[Run], None] = lambda _: None
    then: Callable[[Run], None] | None = None
    age_s: float = 1e8


def _one(run: Run) -> None:
    run.save("step_1", 1)


def _two(run: Run) -> None:
    run.save("step_1", 1)
    run.save("step_2", 2)


def _plain(run: Run) -> None:
    run.create(f"{PLAIN}a", b"a" * 1500)
    run.replace(f"{PLAIN}a", b"b" * 1400)
    run.write(f"{PLAIN}deep/er/c", b"c" * 3000)
    run.write(f"{PLAIN}deep/er/c", b"d" * 2600)
    run.remove(f"{PLAIN}a")
    run.remove(f"{PLAIN}deep/er/c")


def _leftovers(run: Run) -> None:
    """Two checkpoints, one overwritten, and what saves left that died at several moments."""
    _two(run)
    for kill_at in (9, 14, 21):
        run.recorder.revive()
        run.recorder.kill_at = kill_at
        try:
            run.catalog.write(f"dead_{kill_at}", state_of(5))
        except Killed:
            run.recorder.revive()
    run.recorder.kill_at = 17
    try:
        run.catalog.write("step_1", state_of(6), overwrite=True)
    except Killed:
        run.recorder.revive()


def _gc_now(run: Run) -> None:
    """As ``gc``, on a day when the leases of the dead are over."""
    for info in [*run.storage.list()]:
        path = run.storage._root / info.key
        if path.name.startswith("intent-"):
            age(path)
    run.catalog.gc()


def age(path: Path) -> None:
    import os

    os.utime(path, (1, 1))


WORKLOADS = [
    Workload(name="first save", run=_one),
    Workload(name="second save", before=_one, run=lambda run: run.save("step_2", 2)),
    Workload(
        name="overwrite", before=_two, run=lambda run: run.save("step_1", 3, overwrite=True)
    ),
    Workload(name="delete", before=_two, run=lambda run: run.delete("step_1")),
    Workload(
        name="delete and save again",
        before=_one,
        run=lambda run: (run.delete("step_1"), run.save("step_1", 2)),
    ),
    Workload(
        name="compressed",
        before=_one,
        run=lambda run: (
            run.save("step_2", 2, compression="balanced"),
            run.save("step_1", 4, compression="fast", overwrite=True),
        ),
    ),
    Workload(name="plain objects", run=_plain),
    Workload(name="gc", before=_leftovers, run=_gc_now),
    Workload(name="save after a kill", run=_one, then=lambda run: run.save("step_2", 2)),
    Workload(
        name="the same save after a kill",
        run=_one,
        then=lambda run: run.save("step_1", 2, overwrite=True),
    ),
    Workload(
        name="overwrite after a kill",
        before=_one,
        run=lambda run: run.save("step_1", 2, overwrite=True),
        then=lambda run: run.save("step_1", 3, overwrite=True),
    ),
    Workload(
        name="gc after a kill",
        before=_two,
        run=lambda run: run.save("step_1", 3, overwrite=True),
        then=_gc_now,
    ),
    Workload(
        name="gc killed, then again",
        before=_leftovers,
        run=_gc_now,
        then=_gc_now,
    ),
]


@dataclass(slots=True)
class Report:
    """How many crashes were looked at, how many of them look different from outside, and the
    first that broke a promise."""

    states: int = 0
    looks: int = 0
    violations: list[str] = field(default_factory=list)
    images: list[tuple[str, Image]] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        self.states += other.states
        self.looks += other.looks
        self.violations += other.violations
        self.images += other.images


Make = Callable[[Path], RecordingSystem]


def recorded(workload: Workload, make: Make = RecordingSystem) -> Iterator[RecordingSystem]:
    """The workload's logs: one, or one for every operation it can be killed before."""
    kill_at = 0
    while True:
        where = MEMORY if MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(dir=where) as folder:
            base = Path(folder)
            quiet = RecordingSystem(base)
            workload.before(Run(base, quiet))
            recorder = make(base)
            recorder.promised = [op for op in quiet.log if op.kind in {"begin", "promised"}]
            if workload.then is None:
                workload.run(Run(base, recorder))
                yield recorder
                return
            recorder.kill_at = kill_at
            try:
                workload.run(Run(base, recorder))
            except Killed:
                recorder.revive()
                recorder.mark("killed", "")
                workload.then(Run(base, recorder))
                yield recorder
                kill_at += 1
            else:
                return


def explore(
    workload: Workload,
    *,
    states: int,
    seed: int,
    make: Make = RecordingSystem,
    ordered: bool = False,
) -> Report:
    """Crash the workload in about ``states`` different ways, or in all that there are."""
    report = Report()
    rng = random.Random(f"{workload.name} {seed}")
    logs = [*recorded(workload, make)]
    seen: set[int] = set()
    looks: dict[frozenset[tuple[str, bytes]], _Look] = {}
    most = 48
    while True:
        before = len(seen)
        for recorder in logs:
            _crash_everywhere(
                recorder, rng, most, report, seen, looks, workload.age_s, ordered=ordered
            )
            if len(seen) >= states:
                break
        if len(seen) >= states or len(seen) < before * 1.01:
            break
        most *= 2
    report.states, report.looks = len(seen), len(looks)
    return report


def _crash_everywhere(
    recorder: RecordingSystem,
    rng: random.Random,
    most: int,
    report: Report,
    seen: set[int],
    looks: dict,
    age_s: float,
    *,
    ordered: bool,
) -> None:
    disk = Disk(recorder)
    allowed: dict[str, set[object]] = {}
    for op in recorder.promised:
        _expect(allowed, op)
    phase = hash(frozenset(allowed))
    begun = not any(op.kind == "killed" for op in recorder.log)
    for number, op in enumerate(recorder.log):
        if op.kind in {"begin", "promised", "killed"}:
            begun = begun or op.kind == "killed"
            _expect(allowed, op)
            phase = hash(tuple(sorted((s, repr(sorted(map(str, v)))) for s, v in allowed.items())))
        else:
            disk.apply(op)
        if not begun:
            continue
        for image in disk.images(rng, most, ordered=ordered):
            key = hash((phase, frozenset(image.items())))
            if key in seen:
                continue
            seen.add(key)
            look = _look(image, looks, age_s)
            for problem in look.problems(allowed):
                if len(report.violations) < 20:
                    report.violations.append(f"after operation {number} ({op.kind}): {problem}")
            if rng.random() < 0.002:
                report.images.append((str(number), image))


def _expect(allowed: dict[str, set[object]], op) -> None:
    if op.kind == "begin":
        allowed.setdefault(op.name, {None}).add(op.value)
    elif op.kind == "promised":
        allowed[op.name] = {op.value}


@dataclass(frozen=True, slots=True)
class _Look:
    found: Mapping[str, object]
    after_gc: Mapping[str, object]

    def problems(self, allowed: Mapping[str, set[object]]) -> Iterator[str]:
        for when, found in (("found", self.found), ("after gc", self.after_gc)):
            for subject in allowed.keys() | found.keys():
                value = found.get(subject)
                if value not in allowed.get(subject, {None}):
                    yield f"{when}: {subject} is {_short(value)}, not one of {_short(allowed.get(subject))}"
        for subject in self.found.keys() | self.after_gc.keys():
            if self.found.get(subject) != self.after_gc.get(subject):
                yield f"gc changed {subject}"


def _short(value: object) -> str:
    return repr(value)[:120]


def _look(image: Image, looks: dict, age_s: float) -> _Look:
    objects = visible(image, ROOT)
    key = frozenset(objects.items())
    if key not in looks:
        storage = Recovered(objects, age_s=age_s)
        found = observe(storage)
        Catalog(storage).gc()
        looks[key] = _Look(found, observe(storage))
    return looks[key]


def observe(storage) -> dict[str, object]:
    """Every checkpoint that is there, and every plain object, with what it reads as."""
    catalog = Catalog(storage)
    found: dict[str, object] = {}
    listed = {info.prefix for info in catalog.list()}
    for info in [*storage.list()]:
        prefix, _, name = info.key.rpartition("/")
        if info.key.startswith(PLAIN):
            found[f"object {info.key}"] = storage.read(info.key)
        elif name == COMMIT_RECORD:
            try:
                record = find_record(storage, prefix)
                if record is not None and not record.is_committed:
                    continue
                value = value_of(catalog.read(prefix))
                if prefix not in listed:
                    value = f"unlisted {value}"
                if not catalog.verify(prefix).is_intact:
                    value = f"damaged {value}"
            except CheckpointError as error:
                value = f"unreadable: {error}"
            found[f"checkpoint {prefix}"] = value
    return found
