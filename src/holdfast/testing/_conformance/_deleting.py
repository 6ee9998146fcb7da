"""Tests of deleting: an object, nothing, and one version of an object."""

# ruff: noqa: S101 -- tests, though they are shipped

import functools

import pytest

from holdfast.contracts import ObjectInfo, Storage
from holdfast.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from holdfast.testing._conformance._shared import Tests, at_once, put, require_absent, require_same


def deletes_versions(storage: Storage) -> bool:
    """Whether the storage deletes one version of an object. One that cannot says so with a plain
    ``StorageError``, and leaves what is there."""
    info = storage.create("probe", b"probe")
    try:
        storage.delete("probe", expected=info.version)
    except StorageError as error:
        if error.transient or isinstance(error, ObjectChangedError | ObjectNotFoundError):
            raise
        require_same(info, storage.stat("probe"))
        assert storage.read("probe") == b"probe"
        storage.delete("probe")
        return False
    require_absent(storage, "probe")
    return True


class DeletingTests(Tests):
    def test_a_deleted_object_is_gone_and_its_neighbours_are_not(self, storage: Storage) -> None:
        keys = ["a/b", "a/bb", "a/c", "ab", "d"]
        for key in keys:
            storage.create(key, key.encode())
        for key in ("a/b", "d"):
            storage.delete(key)
            require_absent(storage, key)
        left = ["a/bb", "a/c", "ab"]
        assert [info.key for info in storage.list()] == left
        assert [storage.read(key) for key in left] == [key.encode() for key in left]

    def test_deleting_what_is_not_there_does_nothing(self, storage: Storage) -> None:
        before = storage.create("a/b", b"kept")
        for missing in ("gone", "a", "a/b/c", "gone/too"):
            storage.delete(missing)
            storage.delete(missing)
        require_same(storage.stat("a/b"), before)
        storage.delete("a/b")
        storage.delete("a/b")
        assert list(storage.list()) == []

    def test_a_key_is_free_for_anything_once_what_was_below_it_is_deleted(
        self, storage: Storage
    ) -> None:
        storage.create("a/b/c", b"")
        storage.delete("a/b/c")
        storage.create("a", b"now an object")
        assert storage.read("a") == b"now an object"
        storage.delete("a")
        put(storage, "a/b", b"and again")
        assert [info.key for info in storage.list()] == ["a/b"]

    def test_one_version_is_deleted_or_nothing_is(self, storage: Storage) -> None:
        able = deletes_versions(storage)
        old = storage.create("a/b", b"old")
        new = storage.replace("a/b", b"new", old.version)
        storage.create("a/c", b"")
        for wrong in (old.version, "nonsense", "", new.version + "0"):
            with pytest.raises(ObjectChangedError if able else StorageError) as caught:
                storage.delete("a/b", expected=wrong)
            assert caught.value.path == "a/b"
        require_same(new, storage.stat("a/b"))
        assert storage.read("a/b") == b"new"
        if able:
            storage.delete("a/b", expected=new.version)
            assert [info.key for info in storage.list()] == ["a/c"]

    def test_what_a_writer_replaced_is_another_version(self, storage: Storage) -> None:
        old = put(storage, "a", b"old")
        new = put(storage, "a", b"new")
        with pytest.raises(StorageError):
            storage.delete("a", expected=old.version)
        require_same(new, storage.stat("a"))

    def test_deleting_a_version_of_nothing_does_nothing(self, storage: Storage) -> None:
        if not deletes_versions(storage):
            with pytest.raises(StorageError):
                storage.delete("gone", expected="1")
            return
        version = storage.create("a/b", b"").version
        for missing in ("gone", "a", "a/b/c", "gone/too"):
            storage.delete(missing, expected=version)
        storage.delete("a/b", expected=version)
        storage.delete("a/b", expected=version)
        assert list(storage.list()) == []

    def test_of_a_deleter_and_a_replacer_of_one_version_one_wins(self, storage: Storage) -> None:
        able = deletes_versions(storage)
        for n in range(self.random_examples):
            key = f"{n}"
            version = storage.create(key, b"old").version
            deleted, replaced = at_once(
                [
                    functools.partial(storage.delete, key, expected=version),
                    functools.partial(storage.replace, key, b"new", version),
                ]
            )
            if deleted is None:
                assert able
                assert isinstance(replaced, ObjectNotFoundError), replaced
                require_absent(storage, key)
            else:
                assert isinstance(deleted, ObjectChangedError if able else StorageError), deleted
                assert isinstance(replaced, ObjectInfo), replaced
                assert storage.read(key) == b"new"

    def test_a_deleter_of_an_old_version_never_takes_a_newer_object(self, storage: Storage) -> None:
        for n in range(self.random_examples):
            key = f"{n}"
            version = storage.create(key, b"old").version
            at_once(
                [
                    functools.partial(storage.delete, key, expected=version),
                    functools.partial(put, storage, key, b"new"),
                ]
            )
            assert storage.read(key) == b"new"
