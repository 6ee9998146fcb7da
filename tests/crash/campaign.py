"""Saves, overwrites, deletes and collects on a recorded disk, crashes it everywhere, and judges
what is left. Knows what a catalog promises; the crashes themselves are the explorer's.
"""

import contextlib
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from explorer import Disk, Image
from recorder import Killed, RecordingSystem
from recovered import Recovered, visible

from holdfast.catalog import Catalog
from holdfast.catalog._committed import TOMBSTONE, find_record
from holdfast.contracts import COMMIT_RECORD, Storage
from holdfast.errors import CheckpointError
from holdfast.storage import LocalStorage

ROOT = "runs"
PLAIN = "plain/"

MEMORY = Path("/dev/shm")
MOST_VIOLATIONS = 20
MOST_IMAGES = 10


def state_of(value: int, elements: int = 2000) -> dict[str, object]:
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
        self.root = base / ROOT
        self.storage = LocalStorage(self.root, system=recorder)
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

    @contextlib.contextmanager
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
    for kill_at in (9, 14, 17, 19):
        _killed(run, kill_at, lambda run: run.save("dead", 5, overwrite=True))
        _killed(run, kill_at, lambda run: run.save("step_1", 6, overwrite=True))


def _killed(run: Run, kill_at: int, act: Callable[[Run], None]) -> None:
    run.recorder.kill_at = kill_at
    with contextlib.suppress(Killed):
        act(run)
    run.recorder.revive()


def _gc(run: Run) -> None:
    run.catalog.gc()


def _gc_later(run: Run) -> None:
    """As ``gc``, on a day when the leases of the dead are over."""
    for path in run.root.rglob("intent-*"):
        os.utime(path, (1, 1))
    run.catalog.gc()


WORKLOADS = [
    Workload(name="first save", run=_one),
    Workload(name="second save", before=_one, run=lambda run: run.save("step_2", 2)),
    Workload(name="overwrite", before=_two, run=lambda run: run.save("step_1", 3, overwrite=True)),
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
    Workload(name="gc", before=_leftovers, run=_gc_later),
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
        then=_gc_later,
    ),
    Workload(
        name="gc beside a save that is dead but has its lease",
        before=_two,
        run=lambda run: run.save("step_1", 3, overwrite=True),
        then=_gc,
    ),
    Workload(name="gc killed, then again", before=_leftovers, run=_gc_later, then=_gc_later),
]

_FINITE = {"delete", "plain objects", "gc", "gc killed, then again"}
FINITE = [workload for workload in WORKLOADS if workload.name in _FINITE]
"""Those that run out after some hundreds of states: another seed would only try the same again."""

ENDLESS = [workload for workload in WORKLOADS if workload.name not in _FINITE]
"""Those with more states than can be tried: another seed tries others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How many states a crash could leave, how many of them differ in what a storage shows, how
    many broke a promise, the first of those in words, and some to look at."""

    states: int
    looks: int
    violated: int
    violations: list[str]
    images: list[Image]


Make = Callable[[Path], RecordingSystem]


def recorded(workload: Workload, make: Make = RecordingSystem) -> Iterator[RecordingSystem]:
    """The workload's logs: one, or one for every operation it can be killed before."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        before = Path(folder) / "before"
        before.mkdir()
        quiet = RecordingSystem(before)
        workload.before(Run(before, quiet))
        promised = [op for op in quiet.log if op.kind in {"begin", "promised"}]
        for kill_at in itertools.count():
            base = Path(folder) / f"{kill_at}"
            shutil.copytree(before, base)
            recorder = make(base)
            recorder.log += promised
            if workload.then is None:
                recorder.mark("start", "")
                workload.run(Run(base, recorder))
                yield recorder
                return
            recorder.kill_at = kill_at
            try:
                workload.run(Run(base, recorder))
            except Killed:
                recorder.revive()
                recorder.mark("start", "")
                workload.then(Run(base, recorder))
                yield recorder
                shutil.rmtree(base)
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
    explorer = _Explorer(random.Random(f"{workload.name} {seed}"), ordered=ordered)
    logs = [*recorded(workload, make)]
    most = 32
    for log in logs:
        explorer.crash_everywhere(log, most)
    found = -1
    while found < len(explorer.seen) < states:
        found, most = len(explorer.seen), most * 2
        for log in logs:
            if len(explorer.seen) < states:
                explorer.crash_everywhere(log, most)
    return explorer.report()


class _Explorer:
    """Crashes of one workload. The same bytes at a moment when other things were promised count
    as another state."""

    def __init__(self, rng: random.Random, *, ordered: bool) -> None:
        self._rng = rng
        self._ordered = ordered
        self._looks: dict[frozenset[tuple[str, bytes]], _Look] = {}
        self._values: dict[frozenset[tuple[str, bytes]], str] = {}
        self._violated = 0
        self._violations: list[str] = []
        self._images: list[Image] = []
        self.seen: set[int] = set()

    def report(self) -> Report:
        return Report(
            states=len(self.seen),
            looks=len(self._looks),
            violated=self._violated,
            violations=self._violations,
            images=self._images,
        )

    def crash_everywhere(self, recorder: RecordingSystem, most: int) -> None:
        disk = Disk(recorder)
        allowed: dict[str, set[object]] = {}
        started = False
        for number, op in enumerate(recorder.log):
            if op.kind in {"begin", "promised", "start"}:
                started = started or op.kind == "start"
                _expect(allowed, op)
            else:
                disk.apply(op)
            if started:
                promises = str(
                    sorted((subject, sorted(map(str, v))) for subject, v in allowed.items())
                )
                for image in disk.images(self._rng, most, ordered=self._ordered):
                    key = hash((promises, frozenset(image.items())))
                    if key not in self.seen:
                        self.seen.add(key)
                        self._judge(image, allowed, f"after operation {number} ({op.kind})")

    def _judge(self, image: Image, allowed: Mapping[str, set[object]], when: str) -> None:
        problems = [*self._look(image).problems(allowed)]
        self._violated += bool(problems)
        left = MOST_VIOLATIONS - len(self._violations)
        self._violations += [f"{when}: {problem}" for problem in problems[:left]]
        if len(self._images) < MOST_IMAGES and self._rng.random() < 0.01:
            self._images.append(image)

    def _look(self, image: Image) -> "_Look":
        objects = visible(image, ROOT)
        key = frozenset(objects.items())
        if key not in self._looks:
            storage = Recovered(objects)
            found = observe(storage, self._read)
            Catalog(storage).gc()
            self._looks[key] = _Look(found, observe(storage, self._read))
        return self._looks[key]

    def _read(self, storage: Recovered, prefix: str) -> str:
        """As ``read_value``, once for the same bytes."""
        own = [item for item in storage.objects.items() if item[0].startswith(f"{prefix}/")]
        key = frozenset(own)
        if key not in self._values:
            self._values[key] = read_value(storage, prefix)
        return self._values[key]


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
                    wanted = _short(allowed.get(subject))
                    yield f"{when}, {subject} is {_short(value)}, not one of {wanted}"
        for subject in self.found.keys() | self.after_gc.keys():
            if self.found.get(subject) != self.after_gc.get(subject):
                yield f"gc changed {subject}"


def _short(value: object) -> str:
    return repr(value)[:120]


def observe(
    storage: Storage, read: Callable[[Storage, str], str] | None = None
) -> dict[str, object]:
    """Every checkpoint that is there, listed or not, and every plain object, with what it reads
    as."""
    read = read_value if read is None else read
    listed = {info.prefix for info in Catalog(storage).list()}
    found: dict[str, object] = {}
    for info in [*storage.list()]:
        prefix, _, name = info.key.rpartition("/")
        if info.key.startswith(PLAIN):
            found[f"object {info.key}"] = storage.read(info.key)
        elif name == COMMIT_RECORD:
            value = read(storage, prefix)
            if value != TOMBSTONE:
                found[f"checkpoint {prefix}"] = value if prefix in listed else f"unlisted {value}"
    return found


def read_value(storage: Storage, prefix: str) -> str:
    try:
        found = find_record(storage, prefix)
        if found is not None and not found.is_committed:
            return TOMBSTONE
        return value_of(Catalog(storage).read(prefix))
    except CheckpointError as error:
        return f"unreadable: {error}"
