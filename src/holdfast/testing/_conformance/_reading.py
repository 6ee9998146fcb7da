"""Tests of reading: whole objects, and ranges into the caller's memory."""

# ruff: noqa: S101 -- tests, though they are shipped

import array
import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.contracts import ReadRange, Storage
from holdfast.errors import ObjectNotFoundError, StorageError, TransientStorageError
from holdfast.testing._conformance._shared import (
    THREADS,
    Tests,
    at_once,
    pattern,
    put,
    require_bytes,
    while_others,
)

MARK = 0xA5


def filled(storage: Storage, key: str, spans: list[tuple[int, int]]) -> list[bytes]:
    """What ``read_into`` puts into memory for these starts and sizes."""
    buffers = [bytearray([MARK]) * size for _, size in spans]
    ranges = [
        ReadRange(start=start, into=memoryview(buffer))
        for (start, _), buffer in zip(spans, buffers, strict=True)
    ]
    storage.read_into(key, ranges)
    return [bytes(buffer) for buffer in buffers]


class ReadingTests(Tests):
    def test_what_is_missing_is_said_with_its_key(self, storage: Storage) -> None:
        storage.create("a/b", b"x")
        for missing in ("gone", "a", "a/b/c", "a/bb"):
            for read in (
                storage.read,
                storage.stat,
                functools.partial(filled, storage, spans=[(0, 1)]),
            ):
                with pytest.raises(ObjectNotFoundError) as caught:
                    read(missing)
                assert caught.value.path == missing

    def test_ranges_may_overlap_and_come_in_any_order(self, storage: Storage) -> None:
        data = pattern(1000)
        put(storage, "k", data)

        @self.some_examples()
        @given(spans=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000))))
        def check(spans: list[tuple[int, int]]) -> None:
            spans = [(start, min(size, 1000 - start)) for start, size in spans]
            assert filled(storage, "k", spans) == [data[s : s + size] for s, size in spans]

        check()

    def test_ranges_of_a_large_object(self, storage: Storage) -> None:
        data = pattern(self.large_bytes)
        put(storage, "k", data)
        rng = random.Random(0)  # noqa: S311 -- spread over the object, the same every time
        sizes = [0, 1, 511, 4096, 4097, 65_536, 1_000_003, self.large_bytes]
        spans = [(0, self.large_bytes), (self.large_bytes, 0), (self.large_bytes - 1, 1)]
        for size in (min(size, self.large_bytes) for size in sizes):
            spans += [(rng.randint(0, self.large_bytes - size), size) for _ in range(2)]
        for span, found in zip(spans, filled(storage, "k", spans), strict=True):
            require_bytes(found, data[span[0] : sum(span)])

    def test_many_ranges_in_one_call(self, storage: Storage) -> None:
        data = pattern(1_000_000)
        put(storage, "k", data)
        rng = random.Random(1)  # noqa: S311 -- as above
        spans = [(rng.randrange(len(data) - 9), rng.randrange(9)) for _ in range(self.many_ranges)]
        assert filled(storage, "k", spans) == [data[s : s + size] for s, size in spans]

    def test_only_the_range_is_written(self, storage: Storage) -> None:
        put(storage, "k", b"abcdef")
        memory = bytearray(b"-" * 10)
        view = memoryview(memory)
        storage.read_into(
            "k", [ReadRange(start=4, into=view[1:3]), ReadRange(start=0, into=view[6:9])]
        )
        assert memory == b"-ef---abc-"

    @pytest.mark.parametrize(
        "span", [(5, 2), (6, 1), (7, 1), (0, 7), (10**15, 1), (2**62, 4)], ids=str
    )
    def test_a_range_past_the_end_is_an_error_never_a_short_read(
        self, storage: Storage, span: tuple[int, int]
    ) -> None:
        put(storage, "k", b"abcdef")
        for spans in ([span], [(0, 2), span], [span, (0, 2)], [(0, 6), (2, 2), span, (3, 1)]):
            with pytest.raises(StorageError) as caught:
                filled(storage, "k", spans)
            assert not isinstance(caught.value, ObjectNotFoundError)
        assert filled(storage, "k", [(0, 6)]) == [b"abcdef"]

    def test_a_range_before_the_start_is_refused(self, storage: Storage) -> None:
        put(storage, "k", b"abcdef")
        for start in (-1, -6, -100):
            with pytest.raises((StorageError, ValueError)):
                filled(storage, "k", [(start, 2)])

    def test_no_ranges_and_empty_ranges_read_nothing(self, storage: Storage) -> None:
        put(storage, "k", b"abc")
        put(storage, "empty", b"")
        assert filled(storage, "k", []) == []
        assert filled(storage, "k", [(0, 0), (3, 0), (1, 1), (2, 0)]) == [b"", b"", b"b", b""]
        assert filled(storage, "empty", [(0, 0)]) == [b""]
        with pytest.raises(StorageError):
            filled(storage, "empty", [(0, 1)])

    def test_memory_of_any_format_is_filled_by_its_bytes(self, storage: Storage) -> None:
        put(storage, "k", pattern(100))
        numbers = array.array("d", [0.0] * 4)
        rows = bytearray(12)
        storage.read_into(
            "k",
            [
                ReadRange(start=3, into=memoryview(numbers)),
                ReadRange(start=50, into=memoryview(rows).cast("B", (3, 4))),
            ],
        )
        assert numbers.tobytes() == pattern(100)[3:35]
        assert rows == pattern(100)[50:62]

    def test_memory_that_cannot_be_filled_is_refused(self, storage: Storage) -> None:
        put(storage, "k", b"abcdef")
        fixed = bytes(3)
        spread = memoryview(bytearray(6))[::2]
        for into in (memoryview(fixed), spread):
            with pytest.raises((TypeError, ValueError)):
                storage.read_into("k", [ReadRange(start=0, into=into)])
        assert fixed == bytes(3)

    def test_threads_read_one_object_at_once(self, storage: Storage) -> None:
        data = pattern(self.large_bytes)
        put(storage, "k", data)
        share = self.large_bytes // THREADS
        results = at_once(
            functools.partial(filled, storage, "k", [(n * share, share)]) for n in range(THREADS)
        )
        for n, result in enumerate(results):
            assert not isinstance(result, Exception), result
            require_bytes(result[0], data[n * share : (n + 1) * share])

    def test_all_ranges_of_one_call_are_of_one_version(self, storage: Storage) -> None:
        far_apart = 1_500_000
        spans = [(n * far_apart, 1000) for n in range(4)]
        size = spans[-1][0] + 1000
        put(storage, "k", b"a" * size)

        def read() -> None:
            try:
                found = filled(storage, "k", spans)
            except TransientStorageError:
                return
            assert len(set(b"".join(found))) == 1, "bytes of two versions"

        def write(n: int) -> None:
            put(storage, "k", b"%c" % (ord("a") + n % 2) * size)

        while_others(write, read, times=self.random_examples)
