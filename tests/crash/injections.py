"""Injects failures into every call of every act of a catalog, and judges what is left. Knows what a
catalog promises when a call fails; the failing disk is ``failing``'s.
"""

import contextlib
import errno
import os
import random
import shutil
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from campaign import ROOT, observe, read_value, state_of
from explorer import Disk
from failing import BEFORE, NOTHING, SHORT, FailingSystem
from recovered import Recovered, visible

from holdfast.catalog import Catalog
from holdfast.contracts import ReadRange
from holdfast.errors import CheckpointError, StorageError
from holdfast.storage import LocalStorage
from holdfast.storage._pages import aligned_memory

BIG = os.urandom(9 * 1024 * 1024 + 5)
LARGE = os.urandom(4 * 1024 * 1024 + 3 * 4096 + 5)
"""Both take several requests and end within a block; no block of them is like another."""

EXISTING = {
    "checkpoint old": "value 1",
    "checkpoint other": "value 2",
    "object plain/a": b"a" * 700,
    "object plain/large": LARGE,
}


def save(storage):
    Catalog(storage).write("new", state_of(3))


def _overwrite(storage):
    Catalog(storage).write("old", state_of(3), overwrite=True)


def _delete(storage):
    Catalog(storage).delete("old")


def _gc(storage):
    Catalog(storage).gc()


def create(storage):
    storage.create("plain/b/c", b"b" * 700)


def _replace(storage):
    storage.replace("plain/a", b"b" * 600, storage.stat("plain/a").version)


def _write(storage):
    with storage.open_writer("plain/b/c", size_bytes=900) as writer:
        writer.write_at(0, b"b" * 900)
        writer.finish()


def _write_large(storage):
    with storage.open_writer("plain/b/c") as writer:
        writer.write_at(0, BIG)
        writer.finish()


def _remove(storage):
    storage.delete("plain/a")


def _read(storage):
    assert Catalog(storage).read("old")["step"] == 1
    assert storage.read("plain/a") == b"a" * 700
    assert [info.key for info in storage.list("plain/")] == ["plain/a", "plain/large"]


def _read_large(storage):
    """Past the page cache, and without a copy but of the edges: memory lies as the bytes do."""
    into = aligned_memory(len(LARGE))[1:]
    storage.read_into("plain/large", [ReadRange(start=1, into=into, uncached=True)])
    assert into == LARGE[1:]


def _verify(storage):
    """What cannot be read is told as that, and nothing that can be is called damaged."""
    unread = ("could not read the object", "the object was cut while it was read")
    problems = [damage.problem for damage in Catalog(storage).verify("old").damage]
    for problem in problems:
        assert any(each in problem for each in unread), problem
    if problems:
        raise StorageError(problems[0])


ACTS = {
    "save": (save, {"checkpoint new": "value 3"}),
    "overwrite": (_overwrite, {"checkpoint old": "value 3"}),
    "delete": (_delete, {"checkpoint old": None}),
    "gc": (_gc, {}),
    "create": (create, {"object plain/b/c": b"b" * 700}),
    "replace": (_replace, {"object plain/a": b"b" * 600}),
    "write": (_write, {"object plain/b/c": b"b" * 900}),
    "write large": (_write_large, {"object plain/b/c": BIG}),
    "remove": (_remove, {"object plain/a": None}),
    "read": (_read, {}),
    "read large": (_read_large, {}),
    "verify": (_verify, {}),
}


def prepare(base: Path) -> None:
    """What every act finds: ``EXISTING``."""
    storage = LocalStorage(base / ROOT)
    Catalog(storage).write("old", state_of(1))
    Catalog(storage).write("other", state_of(2))
    storage.create("plain/a", b"a" * 700)
    storage.create("plain/large", LARGE)


class Injections:
    """Failures of every call of one act in turn, until none is left to fail."""

    def __init__(self, prepared: Path, act: str, seed: int = 0) -> None:
        self._prepared = prepared
        self._name = act
        self._act, self._change = ACTS[act]
        self._rng = random.Random(f"{act} {seed}")
        self._values = {}
        self._fds = _fds()
        self.failed: set[str] = set()
        self.reads_of_parts = 0
        self.injections = 0
        self.successes = 0
        self.violated = 0
        self.violations: list[str] = []

    def fail_all(self, how: str, code: int = errno.EIO) -> "Injections":
        for nth in count(1):
            base = self._prepared.parent / "now"
            shutil.copytree(self._prepared, base)
            try:
                system = FailingSystem(base, nth, code, how)
                where = f"{self._name}: {how} call {nth}, {errno.errorcode[code]}"
                problems = [*self._fail(system, base, where)]
                self.violated += bool(problems)
                self.violations += problems
            finally:
                shutil.rmtree(base)
            if not system.failed:
                return self
            self.failed.update(system.failed)
            self.reads_of_parts += system.failed_reads_of_parts
            self.injections += 1
        raise AssertionError("unreachable")

    def _fail(self, system: FailingSystem, base: Path, where: str) -> Iterator[str]:
        try:
            self._act(LocalStorage(base / ROOT, system=system))
        except CheckpointError as error:
            where = f"{where} ({', '.join(system.failed)}) raised {error!r}"
            if not system.failed:
                yield f"{where}, and no call had failed"
            allowed = {key: {EXISTING.get(key), new} for key, new in self._change.items()}
            if system._how in {BEFORE, SHORT, NOTHING} and system.failed != ["unlink"]:
                yield from (f"{where}, and left {path}" for path in hidden(base))
        except AssertionError as error:
            where = f"{where} ({', '.join(system.failed)}) gave a wrong answer: {error}"
            yield where
            allowed = {}
        else:
            where = f"{where} ({', '.join(system.failed)}) succeeded"
            self.successes += 1
            allowed = {key: {new} for key, new in self._change.items()}
            if system._how == NOTHING and "write" in system.failed:
                yield f"{where}, and wrote nothing"
        yield from self._left(system, where)
        yield from self._lost(observe(LocalStorage(base / ROOT)), allowed, where)
        disk = Disk(system)
        for op in system.log:
            disk.apply(op)
        for image in disk.images(self._rng, 16):
            found = observe(Recovered(visible(image, ROOT)), self._read)
            yield from self._lost(found, allowed, f"{where}, then a crash")

    def _left(self, system: FailingSystem, where: str) -> Iterator[str]:
        if set(system.synced_again) & system.files.keys():
            yield f"{where}, and a file was synced again whose sync had failed"
        if _fds() != self._fds:
            yield f"{where}, and files were left open"
        if [thread for thread in threading.enumerate() if thread.name.startswith("holdfast")]:
            yield f"{where}, and a thread was left running"

    def _lost(self, found, allowed, where) -> Iterator[str]:
        for subject in sorted(EXISTING.keys() | allowed.keys() | found.keys()):
            value = found.get(subject)
            if value not in allowed.get(subject, {EXISTING.get(subject)}):
                yield f"{where}: {subject} is {str(value)[:200]}"

    def _read(self, storage: Recovered, prefix: str) -> str:
        own = [item for item in storage.objects.items() if item[0].startswith(f"{prefix}/")]
        key = frozenset(own)
        if key not in self._values:
            self._values[key] = read_value(storage, prefix)
        return self._values[key]


def _fds() -> int:
    """How many files and folders are open. Sockets are other tests', and close when they like."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # one of another thread's, closed meanwhile
            found += str(path.readlink()).startswith("/")
    return found


def hidden(base: Path) -> list[str]:
    return [str(path) for path in base.rglob(".holdfast-*")]
