"""Nothing leads a LocalStorage out of its root, hangs it, or makes it write for others."""

import contextlib
import errno
import itertools
import os
import shutil
import socket
import stat
import threading
from pathlib import Path

import pytest

from holdfast.contracts import ReadRange
from holdfast.errors import CheckpointError, ObjectExistsError, ObjectNotFoundError, StorageError
from holdfast.storage import LocalStorage
from holdfast.storage._system import System


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def storage(root):
    storage = LocalStorage(root)
    storage.create("a/kept", b"kept")
    return storage


@pytest.fixture
def outside(tmp_path):
    """A folder that nobody gave the storage."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    return outside


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _write(storage, key, data=b"data"):
    with storage.open_writer(key) as writer:
        writer.write_at(0, data)
        writer.finish()


class TestALinkedFolder:
    @pytest.fixture(autouse=True)
    def linked(self, storage, root, outside):
        (root / "link").symlink_to(outside, target_is_directory=True)
        (root / "a" / "deep").symlink_to(outside, target_is_directory=True)

    @pytest.mark.parametrize("folder", ["link", "a/deep"])
    def test_is_not_read_through(self, storage, folder):
        for look in (storage.read, storage.stat):
            with pytest.raises(StorageError):
                look(f"{folder}/secret")
        with pytest.raises(StorageError):
            storage.read_into(
                f"{folder}/secret", [ReadRange(start=0, into=memoryview(bytearray(1)))]
            )

    @pytest.mark.parametrize("folder", ["link", "a/deep"])
    def test_is_not_written_through(self, storage, outside, folder):
        before = _tree(outside)
        for act in (
            lambda: storage.create(f"{folder}/new", b""),
            lambda: _write(storage, f"{folder}/x/y"),
        ):
            with pytest.raises(StorageError, match="symbolic links are not followed"):
                act()
        with pytest.raises(StorageError):
            storage.replace(f"{folder}/secret", b"other", "any version")
        assert _tree(outside) == before

    def test_is_not_listed_swept_or_deleted_through(self, storage, root, outside):
        hidden = outside / ".holdfast-0011223344556677.tmp"
        hidden.write_bytes(b"not ours")
        os.utime(hidden, (1, 1))
        assert [info.key for info in storage.list()] == ["a/kept"]
        assert [*storage.list("link/")] == []
        assert [*storage.list("a/deep/")] == []
        storage.delete("link/secret")
        storage.delete("a/deep/secret")
        assert storage.sweep(0) == 0
        assert set(_tree(outside)) == {"secret", hidden.name}
        assert (root / "link").is_symlink()


class TestALinkedObject:
    @pytest.fixture(autouse=True)
    def linked(self, storage, root, outside):
        (root / "link").symlink_to(outside / "secret")

    def test_is_no_object(self, storage):
        for look in (storage.read, storage.stat):
            with pytest.raises(StorageError, match="symbolic link"):
                look("link")
        assert [info.key for info in storage.list()] == ["a/kept"]

    def test_is_replaced_and_never_written_through(self, storage, root, outside):
        with pytest.raises(ObjectExistsError):
            storage.create("link", b"new")
        with pytest.raises(StorageError):
            storage.replace("link", b"new", "any version")
        _write(storage, "link", b"new")
        assert storage.read("link") == b"new"
        assert not (root / "link").is_symlink()
        assert (outside / "secret").read_bytes() == b"secret"

    def test_is_deleted_itself(self, storage, root, outside):
        storage.delete("link")
        assert not os.path.lexists(root / "link")
        assert (outside / "secret").exists()


def test_a_hard_link_is_replaced_and_not_written_through(storage, root, outside):
    os.link(outside / "secret", root / "hard")
    assert storage.read("hard") == b"secret"
    _write(storage, "hard", b"new")
    storage.replace("hard", b"newer", storage.stat("hard").version)
    storage.delete("hard")
    assert (outside / "secret").read_bytes() == b"secret"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
def test_what_is_no_plain_file_is_no_object_and_hangs_nobody(storage, root, kind):
    path = root / "odd"
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            if len(str(path)) > 100:
                pytest.skip("this folder's name is too long for a socket")
            listener.bind(str(path))
        elif kind == "device":
            try:
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
            except PermissionError:
                pytest.skip("needs root, to make a device")
        else:
            path.mkdir()
        for look in (storage.read, storage.stat):
            with pytest.raises(ObjectNotFoundError if kind == "folder" else StorageError):
                look("odd")
        assert [info.key for info in storage.list()] == ["a/kept"]
        with pytest.raises(StorageError):
            storage.create("odd", b"new")
        if kind == "folder":
            with pytest.raises(StorageError):
                _write(storage, "odd")
            storage.delete("odd")
            assert path.is_dir()
        else:
            _write(storage, "odd", b"new")
            assert storage.read("odd") == b"new"
        assert not [*root.rglob(".holdfast-*")]


@pytest.mark.timeout(20)
def test_a_fifo_in_the_place_of_the_lock_hangs_nobody(storage, root):
    (root / ".holdfast.lock").unlink(missing_ok=True)
    os.mkfifo(root / ".holdfast.lock")
    _write(storage, "b")
    storage.replace("b", b"new", storage.stat("b").version)
    assert storage.read("b") == b"new"


def test_a_link_in_the_place_of_the_lock_is_not_followed(storage, root, outside):
    (root / ".holdfast.lock").unlink(missing_ok=True)
    (root / ".holdfast.lock").symlink_to(outside / "made")
    with pytest.raises(StorageError, match="symbolic link"):
        _write(storage, "b")
    assert not (outside / "made").exists()


@pytest.mark.parametrize(
    "key",
    [
        "../x", "a/../../x", "/etc/passwd", "", ".", "a//b", "a/", "/", "a/./b", "a\0b",
        ".holdfast.lock", ".holdfast-0.tmp", "a/.holdfast-0.tmp", ".holdfast/x", "a/.holdfastx/b",
    ],
)  # fmt: skip
def test_a_key_that_leads_elsewhere_is_refused(storage, root, key):
    before = _tree(root)
    for act in (
        storage.read,
        storage.stat,
        storage.delete,
        storage.open_writer,
        lambda key: storage.create(key, b""),
        lambda key: storage.replace(key, b"", "version"),
    ):
        with pytest.raises(ValueError, match="key"):
            act(key)
    assert _tree(root) == before


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_only_the_owner_may_change_what_is_written(root, umask):
    before = os.umask(umask)
    try:
        storage = LocalStorage(root / "made")
        storage.create("a/b/small", b"small")
        storage.replace("a/b/small", b"other", storage.stat("a/b/small").version)
        _write(storage, "a/c/large", bytes(2_000_000))
    finally:
        os.umask(before)
    files = [p for p in (root / "made").rglob("*") if p.is_file() and p.name != ".holdfast.lock"]
    assert len(files) == 2
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~umask
    folders = [root / "made", *(p for p in (root / "made").rglob("*") if p.is_dir())]
    assert len(folders) == 4
    for path in folders:
        assert stat.S_IMODE(path.stat().st_mode) == 0o755 & ~umask
    lock = (root / "made" / ".holdfast.lock").stat()
    assert stat.S_IMODE(lock.st_mode) == 0o666 & ~umask
    assert lock.st_size == 0


class _Swapping(System):
    """Somebody swaps a folder for a link at one moment of a write."""

    def __init__(self, moment: str, folder: Path, outside: Path) -> None:
        self._moment = moment
        self._folder = folder
        self._outside = outside

    def _swap(self, moment: str) -> None:
        if moment == self._moment:
            self._moment = ""
            self._folder.rename(self._folder.with_name("aside"))
            self._folder.symlink_to(self._outside, target_is_directory=True)

    def open_folder(self, name, folder):
        self._swap("before open")
        opened = super().open_folder(name, folder)
        self._swap("after open")
        return opened

    def create_file(self, name, folder, *, direct=False):
        self._swap("before create")
        created = super().create_file(name, folder, direct=direct)
        self._swap("after create")
        return created

    def rename(self, old, new, folder):
        self._swap("before rename")
        super().rename(old, new, folder)

    def unlink(self, name, folder):
        self._swap("before unlink")
        super().unlink(name, folder)


@pytest.mark.parametrize(
    "moment", ["before open", "after open", "before create", "after create", "before rename"]
)
def test_a_folder_swapped_for_a_link_while_writing_leads_nowhere(storage, root, outside, moment):
    before = _tree(outside)
    swapped = LocalStorage(root, system=_Swapping(moment, root / "a", outside))
    try:
        _write(swapped, "a/new")
    except StorageError:
        pass
    else:
        assert (root / "aside" / "new").read_bytes() == b"data"
    assert (root / "a").is_symlink()
    assert _tree(outside) == before


def test_a_folder_swapped_for_a_link_while_deleting_leads_nowhere(storage, root, outside):
    (outside / "kept").write_bytes(b"another's")
    LocalStorage(root, system=_Swapping("before unlink", root / "a", outside)).delete("a/kept")
    assert (outside / "kept").read_bytes() == b"another's"


def test_a_link_raced_in_and_out_never_leads_out(storage, root, outside):
    """As above, with nobody to say when."""
    stop = threading.Event()
    real = root / "race"

    def swap() -> None:
        for number in itertools.count():
            for step in (
                lambda number=number: real.rename(root / f"aside-{number}"),
                lambda: real.symlink_to(outside, target_is_directory=True),
                real.unlink,
            ):
                with contextlib.suppress(OSError):
                    step()
            if stop.is_set():
                return

    thread = threading.Thread(target=swap)
    thread.start()
    written = 0
    try:
        for number in range(400):
            with contextlib.suppress(StorageError):
                storage.create(f"race/{number}", b"data")
                written += 1
    finally:
        stop.set()
        thread.join()
    assert len([path for path in root.rglob("*") if path.name.isdigit()]) == written
    assert _tree(outside) == {"secret": b"secret"}


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    storage = LocalStorage(tmp_path / "file")
    for act in (lambda: storage.create("a", b""), lambda: _write(storage, "a")):
        with pytest.raises(StorageError):
            act()
    with pytest.raises(ObjectNotFoundError):
        storage.read("a")
    assert [*storage.list()] == []
    storage.delete("a")
    assert storage.sweep(0) == 0
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_without_permission_is_refused(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="permission denied"):
        LocalStorage(tmp_path / "locked" / "root").create("a", b"")


def test_a_root_on_a_disk_that_takes_no_writes_is_refused():
    with pytest.raises(StorageError):
        LocalStorage("/proc/holdfast").create("a", b"")


def test_a_root_that_is_a_link_is_followed_as_its_owner_wanted(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk", target_is_directory=True)
    LocalStorage(tmp_path / "root").create("a", b"data")
    assert (tmp_path / "disk" / "a").read_bytes() == b"data"


def test_a_name_that_is_too_long_is_refused(storage, root):
    for key in ("n" * 256, f"{'f' * 256}/a", "a/" + "ä" * 128):
        with pytest.raises(StorageError, match="too long"):
            storage.create(key, b"")
        with pytest.raises(StorageError):
            _write(storage, key)
    assert not [*root.rglob(".holdfast-*")]


def test_a_path_longer_than_the_system_takes_works(storage):
    key = "/".join(["folder" * 20] * 60)
    assert len(key) > 4096
    storage.create(key, b"deep")
    assert storage.read(key) == b"deep"
    assert [info.key for info in storage.list("folder")] == [key]
    storage.delete(key)
    assert [info.key for info in storage.list()] == ["a/kept"]


def test_a_name_that_is_no_text_is_listed_read_and_deleted(storage, root):
    odd = os.fsdecode(b"odd-\xff\xfe")
    (root / odd).write_bytes(b"odd")
    assert [info.key for info in storage.list()] == ["a/kept", odd]
    assert storage.read(odd) == b"odd"
    storage.delete(odd)
    assert [info.key for info in storage.list()] == ["a/kept"]


@pytest.mark.parametrize("how", ["open_writer", "create"])
def test_a_root_removed_while_writing_is_an_error_or_nothing_lost(root, how):
    class Removing(System):
        def write(self, fd, data, offset):
            shutil.rmtree(root)
            return super().write(fd, data, offset)

    storage = LocalStorage(root, system=Removing())
    with pytest.raises(CheckpointError):
        if how == "create":
            storage.create("a/b", b"data")
        else:
            _write(storage, "a/b")
    assert not [*root.rglob("*")]
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast")]
    LocalStorage(root).create("a/b", b"again")
    assert LocalStorage(root).read("a/b") == b"again"


def test_a_root_removed_and_made_anew_is_written_to_again(storage, root):
    shutil.rmtree(root)
    storage.create("a/b", b"again")
    assert storage.read("a/b") == b"again"


def test_errors_of_the_system_keep_their_cause(storage):
    with pytest.raises(StorageError) as caught:
        storage.create("n" * 256, b"")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENAMETOOLONG
