"""What LocalStorage promises beyond the contract of every storage (tests/conformance)."""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupt_tools import wait_until_it_waits

from holdfast.contracts import ReadRange
from holdfast.errors import NoSpaceError, ObjectChangedError, StorageError, TransientStorageError
from holdfast.storage import LocalStorage, _system
from holdfast.storage._folders import Folders
from holdfast.storage._new_file import NewFile
from holdfast.storage._pages import Buffers, address_of, aligned_memory
from holdfast.storage._system import System


class WithoutLocks(System):
    def locked(self, fd):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_one_version_is_not_deleted_where_there_are_no_locks(tmp_path):
    storage = LocalStorage(tmp_path, system=WithoutLocks())
    info = storage.create("a", b"kept")
    with pytest.raises(StorageError, match=r"no locks.*nothing was changed") as caught:
        storage.delete("a", expected=info.version)
    assert type(caught.value) is StorageError
    assert storage.stat("a") == info
    storage.delete("gone", expected="1")
    storage.delete("a")
    assert [*storage.list()] == []


def test_one_version_is_not_replaced_where_there_are_no_locks(tmp_path):
    storage = LocalStorage(tmp_path, system=WithoutLocks())
    info = storage.create("a", b"kept")
    with pytest.raises(StorageError, match=r"no locks.*nothing was changed"):
        storage.replace("a", b"new", info.version)
    assert storage.read("a") == b"kept"


def test_a_deleter_of_one_version_waits_for_a_replacer_in_another_process(tmp_path):
    naming, go_on = threading.Event(), threading.Event()

    class Stopped(System):
        def rename(self, old, new, folder):
            naming.set()
            assert go_on.wait(30)
            super().rename(old, new, folder)

    version = LocalStorage(tmp_path).create("a", b"old").version
    stopped = LocalStorage(tmp_path, system=Stopped())
    errors = []

    def delete():
        try:
            LocalStorage(tmp_path).delete("a", expected=version)
        except ObjectChangedError as error:
            errors.append(error)

    replacer = threading.Thread(target=lambda: stopped.replace("a", b"new", version))
    deleter = threading.Thread(target=delete)
    replacer.start()
    assert naming.wait(30)
    deleter.start()
    deleter.join(0.2)
    waited = deleter.is_alive()
    go_on.set()
    for thread in (replacer, deleter):
        thread.join()
    assert waited
    assert [error.path for error in errors] == ["a"]
    assert LocalStorage(tmp_path).read("a") == b"new"


def test_a_folder_or_a_link_is_no_version_of_an_object(tmp_path):
    storage = LocalStorage(tmp_path)
    version = storage.create("a/b", b"kept").version
    storage.delete("a", expected=version)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    with pytest.raises(ObjectChangedError):
        storage.delete("link", expected=version)
    assert storage.read("a/b") == b"kept"
    assert (tmp_path / "link").is_symlink()


def test_folders_may_be_deeper_than_python_recurses(tmp_path):
    storage = LocalStorage(tmp_path)
    deep = "/".join(["d"] * 400)
    keys = sorted([f"{deep}/leaf", "d/d.x", "d/d0", "d/d/a", "z"])
    for key in keys:
        storage.create(key, b"")
    (tmp_path / deep / ".holdfast-left.tmp").write_bytes(b"")
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(250)
    try:
        found = [info.key for info in storage.list()]
        under = [info.key for info in storage.list(f"{deep}/l")]
        removed = storage.sweep(0)
        storage.delete(f"{deep}/leaf")
    finally:
        sys.setrecursionlimit(before)
    assert (found, under, removed) == (keys, [f"{deep}/leaf"], 1)
    assert [path.name for path in (tmp_path / "d" / "d").iterdir()] == ["a"]


def test_empty_folders_are_swept_from_the_inside_out(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.create("kept/x", b"")
    for folder in ("a/b/c", "a/b/d", "kept/e/f"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / ".holdfast-left.tmp").write_bytes(b"")
    assert storage.sweep(3600) == 0
    assert storage.sweep(0) == 3
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "x"]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([errno.EINTR] * 3 + [0], None),
        ([errno.EINTR, errno.EOPNOTSUPP], None),
        ([errno.EINTR, errno.ENOSPC], NoSpaceError),
    ],
)
def test_an_interrupted_reservation_is_made_again(tmp_path, monkeypatch, codes, expected):
    def fallocate(*_):
        ctypes.set_errno(codes[0])
        return -1 if codes.pop(0) else 0

    monkeypatch.setattr(_system, "_fallocate", fallocate)
    storage = LocalStorage(tmp_path)
    if expected is None:
        storage.open_writer("a", size_bytes=5).abort()
    else:
        with pytest.raises(expected):
            storage.open_writer("a", size_bytes=5)
    assert codes == []


@pytest.mark.parametrize("root", ["", "runs\0a"])
def test_what_is_no_path_is_no_root(root):
    with pytest.raises(ValueError, match="root must be the path of a folder"):
        LocalStorage(root)


def test_the_free_space_is_that_of_the_disk_also_of_a_root_that_is_not_there_yet(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    for root in (tmp_path, tmp_path / "not" / "yet"):
        assert free / 2 < LocalStorage(root).free_bytes() < free * 2


def test_it_shows_where_it_is(tmp_path):
    assert repr(LocalStorage(tmp_path)) == f"LocalStorage('{tmp_path.as_uri()}')"


def test_a_disk_that_makes_a_file_and_then_refuses_direct_io_is_written_to_all_the_same(
    tmp_path, monkeypatch
):
    real, refused = os.open, []

    def refusing(path, flags, mode=0o777, *, dir_fd=None):
        fd = real(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECT:
            os.close(fd)
            refused.append(flags)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    data = os.urandom(3 * 1024 * 1024 + 5)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refusing)
        storage = LocalStorage(tmp_path)
        with storage.open_writer("a") as writer:
            writer.write_at(0, data)
            writer.finish()
        assert storage.read("a") == data
    assert {flags & os.O_CREAT for flags in refused} == {os.O_CREAT}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".holdfast.lock", "a"]


@pytest.mark.skipif(_system._fallocate is None, reason="this system reserves no room")
def test_why_room_could_not_be_reserved_is_told():
    with pytest.raises(OSError, match="Bad file descriptor"):
        System().allocate(-1, 5)


def test_a_hidden_file_may_be_closed_again(tmp_path):
    file = NewFile(System(), Folders(tmp_path, System()), (), direct=False)
    assert len([*tmp_path.iterdir()]) == 1
    file.close()
    file.close()
    assert [*tmp_path.iterdir()] == []


def test_a_descriptor_is_not_closed_twice(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    System().close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        System().close(fd)


def test_a_folder_that_goes_while_sweeping_does_not_keep_the_others(tmp_path):
    class Emptied(System):
        def open_folder(self, name, folder):
            if name == "gone":
                (tmp_path / "gone" / ".holdfast-left.tmp").unlink(missing_ok=True)
                os.rmdir(name, dir_fd=folder)
            return super().open_folder(name, folder)

    for name in ("a", "gone", "z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".holdfast-left.tmp").write_bytes(b"")
    assert LocalStorage(tmp_path, system=Emptied()).sweep(0) == 2
    assert [*tmp_path.iterdir()] == []


MIB = 1024 * 1024


class Watched(System):
    """Notes which bytes are read past the page cache, and which through it. Says of those from
    ``cached_from`` on that the cache has them."""

    def __init__(self, cached_from=1 << 60):
        self.cached_from = cached_from
        self.direct, self.buffered = [], []

    def is_cached(self, fd, offset, size):
        return offset >= self.cached_from

    def make_direct(self, fd):
        if not super().make_direct(fd):
            pytest.skip("this filesystem has no direct I/O")
        return True

    def read_parts(self, fd, into, offset):
        past = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        got = super().read_parts(fd, into, offset)
        (self.direct if past else self.buffered).append((offset, offset + got))
        return got


def stored(folder, system):
    """A storage of 8 MiB in "a", and these."""
    data = os.urandom(8 * MIB)
    put(LocalStorage(folder), "a", data)
    return LocalStorage(folder, system=system), data


def part(storage, start, stop, **how):
    into = bytearray(stop - start)
    storage.read_into("a", [ReadRange(start=start, into=memoryview(into), **how)])
    return into


@pytest.mark.parametrize(("size", "past"), [(MIB - 1, False), (MIB, True)])
def test_what_is_large_is_read_past_the_page_cache_and_what_is_small_is_not(tmp_path, size, past):
    watched = Watched()
    storage, data = stored(tmp_path, watched)
    assert part(storage, 0, size) == data[:size]
    assert (bool(watched.direct), bool(watched.buffered)) == (past, not past)


def test_what_the_page_cache_has_is_read_from_it_and_nothing_else(tmp_path):
    watched = Watched(cached_from=4 * MIB)
    storage, data = stored(tmp_path, watched)
    assert part(storage, 100, 8 * MIB - 100) == data[100:-100]
    middle = 4 * MIB + 100  # a request is for 4 MiB
    assert watched.direct == [(0, middle - 100 + 4096)]
    assert watched.buffered == [(middle, 8 * MIB - 100)]


class Parted(Watched):
    """Notes of each request how many bytes go to which memory."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def read_parts(self, fd, into, offset):
        self.parts.append([(len(each), address_of(each)) for each in into])
        return super().read_parts(fd, into, offset)


def lying_as(start, size):
    """Memory that lies to its pages as these bytes to the file's blocks."""
    skipped = start % 4096
    return aligned_memory(skipped + size)[skipped:]


@pytest.mark.parametrize(
    ("start", "size", "edges"),
    [
        (0, 4 * MIB, []),
        (1, 4 * MIB, [4096] * 2),
        (4095, 2 * MIB + 1, [4096]),
        (8192, MIB + 1, [4096]),
    ],
)
def test_memory_that_lies_right_is_read_to_without_a_copy(tmp_path, start, size, edges):
    watched = Parted()
    storage, data = stored(tmp_path, watched)
    into = lying_as(start, size)
    storage.read_into("a", [ReadRange(start=start, into=into)])
    assert into == data[start : start + size]
    (parts,) = watched.parts
    begins = address_of(into)
    inside = [nbytes for nbytes, at in parts if begins <= at < begins + size]
    assert inside == [size - (-start % 4096) - (start + size) % 4096]
    assert [nbytes for nbytes, at in parts if not begins <= at < begins + size] == edges


@pytest.fixture(scope="module")
def shared_8_mib(tmp_path_factory):
    watched = Parted()
    return watched, *stored(tmp_path_factory.mktemp("shared"), watched)


@given(
    start=st.integers(0, 3 * MIB),
    size=st.integers(MIB, 5 * MIB),
    off=st.sampled_from([0, 1, 4095, 4096]),
)
@settings(max_examples=30, deadline=None)
def test_every_byte_arrives_however_memory_lies(shared_8_mib, start, size, off):
    watched, storage, data = shared_8_mib
    whole = lying_as(start + off, size + 2)
    whole[0] = whole[size + 1] = 77
    watched.parts.clear()
    storage.read_into("a", [ReadRange(start=start + 1, into=whole[1 : size + 1])])
    assert whole[1 : size + 1] == data[start + 1 : start + 1 + size]
    assert whole[0] == whole[size + 1] == 77
    begins = address_of(whole)
    inside = [begins <= at < begins + size for parts in watched.parts for _, at in parts]
    assert any(inside) == (off in {0, 4096})


@pytest.mark.parametrize("problem", ["short", "refused"])
def test_what_cannot_be_read_without_a_copy_is_read_with_one(tmp_path, problem):
    class Odd(Watched):
        def read_parts(self, fd, into, offset):
            if len(into) == 1:
                return super().read_parts(fd, into, offset)
            if problem == "refused":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().read_parts(fd, into[:2], offset)

    storage, data = stored(tmp_path, Odd())
    into = lying_as(1, 4 * MIB)
    storage.read_into("a", [ReadRange(start=1, into=into)])
    assert into == data[1 : 1 + 4 * MIB]


def test_an_error_of_the_disk_is_told_also_if_nothing_is_copied(tmp_path):
    class Broken(Watched):
        def read_parts(self, fd, into, offset):
            if len(into) > 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read_parts(fd, into, offset)

    storage, _ = stored(tmp_path, Broken())
    with pytest.raises(StorageError, match="input/output error"):
        storage.read_into("a", [ReadRange(start=1, into=lying_as(1, 4 * MIB))])


@pytest.fixture
def no_memory(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)


def test_that_there_is_no_memory_for_a_buffer_is_told_as_that(tmp_path, no_memory):
    (tmp_path / "there").write_bytes(bytes(MIB))
    storage = LocalStorage(tmp_path, system=Watched())
    into = memoryview(bytearray(MIB + 1))[1:]
    no_buffer = "there is no memory for a buffer of [0-9]+ bytes"
    with pytest.raises(TransientStorageError, match=f"could not read .*: {no_buffer}") as caught:
        storage.read_into("there", [ReadRange(start=0, into=into)])
    assert caught.value.path == "there"
    with pytest.raises(TransientStorageError, match=f"could not write .*: {no_buffer}") as caught:
        put(storage, "a", b"x")
    assert caught.value.path == "a"
    assert [info.key for info in storage.list()] == ["there"]
    assert storage.sweep(0) == 0


@pytest.mark.parametrize("size", [1, MIB - 1, 8 * MIB])
def test_what_is_to_be_uncached_is_read_past_a_cache_that_has_it(tmp_path, size):
    watched = Watched(cached_from=0)
    storage, data = stored(tmp_path, watched)
    assert part(storage, 0, size, uncached=True) == data[:size]
    assert watched.direct
    assert not watched.buffered


def test_what_is_to_be_uncached_is_read_all_the_same_where_direct_io_is_refused(tmp_path):
    class Refusing(Watched):
        def make_direct(self, fd):
            return False

    watched = Refusing(cached_from=0)
    storage, data = stored(tmp_path, watched)
    assert part(storage, 5, 7 * MIB, uncached=True) == data[5 : 7 * MIB]
    assert not watched.direct


def test_the_page_cache_is_asked_for_whole_pages(tmp_path):
    release = tuple(map(int, re.findall("[0-9]+", os.uname().release)[:2]))
    if sys.platform != "linux" or release < (6, 5) or not os.major(tmp_path.stat().st_dev):
        pytest.skip("only later Linux tells what is in its cache, and of plain disks")
    page = mmap.PAGESIZE
    put(LocalStorage(tmp_path), "a", bytes(8 * MIB))
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before = System().is_cached(fd, 0, 1)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or the kernel reads ahead
        os.pread(fd, page, 0)
        asked = [(0, page), (1, page), (page - 1, 1), (page, 1)]
        cached = [System().is_cached(fd, *each) for each in asked]
    finally:
        os.close(fd)
    assert (before, cached) == (False, [True, False, True, False])


def test_a_page_cache_that_cannot_be_asked_has_nothing():
    assert not System().is_cached(-1, 0, 1)


def test_why_direct_io_cannot_be_had_is_told(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        System().make_direct(fd)


@pytest.mark.parametrize("size", [5, 3 * 1024 * 1024])
def test_an_object_that_is_cut_while_it_is_read_is_an_error(tmp_path, size):
    class Cut(System):
        def read_parts(self, fd, into, offset):
            os.truncate(tmp_path / "a", 3)
            return super().read_parts(fd, into, offset)

    LocalStorage(tmp_path).create("a", bytes(size))
    with pytest.raises(StorageError, match="the object was cut while it was read") as caught:
        LocalStorage(tmp_path, system=Cut()).read("a")
    assert caught.value.path == "a"


def test_a_slow_disk_holds_the_writer_up_before_memory_fills(tmp_path):
    go_on = threading.Event()

    class Slow(System):
        def write(self, fd, data, offset):
            assert go_on.wait(60)
            return super().write(fd, data, offset)

    piece = os.urandom(4 * 1024 * 1024)
    taken = []

    def write():
        with LocalStorage(tmp_path, system=Slow()).open_writer("a") as writer:
            for n in range(12):
                writer.write_at(n * len(piece), piece)
                taken.append(n)
            writer.finish()

    writing = threading.Thread(target=write)
    writing.start()
    writing.join(0.5)
    held = len(taken)
    go_on.set()
    writing.join()
    assert held <= 6
    assert LocalStorage(tmp_path).read("a") == piece * 12


class Scarce(Buffers):
    """There is memory for so many, and then for none."""

    def __init__(self, nbytes, count):
        super().__init__(nbytes)
        for _ in range(count):
            self.give(aligned_memory(nbytes))

    def take(self):
        if not self._free:
            raise MemoryError("there is no more")
        return super().take()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_where_memory_is_short_an_object_is_written_through_what_there_is(tmp_path, count):
    storage = LocalStorage(tmp_path)
    storage._buffers = Scarce(storage._buffers.nbytes, count)
    data = os.urandom(50_000_000)
    put(storage, "a", data)
    assert LocalStorage(tmp_path).read("a") == data
    assert len(storage._buffers._free) == count


def test_where_there_is_no_memory_at_all_a_writer_says_so(tmp_path):
    storage = LocalStorage(tmp_path)
    storage._buffers = Scarce(storage._buffers.nbytes, 0)
    with pytest.raises(TransientStorageError, match="write the object: there is no more"):
        put(storage, "a", b"12")
    assert [*storage.list()] == []


def test_an_object_that_there_is_no_memory_for_is_an_error_that_may_pass(tmp_path):
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 2**43)  # of which the disk holds nothing
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, most))  # some systems promise any amount
    try:
        with pytest.raises(TransientStorageError, match="read the object: there is no memory left"):
            LocalStorage(tmp_path).read("a")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def test_an_interrupt_while_a_writer_is_given_up_leaves_no_write_under_way(tmp_path):
    """It would go to whatever has the number of the descriptor by then."""
    main, begun, ended = threading.main_thread().ident, threading.Event(), []

    class Slow(System):
        def write(self, fd, data, offset):
            before = os.fstat(fd)
            begun.set()
            wait_until_it_waits(main)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.5)
            ended.append(os.fstat(fd) == before)
            return super().write(fd, data, offset)

    writer = LocalStorage(tmp_path, system=Slow()).open_writer("a")
    writer.write_at(0, bytes(5_000_000))
    assert begun.wait(30)
    with pytest.raises(KeyboardInterrupt):
        writer.abort()
    assert ended == [True]


def put(storage, key, data):
    with storage.open_writer(key) as writer:
        writer.write_at(0, data)
        return writer.finish()


@pytest.mark.parametrize(
    ("failing", "act", "doing", "path"),
    [
        ("link", lambda s: s.create("a", b"x"), "create the object", "a"),
        ("write", lambda s: s.create("a", b"x"), "write the object", "a"),
        ("rename", lambda s: s.replace("there", b"x", s.stat("there").version), "replace", "there"),
        ("create_file", lambda s: s.open_writer("a"), "write the object", "a"),
        ("allocate", lambda s: s.open_writer("a", size_bytes=5), "write the object", "a"),
        ("write", lambda s: put(s, "a", b"x"), "write the object", "a"),
        ("rename", lambda s: put(s, "a", b"x"), "write the object", "a"),
        ("open_file", lambda s: s.stat("there"), "read the object", "there"),
        ("read", lambda s: s.read("there"), "read the object", "there"),
        ("unlink", lambda s: s.delete("there"), "delete the object", "there"),
        ("open_root", lambda s: [*s.list("th")], "list the storage", "th"),
        ("create_file", lambda s: s.sweep(0), "sweep the storage", "root"),
    ],
)
def test_an_error_of_the_disk_says_what_was_done_and_to_what(tmp_path, failing, act, doing, path):
    LocalStorage(tmp_path).create("there", b"1")

    class Failing(System):
        pass

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    setattr(Failing, failing, fail)
    storage = LocalStorage(tmp_path, system=Failing())
    with pytest.raises(StorageError, match=f"could not {doing}.*: input/output error") as caught:
        act(storage)
    assert caught.value.path == (storage.url if path == "root" else path)
    assert [info.key for info in LocalStorage(tmp_path).list()] == ["there"]


def test_no_root_is_none():
    for root in ("", "a\0b"):
        with pytest.raises(ValueError, match="root must be the path of a folder"):
            LocalStorage(root)


def test_what_could_not_be_done_is_said_with_the_key(tmp_path):
    class Broken(System):
        def link(self, old, new, folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(StorageError, match="could not create the object") as caught:
        LocalStorage(tmp_path, system=Broken()).create("a", b"1")
    assert caught.value.path == "a"


def test_direct_writes_stay_direct(tmp_path):
    class Counted(System):
        given_up = 0

        def make_buffered(self, fd):
            self.given_up += 1
            super().make_buffered(fd)

    counted = Counted()
    with LocalStorage(tmp_path, system=counted).open_writer("a") as writer:
        writer.write_at(0, bytes(12 * MIB + 4096))
        before = counted.given_up
        writer.finish()
    assert before == 0


@pytest.fixture
def no_threads(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_what_is_large_is_written_and_read_where_no_thread_is_to_be_had(tmp_path, no_threads):
    storage, data = LocalStorage(tmp_path), os.urandom(13 * MIB + 1)
    put(storage, "a", data)
    assert storage.read("a") == data


def test_what_this_system_cannot_tell_or_do_is_not_asked_of_it(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(4096))
    with (tmp_path / "a").open("r+b") as file:
        monkeypatch.setattr(_system, "_syscall", None)
        assert not System().is_cached(file.fileno(), 0, 4096)
        monkeypatch.setattr(_system, "_DIRECT", 0)
        assert not System().make_direct(file.fileno())


@pytest.mark.parametrize(("code", "refused"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_only_a_file_that_takes_no_direct_requests_is_read_otherwise(
    tmp_path, monkeypatch, code, refused
):
    def failing(*_):
        raise OSError(code, os.strerror(code))

    (tmp_path / "a").write_bytes(b"1")
    with (tmp_path / "a").open("r+b") as file, monkeypatch.context() as patched:
        patched.setattr(fcntl, "fcntl", failing)
        if refused:
            assert not System().make_direct(file.fileno())
        else:
            with pytest.raises(OSError, match=os.strerror(code)):
                System().make_direct(file.fileno())


def test_a_file_that_cannot_be_made_is_not_tried_again_otherwise(tmp_path, monkeypatch):
    opened = os.open

    def failing(name, flags, *more, **how):
        if flags & os.O_DIRECT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(name, flags, *more, **how)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StorageError, match="input/output error"):
        put(LocalStorage(tmp_path), "a", bytes(4 * MIB))
    assert [*LocalStorage(tmp_path).list()] == []


def test_where_pages_are_larger_than_blocks_bytes_come_by_way_of_a_buffer(tmp_path, monkeypatch):
    watched = Watched()
    storage, data = stored(tmp_path, watched)
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    into = aligned_memory(4 * MIB)
    storage.read_into("a", [ReadRange(start=0, into=into)])
    assert bytes(into) == data[: 4 * MIB]


def test_locks_are_those_of_open_files_where_there_are_no_others(tmp_path, monkeypatch):
    monkeypatch.delattr(fcntl, "F_OFD_SETLKW")
    storage = LocalStorage(tmp_path)
    info = storage.create("a", b"1")
    assert storage.replace("a", b"2", info.version).size_bytes == 1
    assert storage.read("a") == b"2"
