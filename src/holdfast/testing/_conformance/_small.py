"""Tests of small objects: create-if-absent, compare-and-replace, and versions."""

# ruff: noqa: S101 -- tests, though they are shipped

import functools

import pytest

from holdfast.contracts import SMALL_OBJECT_BYTES, ObjectInfo, Storage
from holdfast.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError, StorageError
from holdfast.testing._conformance._shared import (
    THREADS,
    Tests,
    at_once,
    pattern,
    put,
    require_absent,
    require_bytes,
    require_same,
)


def replace(storage: Storage, key: str, data: bytes) -> ObjectInfo:
    return storage.replace(key, data, storage.stat(key).version)


class SmallObjectTests(Tests):
    def test_create_stores_if_the_key_is_free(self, storage: Storage) -> None:
        info = storage.create("a/b", b"abc")
        assert (info.key, info.size_bytes) == ("a/b", 3)
        assert storage.read("a/b") == b"abc"
        require_same(info, storage.stat("a/b"))

    @pytest.mark.parametrize("by", ["create", "writer"])
    def test_create_refuses_a_key_that_is_taken(self, storage: Storage, by: str) -> None:
        before = storage.create("a", b"old") if by == "create" else put(storage, "a", b"old")
        for data in (b"new", b"old", b""):
            with pytest.raises(ObjectExistsError) as caught:
                storage.create("a", data)
            assert caught.value.path == "a"
        assert storage.read("a") == b"old"
        require_same(before, storage.stat("a"))

    def test_create_works_again_after_delete(self, storage: Storage) -> None:
        storage.create("a", b"first")
        storage.delete("a")
        storage.create("a", b"second")
        assert storage.read("a") == b"second"

    def test_of_many_creators_one_wins(self, storage: Storage) -> None:
        for key in ("a", "deep/folder/b"):
            calls = [functools.partial(storage.create, key, b"%d" % n) for n in range(THREADS)]
            results = at_once(calls)
            won = [n for n, result in enumerate(results) if isinstance(result, ObjectInfo)]
            lost = [result for result in results if isinstance(result, ObjectExistsError)]
            assert (len(won), len(lost)) == (1, THREADS - 1), results
            assert storage.read(key) == b"%d" % won[0]
            require_same(results[won[0]], storage.stat(key))

    def test_replace_needs_the_current_version(self, storage: Storage) -> None:
        old = storage.create("a", b"x")
        new = storage.replace("a", b"y", old.version)
        assert new.version != old.version
        assert (new.key, new.size_bytes) == ("a", 1)
        require_same(new, storage.stat("a"))
        for version in (old.version, "nonsense", storage.create("other", b"z").version + "0"):
            with pytest.raises(ObjectChangedError) as caught:
                storage.replace("a", b"z", version)
            assert caught.value.path == "a"
        assert storage.read("a") == b"y"
        require_same(new, storage.stat("a"))

    def test_replace_notices_what_a_writer_changed(self, storage: Storage) -> None:
        old = storage.create("a", b"x")
        new = put(storage, "a", b"y")
        with pytest.raises(ObjectChangedError):
            storage.replace("a", b"z", old.version)
        storage.replace("a", b"z", new.version)
        assert storage.read("a") == b"z"

    def test_replace_makes_no_object(self, storage: Storage) -> None:
        with pytest.raises(ObjectNotFoundError):
            storage.replace("a", b"x", "1")
        require_absent(storage, "a")
        version = storage.create("a", b"x").version
        storage.delete("a")
        with pytest.raises(ObjectNotFoundError) as caught:
            storage.replace("a", b"y", version)
        assert caught.value.path == "a"
        require_absent(storage, "a")

    def test_of_many_replacers_one_wins(self, storage: Storage) -> None:
        version = storage.create("a", b"old").version
        results = at_once(
            functools.partial(storage.replace, "a", b"new %d" % n, version) for n in range(THREADS)
        )
        won = [n for n, result in enumerate(results) if isinstance(result, ObjectInfo)]
        lost = [result for result in results if isinstance(result, ObjectChangedError)]
        assert (len(won), len(lost)) == (1, THREADS - 1), results
        assert storage.read("a") == b"new %d" % won[0]

    def test_no_update_is_lost_between_threads(self, storage: Storage) -> None:
        storage.create("counter", b"0 by nobody")
        times = 5

        def count(n: int) -> None:
            done = 0
            while done < times:
                info = storage.stat("counter")
                number = int(storage.read("counter").split()[0])
                try:
                    # Signed: a wrapper that retries takes bytes like its own for its own.
                    storage.replace("counter", b"%d by %d" % (number + 1, n), info.version)
                except ObjectChangedError:
                    continue
                done += 1

        assert at_once([functools.partial(count, n) for n in range(4)]) == [None] * 4
        assert int(storage.read("counter").split()[0]) == 4 * times

    def test_a_version_changes_whenever_the_bytes_do(self, storage: Storage) -> None:
        info = storage.create("a", b"%03d" % 0)
        for n in range(1, 20):
            data = b"%03d" % n
            by_writer = n % 2
            new = (put if by_writer else replace)(storage, "a", data)
            assert new.version != info.version
            assert storage.stat("a").version == new.version
            info = new

    def test_small_objects_have_a_largest_size(self, storage: Storage) -> None:
        data = pattern(SMALL_OBJECT_BYTES + 1)
        with pytest.raises(StorageError):
            storage.create("a", data)
        require_absent(storage, "a")
        info = storage.create("a", memoryview(data)[:-1])
        assert info.size_bytes == SMALL_OBJECT_BYTES
        with pytest.raises(StorageError):
            storage.replace("a", data, info.version)
        require_bytes(storage.read("a"), data[:-1])
        require_same(info, storage.stat("a"))

    def test_a_small_object_may_be_empty(self, storage: Storage) -> None:
        info = storage.create("a", b"")
        assert (storage.read("a"), info.size_bytes) == (b"", 0)
        info = storage.replace("a", b"x", info.version)
        info = storage.replace("a", b"", info.version)
        assert (storage.read("a"), info.size_bytes) == (b"", 0)
