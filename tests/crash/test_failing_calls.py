"""Whatever call fails: an error of ours, or a success that is one. Never anything lost.

In the manner of SQLite: the first call fails, then the second, until none is left to fail. After
each the disk is crashed as well, with the syncs that failed not counted: so a success that hangs
on one shows.
"""

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

import pytest
from campaign import MEMORY, ROOT, observe
from failing import AFTER, BEFORE, CALLS, FROM_THEN_ON, NOTHING, SHORT, FailingSystem
from injections import ACTS, EXISTING, Injections, create, hidden, prepare, save

from holdfast.catalog import Catalog
from holdfast.errors import CheckpointError, NoSpaceError
from holdfast.storage import LocalStorage
from holdfast.storage._system import System


@pytest.fixture(scope="module")
def prepared():
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        before = Path(folder) / "before"
        prepare(before)
        yield before


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "holdfast")


@pytest.mark.parametrize("act", ACTS)
def test_a_call_that_fails_loses_nothing(prepared, act):
    done = Injections(prepared, act).fail_all(BEFORE).fail_all(AFTER)
    assert done.violations == []
    assert done.injections >= 8


def test_there_is_no_call_that_never_fails(prepared):
    """Direct I/O is given up only where it was refused: so what is left then fails as well."""
    fd = os.open(prepared / ROOT / "plain/large", os.O_RDONLY)
    try:
        if not System().make_direct(fd):
            pytest.skip("this filesystem has no direct I/O")
    finally:
        os.close(fd)
    failed, reads_of_parts = set(), 0
    for act in ACTS:
        done = Injections(prepared, act).fail_all(FROM_THEN_ON, errno.EINVAL)
        assert done.violations == []
        failed |= done.failed
        reads_of_parts += done.reads_of_parts
    assert failed == {*CALLS}
    assert reads_of_parts > 1


@pytest.mark.parametrize("act", ["save", "replace", "write", "remove"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EDQUOT])
def test_neither_does_one_that_may_pass_or_a_full_disk(prepared, act, code):
    assert Injections(prepared, act).fail_all(BEFORE, code).violations == []


@pytest.mark.parametrize("act", ["overwrite", "write large"])
def test_a_disk_that_dies_for_good_loses_nothing(prepared, act):
    done = Injections(prepared, act).fail_all(FROM_THEN_ON)
    assert done.violations == []
    assert done.injections > 10


@pytest.mark.parametrize("act", ACTS.keys() - {"delete", "gc", "remove"})
def test_short_reads_and_writes_are_followed_by_the_rest(prepared, act):
    done = Injections(prepared, act).fail_all(SHORT)
    assert done.violations == []
    assert done.successes == done.injections + 1 > 1


@pytest.mark.parametrize("act", ["create", "replace", "write", "write large", "read"])
def test_no_progress_is_an_error_and_no_endless_loop(prepared, act):
    done = Injections(prepared, act).fail_all(NOTHING)
    assert done.violations == []
    assert done.successes == 1 <= done.injections


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("nth", range(1, 9))
def test_a_full_disk_or_quota_is_told_as_such(prepared, tmp_path, code, nth):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    system = FailingSystem(tmp_path, nth, code)
    with pytest.raises(NoSpaceError) as caught:
        create(LocalStorage(tmp_path / ROOT, system=system))
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
    assert hidden(tmp_path) == []


class _WithABadSector(FailingSystem):
    """One file of those that are there cannot be read."""

    def __init__(self, base: Path, bad: Path) -> None:
        super().__init__(base, nth=0)
        self._bad = bad.stat().st_ino

    def read_parts(self, fd, into, offset):
        if os.fstat(fd).st_ino == self._bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_parts(fd, into, offset)


def test_a_save_is_the_newest_also_if_the_newest_before_cannot_be_read(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    root = tmp_path / ROOT
    system = _WithABadSector(tmp_path, root / "other" / "metadata.json")
    try:
        save(LocalStorage(root, system=system))
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
                done = Injections(prepared, act).fail_all(how, code)
                assert done.violations == []
                injections += done.injections
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
