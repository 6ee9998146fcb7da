"""Tests of what a writer is given: pieces in any order, sizes, and every kind of bytes."""

# ruff: noqa: S101 -- tests, though they are shipped

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.contracts import EARLY_BYTES, Data, Storage
from holdfast.errors import StorageError
from holdfast.testing._conformance._shared import Tests, pattern, put, require_absent, require_bytes

EARLY_PIECE = 16 * 1024 * 1024


def write(
    storage: Storage, key: str, pieces: list[tuple[int, Data]], size_bytes: int | None = None
) -> None:
    with storage.open_writer(key, size_bytes=size_bytes) as writer:
        for offset, piece in pieces:
            writer.write_at(offset, piece)
        writer.finish()


class PieceTests(Tests):
    def test_an_object_may_be_empty(self, storage: Storage) -> None:
        assert storage.open_writer("nothing").finish().size_bytes == 0
        with storage.open_writer("empty pieces", size_bytes=0) as writer:
            writer.write_at(0, b"")
            writer.finish()
        for key in ("nothing", "empty pieces"):
            assert storage.read(key) == b""
            assert storage.stat(key).size_bytes == 0
        assert [info.key for info in storage.list()] == ["empty pieces", "nothing"]

    def test_pieces_in_any_order_give_the_object(self, storage: Storage) -> None:
        @self.some_examples()
        @given(
            sizes=st.lists(st.integers(0, 60), max_size=8),
            order=st.randoms(use_true_random=False),
            announced=st.booleans(),
        )
        def check(sizes: list[int], order: random.Random, announced: bool) -> None:
            data = pattern(sum(sizes))
            edges = [0, *itertools.accumulate(sizes)]
            pieces: list[tuple[int, Data]] = [
                (start, data[start:end]) for start, end in itertools.pairwise(edges)
            ]
            order.shuffle(pieces)
            write(storage, "k", pieces, size_bytes=len(data) if announced else None)
            assert storage.read("k") == data

        check()

    def test_a_large_object_comes_back(self, storage: Storage) -> None:
        data = pattern(self.large_bytes)
        pieces = itertools.cycle([1, 4096, 1_000_003, 65_536, 3_333_333])
        with storage.open_writer("large", size_bytes=len(data)) as writer:
            start = 0
            while start < len(data):
                end = min(len(data), start + next(pieces))
                writer.write_at(start, memoryview(data)[start:end])
                start = end
            info = writer.finish()
        assert info.size_bytes == len(data)
        require_bytes(storage.read("large"), data)

    @pytest.mark.parametrize("announced", [False, True])
    def test_a_large_object_in_one_piece_comes_back(
        self, storage: Storage, announced: bool
    ) -> None:
        data = pattern(self.large_bytes, seed=1)
        with storage.open_writer("k", size_bytes=len(data) if announced else None) as writer:
            writer.write_at(0, data)
            writer.finish()
        require_bytes(storage.read("k"), data)

    @pytest.mark.parametrize(
        "pieces",
        [
            [(1, b"x")],
            [(0, b"xx"), (3, b"x")],
            [(5, b"x"), (0, b"xx"), (3, b"xx")],
            [(0, b"xx"), (1, b"x")],
            [(0, b"xx"), (0, b"xx")],
            [(4, b"xx"), (0, b"xxxxx")],
            [(4, b"xx"), (5, b"x"), (0, b"xxxx")],
            [(4, b"xx"), (4, b"xx"), (0, b"xxxx")],
        ],
        ids=str,
    )
    def test_holes_and_bytes_written_twice_are_refused(
        self, storage: Storage, pieces: list[tuple[int, Data]]
    ) -> None:
        put(storage, "old", b"old")
        for key in ("old", "new"):
            with pytest.raises(StorageError):
                write(storage, key, pieces)
        assert storage.read("old") == b"old"
        require_absent(storage, "new")

    def test_bytes_are_held_ahead_of_their_turn_up_to_a_limit(self, storage: Storage) -> None:
        piece = bytes(EARLY_PIECE)
        with storage.open_writer("a") as writer:
            for start in range(0, EARLY_BYTES, EARLY_PIECE):
                writer.write_at(1 + start, piece)
            with pytest.raises(StorageError):
                writer.write_at(1 + EARLY_BYTES, b"x")
        require_absent(storage, "a")

    def test_bytes_that_had_their_turn_no_longer_count_as_held(self, storage: Storage) -> None:
        piece = bytes(EARLY_PIECE)
        with storage.open_writer("a") as writer:
            for n in range(EARLY_BYTES // EARLY_PIECE + 1):
                start = n * (EARLY_PIECE + 1)
                writer.write_at(start + 1, piece)
                writer.write_at(start, b"x")
        require_absent(storage, "a")

    @pytest.mark.parametrize("announced", [0, 2, 4])
    def test_another_size_than_announced_is_refused(self, storage: Storage, announced: int) -> None:
        put(storage, "old", b"old")
        for key in ("old", "new"):
            with pytest.raises(StorageError):
                write(storage, key, [(0, b"xxx")], size_bytes=announced)
        assert storage.read("old") == b"old"
        require_absent(storage, "new")

    @pytest.mark.parametrize("wrong", [-1, True, 1.5, "3"])
    def test_what_cannot_be_a_size_is_refused(self, storage: Storage, wrong: int) -> None:
        with pytest.raises(ValueError, match="size_bytes"):
            storage.open_writer("a", size_bytes=wrong)
        assert storage.sweep(0) == 0
        require_absent(storage, "a")

    def test_a_negative_offset_is_refused(self, storage: Storage) -> None:
        with storage.open_writer("a") as writer, pytest.raises(ValueError, match="-1"):
            writer.write_at(-1, b"x")
        require_absent(storage, "a")

    def test_data_may_be_reused_once_the_call_returns(self, storage: Storage) -> None:
        data = bytearray(b"abc")
        storage.create("created", data)
        with storage.open_writer("written") as writer:
            writer.write_at(3, data)
            data[:] = b"ABC"
            writer.write_at(0, data)
            data[:] = b"xyz"
            writer.finish()
        data.extend(b"no reference is kept")
        assert storage.read("created") == b"abc"
        assert storage.read("written") == b"ABCabc"

    @pytest.mark.parametrize(
        "make",
        [
            bytes,
            bytearray,
            memoryview,
            lambda data: memoryview(bytearray(data)),
            lambda data: memoryview(data).cast("I"),
            lambda data: memoryview(data).cast("B", (4, 6)),
            lambda data: memoryview(b"--" + data + b"--")[2:-2],
        ],
        ids=["bytes", "bytearray", "read-only", "writable", "integers", "rows", "part"],
    )
    def test_every_kind_of_bytes_is_stored(
        self, storage: Storage, make: Callable[[bytes], Data]
    ) -> None:
        data = bytes(range(24))
        info = storage.create("created", make(data))
        assert storage.replace("created", make(data), info.version).size_bytes == len(data)
        write(storage, "written", [(len(data), make(data)), (0, make(data))], size_bytes=48)
        assert storage.read("created") == data
        assert storage.read("written") == data + data

    @pytest.mark.parametrize("wrong", [5, "text", None, [1, 2]])
    def test_what_is_not_bytes_is_refused(self, storage: Storage, wrong: Any) -> None:
        info = storage.create("old", b"old")
        with pytest.raises(TypeError):
            storage.create("new", wrong)
        with pytest.raises(TypeError):
            storage.replace("old", wrong, info.version)
        with storage.open_writer("old") as writer, pytest.raises(TypeError):
            writer.write_at(0, wrong)
        assert storage.read("old") == b"old"
        require_absent(storage, "new")
