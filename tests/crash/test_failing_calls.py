"""Whatever call fails: an error of ours, or a success that is one. Never anything lost.

In the manner of SQLite: the first call fails, then the second, until none is left to fail. After
each the disk is crashed as well, with the syncs that failed not counted: so a success that hangs
on one shows.
"""

import contextlib
import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from itertools import count
from pathlib import Path

import pytest
from campaign import MEMORY, ROOT, observe, read_value, state_of
from explorer import Disk
from failing import AFTER, BEFORE, FROM_THEN_ON, NOTHING, SHORT, FailingSystem
from recovered import Recovered, visible

from holdfast.catalog import Catalog
from holdfast.errors import CheckpointError, NoSpaceError
from holdfast.storage import LocalStorage
from holdfast.storage._system import System

EXISTING = {
    "checkpoint old": "value 1",
    "checkpoint other": "value 2",
    "object plain/a": b"a" * 700,
}

BIG = os.urandom(1024) * (9 * 1024)


def _save(storage):
    Catalog(storage).write("new", state_of(3))


def _overwrite(storage):
    Catalog(storage).write("old", state_of(3), overwrite=True)


def _delete(storage):
    Catalog(storage).delete("old")


def _gc(storage):
    Catalog(storage).gc()


def _create(storage):
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
    assert [info.key for info in storage.list("plain/")] == ["plain/a"]


ACTS = {
    "save": (_save, {"checkpoint new": "value 3"}),
    "overwrite": (_overwrite, {"checkpoint old": "value 3"}),
    "delete": (_delete, {"checkpoint old": None}),
    "gc": (_gc, {}),
    "create": (_create, {"object plain/b/c": b"b" * 700}),
    "replace": (_replace, {"object plain/a": b"b" * 600}),
    "write": (_write, {"object plain/b/c": b"b" * 900}),
    "write large": (_write_large, {"object plain/b/c": BIG}),
    "remove": (_remove, {"object plain/a": None}),
    "read": (_read, {}),
}


@pytest.fixture(scope="module")
def prepared():
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        before = Path(folder) / "before"
        storage = LocalStorage(before / ROOT)
        Catalog(storage).write("old", state_of(1))
        Catalog(storage).write("other", state_of(2))
        storage.create("plain/a", b"a" * 700)
        yield before


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "holdfast")


class Campaign:
    """Injections into one act, until none fires."""

    def __init__(self, prepared: Path, act: str) -> None:
        self._prepared = prepared
        self._act, self._change = ACTS[act]
        self._rng = random.Random(act)
        self._values = {}
        self._fds = _fds()
        self.injections = 0
        self.successes = 0

    def fail_all(self, how: str, code: int = errno.EIO) -> "Campaign":
        for nth in count(1):
            base = self._prepared.parent / "now"
            shutil.copytree(self._prepared, base)
            try:
                system = FailingSystem(base, nth, code, how)
                self._fail(system, base, f"{how} call {nth}, {errno.errorcode[code]}")
            finally:
                shutil.rmtree(base)
            if not system.failed:
                return self
            self.injections += 1
        raise AssertionError("unreachable")

    def _fail(self, system: FailingSystem, base: Path, where: str) -> None:
        try:
            self._act(LocalStorage(base / ROOT, system=system))
        except CheckpointError as error:
            where = f"{where} ({', '.join(system.failed)}) raised {error!r}"
            assert system.failed, where
            allowed = {key: {EXISTING.get(key), new} for key, new in self._change.items()}
            if system._how in {BEFORE, SHORT, NOTHING} and system.failed != ["unlink"]:
                assert _hidden(base) == [], where
        else:
            where = f"{where} ({', '.join(system.failed)}) succeeded"
            self.successes += 1
            allowed = {key: {new} for key, new in self._change.items()}
            assert system._how != NOTHING or not system.failed, where
        assert not set(system.synced_again) & system.files.keys(), where
        assert _fds() == self._fds, where
        assert not [t for t in threading.enumerate() if t.name.startswith("holdfast")], where
        self._check(observe(LocalStorage(base / ROOT)), allowed, where)
        disk = Disk(system)
        for op in system.log:
            disk.apply(op)
        for image in disk.images(self._rng, 16):
            found = observe(Recovered(visible(image, ROOT)), self._read)
            self._check(found, allowed, f"{where}, then a crash")

    def _check(self, found, allowed, where) -> None:
        for subject in EXISTING.keys() | allowed.keys() | found.keys():
            value = found.get(subject)
            wanted = allowed.get(subject, {EXISTING.get(subject)})
            assert value in wanted, f"{where}: {subject} is {str(value)[:200]}"

    def _read(self, storage: Recovered, prefix: str) -> str:
        own = [item for item in storage.objects.items() if item[0].startswith(f"{prefix}/")]
        key = frozenset(own)
        if key not in self._values:
            self._values[key] = read_value(storage, prefix)
        return self._values[key]


@pytest.mark.parametrize("act", ACTS)
def test_a_call_that_fails_loses_nothing(prepared, act):
    campaign = Campaign(prepared, act).fail_all(BEFORE).fail_all(AFTER)
    assert campaign.injections >= 8


@pytest.mark.parametrize("act", ["save", "replace", "write", "remove"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EDQUOT])
def test_neither_does_one_that_may_pass_or_a_full_disk(prepared, act, code):
    Campaign(prepared, act).fail_all(BEFORE, code)


@pytest.mark.parametrize("act", ["overwrite", "write large"])
def test_a_disk_that_dies_for_good_loses_nothing(prepared, act):
    campaign = Campaign(prepared, act).fail_all(FROM_THEN_ON)
    assert campaign.injections > 10


@pytest.mark.parametrize("act", ACTS.keys() - {"delete", "gc", "remove"})
def test_short_reads_and_writes_are_followed_by_the_rest(prepared, act):
    campaign = Campaign(prepared, act).fail_all(SHORT)
    assert campaign.successes == campaign.injections + 1 > 1


@pytest.mark.parametrize("act", ["create", "replace", "write", "write large", "read"])
def test_no_progress_is_an_error_and_no_endless_loop(prepared, act):
    campaign = Campaign(prepared, act).fail_all(NOTHING)
    assert campaign.successes == 1 <= campaign.injections


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("nth", range(1, 9))
def test_a_full_disk_or_quota_is_told_as_such(prepared, tmp_path, code, nth):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    system = FailingSystem(tmp_path, nth, code)
    with pytest.raises(NoSpaceError) as caught:
        _create(LocalStorage(tmp_path / ROOT, system=system))
    assert caught.value.path == "plain/b/c"
    assert "make room" in caught.value.message


@pytest.mark.parametrize("act", ["save", "create"])
def test_a_sync_that_failed_for_a_passing_reason_is_not_worth_another_try(prepared, act):
    """Else a retry would find the object in place, and call it stored."""
    for nth in count(1):
        base = prepared.parent / "now"
        shutil.copytree(prepared, base)
        try:
            system = FailingSystem(base, nth, errno.ESTALE)
            error = _error_of(ACTS[act][0], LocalStorage(base / ROOT, system=system))
            assert system.failed != ["sync"] or error is None or not error.transient
            if not system.failed:
                return
        finally:
            shutil.rmtree(base)


class _LosingAnswers(System):
    """A network disk that does as told, loses the answer, and is then told a second time."""

    def make_folder(self, name, folder=None):
        super().make_folder(name, folder)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def rename(self, old, new, folder):
        super().rename(old, new, folder)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def link(self, old, new, folder):
        super().link(old, new, folder)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def unlink(self, name, folder):
        super().unlink(name, folder)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


@pytest.mark.parametrize("act", ACTS)
def test_a_lost_answer_is_not_taken_for_a_failure(prepared, tmp_path, act):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    do, change = ACTS[act]
    do(LocalStorage(tmp_path / ROOT, system=_LosingAnswers()))
    expected = {subject: value for subject, value in (EXISTING | change).items() if value}
    assert observe(LocalStorage(tmp_path / ROOT)) == expected
    assert _hidden(tmp_path) == []


class _WithABadSector(FailingSystem):
    """One file of those that are there cannot be read."""

    def __init__(self, base: Path, bad: Path) -> None:
        super().__init__(base, nth=0)
        self._bad = bad.stat().st_ino

    def read(self, fd, into, offset):
        if os.fstat(fd).st_ino == self._bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, into, offset)


def test_a_save_is_the_newest_also_if_the_newest_before_cannot_be_read(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    root = tmp_path / ROOT
    system = _WithABadSector(tmp_path, root / "other" / "metadata.json")
    try:
        _save(LocalStorage(root, system=system))
    except CheckpointError:
        return
    assert Catalog(root).list()[0].prefix == "new"
    ordinals = [info.ordinal for info in Catalog(root).list()]
    assert len(set(ordinals)) == len(ordinals)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_ten_thousand_failing_calls_lose_nothing(prepared):
    codes = [
        errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EACCES, errno.EROFS,
        errno.EMFILE, errno.ETIMEDOUT, errno.EINVAL, errno.EPERM, errno.EAGAIN, errno.EBUSY,
    ]  # fmt: skip
    injections = 0
    for act in ACTS:
        for how in (BEFORE, AFTER, FROM_THEN_ON):
            for code in codes:
                injections += Campaign(prepared, act).fail_all(how, code).injections
    print(f"{injections} injections, 0 false successes")  # noqa: T201
    assert injections >= 10_000


def test_what_close_complains_of_is_no_failure(tmp_path):
    """close() may fail on a network disk: what it is about was synced, or only read."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("makes close() fail by strace, which is not installed: install strace")
    program = (
        "import sys\n"
        "from holdfast.storage import LocalStorage\n"
        "storage = LocalStorage(sys.argv[1])\n"
        "storage.create('a', b'before')\n"
        "print(storage.read('a').decode())\n"
    )
    inject = ["-f", "-o", os.devnull, "-e", "trace=close", "-e", "inject=close:error=EIO:when=1+"]
    inject += ["-P", str(tmp_path)]
    try:
        done = subprocess.run(
            [strace, *inject, sys.executable, "-c", program, str(tmp_path)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    except OSError as error:
        pytest.skip(f"makes close() fail by strace, which does not run here: {error}")
    if "ptrace" in done.stderr:
        pytest.skip("makes close() fail by strace, which may not trace here (no ptrace allowed)")
    assert done.stdout == "before\n", done.stderr


def _error_of(act, storage) -> CheckpointError | None:
    try:
        act(storage)
    except CheckpointError as error:
        return error
    return None


def _fds() -> int:
    """How many files and folders are open. Sockets are other tests', and close when they like."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # one of another thread's, closed meanwhile
            found += str(path.readlink()).startswith("/")
    return found


def _hidden(base: Path) -> list[str]:
    return [str(path) for path in base.rglob(".holdfast-*")]
