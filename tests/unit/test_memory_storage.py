"""MemoryStorage keeps the Storage contract."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.contracts import SMALL_OBJECT_BYTES, ReadRange
from holdfast.errors import (
    ClosedError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
)
from holdfast.storage import MemoryStorage


@pytest.fixture
def storage():
    return MemoryStorage()


BAD_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\0b", None, 3, b"a"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_are_not_relative_names_are_refused_everywhere(storage, key):
    for use in (
        storage.open_writer,
        lambda k: storage.create(k, b""),
        lambda k: storage.replace(k, b"", "1"),
        storage.read,
        lambda k: storage.read_into(k, []),
        storage.stat,
        storage.delete,
    ):
        with pytest.raises(ValueError, match="key must be") as caught:
            use(key)
        assert repr(key) in str(caught.value)
    assert list(storage.list()) == []


def test_an_object_is_invisible_until_finished_then_whole(storage):
    with storage.open_writer("a/b") as writer:
        writer.write_at(3, b"def")
        writer.write_at(0, memoryview(b"abc"))
        with pytest.raises(ObjectNotFoundError):
            storage.stat("a/b")
        info = writer.finish()
    assert storage.read("a/b") == b"abcdef"
    assert storage.stat("a/b") == info
    assert (info.key, info.size_bytes) == ("a/b", 6)


def test_leaving_the_block_without_finish_keeps_what_was_there(storage):
    before = storage.create("a", b"old")
    with storage.open_writer("a") as writer:
        writer.write_at(0, b"new")
    assert storage.read("a") == b"old"
    assert storage.stat("a") == before


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(1, b"x")], "bytes 0 to 1 were never written"),
        ([(0, b"xx"), (3, b"x")], "bytes 2 to 3 were never written"),
        ([(0, b"xx"), (1, b"x")], "bytes 1 to 2 were written twice"),
    ],
)
def test_holes_and_overlaps_are_refused_and_keep_what_was_there(storage, pieces, message):
    storage.create("a", b"old")
    with storage.open_writer("a") as writer:
        for offset, piece in pieces:
            writer.write_at(offset, piece)
        with pytest.raises(StorageError, match=message):
            writer.finish()
    assert storage.read("a") == b"old"


def test_the_same_offset_twice_and_a_negative_one_are_refused_at_once(storage):
    writer = storage.open_writer("a")
    writer.write_at(0, b"x")
    with pytest.raises(StorageError, match="already written"):
        writer.write_at(0, b"y")
    with pytest.raises(ValueError, match="-1"):
        writer.write_at(-1, b"y")


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200)), order=st.randoms())
def test_pieces_in_any_order_give_the_object(data, cuts, order):
    storage = MemoryStorage()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    spans = list(itertools.pairwise(edges))
    order.shuffle(spans)
    with storage.open_writer("k") as writer:
        for start, end in spans:
            writer.write_at(start, data[start:end])
        writer.finish()
    assert storage.read("k") == data


def test_a_writer_is_used_once(storage):
    finished = storage.open_writer("a")
    finished.finish()
    finished.abort()
    assert storage.read("a") == b""
    aborted = storage.open_writer("b")
    aborted.abort()
    aborted.abort()
    for writer in (finished, aborted):
        with pytest.raises(ClosedError):
            writer.write_at(0, b"x")
        with pytest.raises(ClosedError):
            writer.finish()


def test_data_is_copied_and_must_be_bytes(storage):
    data = bytearray(b"abc")
    storage.create("a", data)
    writer = storage.open_writer("b")
    writer.write_at(0, data)
    data[:] = b"xyz"
    writer.finish()
    assert storage.read("a") == storage.read("b") == b"abc"
    for wrong in (5, "text", None):
        with pytest.raises(TypeError):
            storage.create("c", wrong)
        with pytest.raises(TypeError):
            storage.open_writer("c").write_at(0, wrong)


def test_of_many_creators_one_wins(storage):
    barrier = threading.Barrier(16)
    won, lost = [], []

    def work(n):
        barrier.wait()
        try:
            storage.create("a", b"%d" % n)
            won.append(n)
        except ObjectExistsError:
            lost.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 15
    assert storage.read("a") == b"%d" % won[0]


def test_replace_needs_the_current_version(storage):
    with pytest.raises(ObjectNotFoundError):
        storage.replace("a", b"x", "1")
    old = storage.create("a", b"x")
    new = storage.replace("a", b"y", old.version)
    assert new.version != old.version
    with pytest.raises(ObjectChangedError):
        storage.replace("a", b"z", old.version)
    assert storage.read("a") == b"y"


def test_a_version_never_comes_back(storage):
    seen = set()
    for _ in range(5):
        seen.add(storage.create("a", b"same").version)
        storage.delete("a")
    with storage.open_writer("a") as writer:
        seen.add(writer.finish().version)
    assert len(seen) == 6


def test_create_and_replace_take_small_objects_only(storage):
    big = memoryview(bytearray(SMALL_OBJECT_BYTES + 1))
    with pytest.raises(StorageError, match="open_writer"):
        storage.create("a", big)
    info = storage.create("a", b"x")
    with pytest.raises(StorageError, match="open_writer"):
        storage.replace("a", big, info.version)
    assert storage.read("a") == b"x"


def test_ranges_are_filled_or_refused_whole(storage):
    storage.create("a", b"abcdef")
    first, second = bytearray(2), bytearray(3)
    storage.read_into(
        "a",
        [
            ReadRange(start=4, into=memoryview(first)),
            ReadRange(start=0, into=memoryview(second)),
        ],
    )
    assert (first, second) == (b"ef", b"abc")
    untouched = bytearray(2)
    for start in (5, -1):
        with pytest.raises(StorageError, match="not inside"):
            storage.read_into(
                "a",
                [
                    ReadRange(start=0, into=memoryview(untouched)),
                    ReadRange(start=start, into=memoryview(first)),
                ],
            )
    assert untouched == b"\0\0"
    with pytest.raises(ObjectNotFoundError):
        storage.read_into("b", [])


def test_list_goes_by_the_characters_of_the_prefix_in_key_order(storage):
    for key in ("step_10/b", "step_1/a", "step_10/a", "other"):
        storage.create(key, key.encode())
    assert [i.key for i in storage.list("step_1")] == ["step_1/a", "step_10/a", "step_10/b"]
    assert [i.key for i in storage.list("step_1/")] == ["step_1/a"]
    assert [i.size_bytes for i in storage.list("other")] == [5]
    assert len(list(storage.list())) == 4


def test_objects_may_be_deleted_while_listing(storage):
    for n in range(10):
        storage.create(f"k{n}", b"")
    for info in storage.list():
        storage.delete(info.key)
    assert list(storage.list()) == []


def test_what_is_missing_is_said_with_its_path_except_by_delete(storage):
    for use in (storage.read, storage.stat):
        with pytest.raises(ObjectNotFoundError) as caught:
            use("gone")
        assert caught.value.path == "gone"
    storage.delete("gone")


def test_it_says_where_it_is_and_no_limit(storage):
    assert storage.url.startswith("memory://")
    assert storage.url != MemoryStorage().url
    assert storage.free_bytes() is None
