"""What LocalStorage promises beyond the contract of every storage (tests/conformance)."""

import ctypes
import errno
import os
import sys
import threading

import pytest

from holdfast.errors import NoSpaceError, ObjectChangedError, StorageError
from holdfast.storage import LocalStorage, _system
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
