"""Tests of writers: what readers see and when, and several writers and threads at once."""

# ruff: noqa: S101 -- tests, though they are shipped

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.contracts import ObjectWriter, Storage
from holdfast.errors import ClosedError, StorageError
from holdfast.testing._conformance._shared import (
    THREADS,
    Tests,
    at_once,
    pattern,
    put,
    require_absent,
    require_bytes,
    require_same,
    while_others,
)

EARLY_PIECE = 16 * 1024 * 1024


class WritingTests(Tests):
    def test_an_object_is_invisible_until_finished_then_whole(self, storage: Storage) -> None:
        with storage.open_writer("a/b") as writer:
            writer.write_at(0, b"abc")
            require_absent(storage, "a/b")
            writer.write_at(3, memoryview(b"def"))
            require_absent(storage, "a/b")
            info = writer.finish()
        assert storage.read("a/b") == b"abcdef"
        assert (info.key, info.size_bytes) == ("a/b", 6)
        require_same(info, storage.stat("a/b"))

    def test_an_object_is_replaced_when_the_writer_finishes(self, storage: Storage) -> None:
        before = put(storage, "a", b"old bytes")
        with storage.open_writer("a") as writer:
            writer.write_at(0, b"new")
            assert storage.read("a") == b"old bytes"
            require_same(storage.stat("a"), before)
            after = writer.finish()
        assert storage.read("a") == b"new"
        assert after.version != before.version
        require_same(storage.stat("a"), after)

    @pytest.mark.parametrize("leave", ["abort", "block", "error"])
    def test_without_finish_nothing_changes(self, storage: Storage, leave: str) -> None:
        before = put(storage, "old", b"old")
        for key in ("old", "new"):
            with contextlib.suppress(LookupError), storage.open_writer(key) as writer:
                writer.write_at(0, b"other")
                if leave == "abort":
                    writer.abort()
                    writer.abort()
                if leave == "error":
                    raise LookupError
        assert storage.read("old") == b"old"
        require_same(storage.stat("old"), before)
        require_absent(storage, "new")

    def test_abort_does_nothing_after_finish(self, storage: Storage) -> None:
        writer = storage.open_writer("a")
        writer.write_at(0, b"kept")
        writer.finish()
        writer.abort()
        assert storage.read("a") == b"kept"

    @pytest.mark.parametrize("end", ["finish", "abort", "refused finish"])
    def test_a_writer_is_used_once(self, storage: Storage, end: str) -> None:
        writer = storage.open_writer("a")
        if end == "refused finish":
            writer.write_at(1, b"x")
            with pytest.raises(StorageError):
                writer.finish()
        else:
            getattr(writer, end)()
        with pytest.raises(ClosedError):
            writer.write_at(0, b"x")
        with pytest.raises(ClosedError):
            writer.finish()
        writer.abort()
        if end == "finish":
            assert storage.read("a") == b""
        else:
            require_absent(storage, "a")

    def test_of_two_writers_of_a_key_the_last_to_finish_stays(self, storage: Storage) -> None:
        with storage.open_writer("a") as first, storage.open_writer("a") as second:
            first.write_at(0, b"first, longer")
            second.write_at(0, b"second")
            second.finish()
            assert storage.read("a") == b"second"
            first.finish()
        assert storage.read("a") == b"first, longer"

    def test_a_writer_may_be_handed_from_thread_to_thread(self, storage: Storage) -> None:
        writer = storage.open_writer("a")

        def handed(call: Callable[[], Any]) -> None:
            [result] = at_once([call])
            assert not isinstance(result, Exception), result

        handed(lambda: writer.write_at(0, b"abc"))
        handed(lambda: writer.write_at(3, b"def"))
        handed(writer.finish)
        assert storage.read("a") == b"abcdef"

    def test_threads_write_different_keys_at_once(self, storage: Storage) -> None:
        size_bytes = max(1, self.large_bytes // THREADS)

        def write(n: int) -> None:
            data = pattern(size_bytes, seed=n)
            half = size_bytes // 2
            with storage.open_writer(f"folder/{n}") as writer:
                writer.write_at(0, data[:half])
                writer.write_at(half, data[half:])
                writer.finish()

        results = at_once([functools.partial(write, n) for n in range(THREADS)])
        assert results == [None] * THREADS
        for n in range(THREADS):
            require_bytes(storage.read(f"folder/{n}"), pattern(size_bytes, seed=n))

    def test_threads_that_finish_one_key_at_once_leave_one_whole_object(
        self, storage: Storage
    ) -> None:
        writers: list[ObjectWriter] = []
        for n in range(THREADS):
            writers.append(storage.open_writer("a"))
            writers[n].write_at(0, bytes([n]) * (1000 + n))
        for result in at_once([writer.finish for writer in writers]):
            assert not isinstance(result, Exception), result
        stored = storage.read("a")
        assert stored == bytes([stored[0]]) * (1000 + stored[0])

    def test_readers_see_the_old_object_or_the_new_one_whole(self, storage: Storage) -> None:
        versions = [b"a" * 50_000, b"b" * 40_000]
        put(storage, "k", versions[0])

        def read() -> None:
            assert storage.read("k") in versions

        def write(n: int) -> None:
            put(storage, "k", versions[n % 2])

        while_others(write, read, times=self.random_examples)
