"""Tests of the rest: room left, sweeping, times, where the storage is, and many threads."""

# ruff: noqa: S101 -- tests, though they are shipped

import functools
import math
import random

import pytest

from holdfast.contracts import Storage
from holdfast.testing._conformance._shared import THREADS, Tests, at_once, pattern, put


class UpkeepTests(Tests):
    def test_room_left_is_a_number_or_unknown(self, storage: Storage) -> None:
        free = storage.free_bytes()
        assert free is None or free >= 0

    def test_sweeping_harms_no_object(self, storage: Storage) -> None:
        storage.create("a", b"created")
        put(storage, "b/c", b"written")
        storage.open_writer("d").abort()
        for older_than_s in (3600, 0, 0.5):
            assert isinstance(storage.sweep(older_than_s), int)
        assert storage.sweep(0) == 0
        assert [info.key for info in storage.list()] == ["a", "b/c"]
        assert (storage.read("a"), storage.read("b/c")) == (b"created", b"written")

    def test_sweeping_harms_no_young_write(self, storage: Storage) -> None:
        data = pattern(self.large_bytes)
        half = len(data) // 2
        with storage.open_writer("a") as writer:
            writer.write_at(0, data[:half])
            assert storage.sweep(3600) == 0
            writer.write_at(half, data[half:])
            assert storage.sweep(3600) == 0
            writer.finish()
        assert storage.stat("a").size_bytes == len(data)
        assert storage.read("a") == data

    @pytest.mark.parametrize("wrong", [-1, math.nan, "soon", None])
    def test_sweeping_needs_an_age(self, storage: Storage, wrong: float) -> None:
        with pytest.raises((ValueError, TypeError)):
            storage.sweep(wrong)

    def test_times_go_on(self, storage: Storage) -> None:
        first = storage.create("a", b"")
        second = put(storage, "b", b"")
        again = storage.replace("a", b"x", first.version)
        assert 0 < first.modified_s <= second.modified_s + 1
        assert second.modified_s <= again.modified_s + 1
        assert math.isfinite(again.modified_s)

    def test_it_says_where_it_is(self, storage: Storage) -> None:
        assert isinstance(storage.url, str)
        assert storage.url
        assert storage.url == storage.url

    def test_every_method_may_be_called_from_any_thread(self, storage: Storage) -> None:
        def work(n: int) -> None:
            rng = random.Random(n)  # noqa: S311 -- the same every time
            mine: dict[str, bytes] = {}
            for step in range(self.random_examples):
                key = f"thread {n}/{rng.randrange(4)}"
                data = b"%d" % step
                taken = key in mine
                mine[key] = data
                match rng.choice(("delete", "put", "small")), taken:
                    case "delete", _:
                        storage.delete(key)
                        del mine[key]
                    case "small", False:
                        storage.create(key, data)
                    case "small", True:
                        storage.replace(key, data, storage.stat(key).version)
                    case _:
                        put(storage, key, data)
                assert {
                    info.key: storage.read(info.key) for info in storage.list(f"thread {n}/")
                } == mine

        results = at_once([functools.partial(work, n) for n in range(THREADS)])
        assert results == [None] * THREADS
