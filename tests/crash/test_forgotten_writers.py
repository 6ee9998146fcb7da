"""Writers of LocalStorage that nobody finishes: they hold nothing up and leave nothing behind."""

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage import LocalStorage
from holdfast.storage._system import System

MIB = 1024 * 1024
SMALL, LARGE = 3, 9 * MIB


def run(script: str, root: Path) -> subprocess.CompletedProcess[str]:
    """A script that has ``storage``, in an interpreter of its own."""
    head = f"from holdfast.storage import LocalStorage\nstorage = LocalStorage({str(root)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.name != ".holdfast.lock")


def writing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-write"]


def descriptors(root: Path) -> list[str]:
    """What is open in the folder."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # one of another thread's, closed meanwhile
            names.append(str(path.readlink()))
    return [name for name in names if name.startswith(str(root))]


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("end", ["", "raise SystemExit('failed')", "1 / 0"])
def test_an_open_writer_does_not_keep_the_interpreter_from_ending(tmp_path, size, end):
    done = run(
        f"writer = storage.open_writer('a')\nwriter.write_at(0, bytes({size}))\nprint('written')\n"
        + end,
        tmp_path,
    )
    assert done.stdout == "written\n"
    assert done.returncode == (1 if end else 0)
    assert done.stderr.strip().rpartition("\n")[2] == {
        "": "",
        "raise SystemExit('failed')": "failed",
        "1 / 0": "ZeroDivisionError: division by zero",
    }.get(end)
    assert files(tmp_path) == []


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_writer_that_was_open_when_the_interpreter_ended_says_so_afterwards(tmp_path, size):
    done = run(
        f"""
        import atexit

        def late():
            try:
                writer.finish()
            except Exception as error:
                print(type(error).__name__, error)

        atexit.register(late)  # before the first finalizer, so it runs after them
        writer = storage.open_writer("a")
        writer.write_at(0, bytes({size}))
        """,
        tmp_path,
    )
    assert (
        done.stdout == "StorageError could not write the object: the writer was given up [path a]\n"
    )
    assert (done.returncode, done.stderr, files(tmp_path)) == (0, "", [])


@pytest.mark.parametrize("where", ["atexit", "thread", "pool"])
def test_what_is_saved_while_the_interpreter_ends_is_whole(tmp_path, where):
    done = run(
        f"""
        import atexit, concurrent.futures, threading
        main = threading.current_thread()

        def save():
            if {where!r} == "thread":
                main.join()
            piece = b"0123456789abcdef" * 65536
            with storage.open_writer("a", size_bytes=24 * len(piece)) as writer:
                for n in range(24):
                    writer.write_at(n * len(piece), piece)
                writer.finish()

        pool = concurrent.futures.ThreadPoolExecutor()
        start = {{"atexit": atexit.register, "thread": lambda f: threading.Thread(target=f).start(),
                  "pool": pool.submit}}
        start[{where!r}](save)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert LocalStorage(tmp_path).read("a") == b"0123456789abcdef" * 65536 * 24
    assert files(tmp_path) == ["a"]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_forgotten_writer_leaves_no_file_no_thread_and_no_descriptor(tmp_path, size):
    storage = LocalStorage(tmp_path)
    storage.create("kept", b"")
    for n in range(5):
        storage.open_writer(f"x{n}").write_at(0, bytes(size))
    cycle = [storage.open_writer("in a cycle")]
    cycle[0].write_at(0, bytes(size))
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert (descriptors(tmp_path), files(tmp_path), writing_threads()) == ([], ["kept"], [])


def test_a_writer_that_is_collected_while_no_thread_can_end_is_dropped_too(tmp_path):
    """As within threading.enumerate(), which makes a list and has a lock that threads end with."""
    done = run(
        f"""
        import gc, threading
        gc.disable()
        cycle = [storage.open_writer("a")]
        cycle[0].write_at(0, bytes({LARGE}))
        cycle.append(cycle)
        del cycle
        with threading._active_limbo_lock:
            gc.collect()
        print("went on")
        """,
        tmp_path,
    )
    assert (done.stdout, done.returncode, done.stderr) == ("went on\n", 0, "")
    assert files(tmp_path) == []


class CollectsWhileWriting(System):
    """Has garbage collected in the thread that writes, in the middle of a write."""

    def __init__(self):
        self.forgotten = threading.Event()
        self.written = []

    def write(self, fd, data, offset):
        if threading.current_thread().name == "holdfast-write" and not self.written:
            assert self.forgotten.wait(30)
            gc.collect()
        self.written.append(super().write(fd, data[: len(data) // 2 or 1], offset))
        os.fstat(fd)  # still open, and ours
        return self.written[-1]


def test_a_writer_that_is_collected_by_its_own_thread_is_dropped_too(tmp_path):
    system = CollectsWhileWriting()
    storage = LocalStorage(tmp_path, system=system)
    gc.disable()
    try:
        writer = storage.open_writer("a")
        writer.write_at(0, bytes(5 * MIB))
        [thread] = writing_threads()
        cycle = [writer]
        cycle.append(cycle)
        watched = weakref.ref(writer)
        del cycle, writer
        system.forgotten.set()
        thread.join(30)
    finally:
        gc.enable()
    assert watched() is None
    assert not thread.is_alive()
    assert sum(system.written) == 4 * MIB  # what was begun was ended, in the file it was begun in
    assert (descriptors(tmp_path), files(tmp_path)) == ([], [])


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("how", ["sys.exit()", "writer.abort()", "del writer"])
def test_a_forked_process_does_not_remove_what_its_parent_writes(tmp_path, how, size):
    done = run(
        f"""
        import os, sys
        writer = storage.open_writer("a")
        writer.write_at(0, b"a" * {size})
        child = os.fork()
        if not child:
            {how}
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.finish()
        assert storage.read("a") == b"a" * {size}
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert files(tmp_path) == ["a"]


@pytest.mark.parametrize("how", ["create", "writer", "large writer", "replace"])
def test_a_write_that_was_swept_away_says_so(tmp_path, how):
    class Sweeping(System):
        def sync(self, fd):
            super().sync(fd)
            if not Path(f"/proc/self/fd/{fd}").is_dir():
                while not LocalStorage(tmp_path).sweep(0):  # its time is up to 1 ms ahead
                    time.sleep(0.001)

    version = LocalStorage(tmp_path).create("a/old", b"old").version
    storage = LocalStorage(tmp_path, system=Sweeping())
    with pytest.raises(
        StorageError, match="removed while it was being written, by a sweep"
    ) as info:
        if how == "create":
            storage.create("a/new", b"new")
        elif how == "replace":
            storage.replace("a/old", b"new", version)
        else:
            with storage.open_writer("a/old") as writer:
                writer.write_at(0, bytes(SMALL if how == "writer" else LARGE))
                writer.finish()
    assert type(info.value) is StorageError
    assert info.value.path == ("a/new" if how == "create" else "a/old")
    assert [info.key for info in storage.list()] == ["a/old"]
    assert storage.read("a/old") == b"old"
