"""OrderedWriter finds what is wrong with pieces, so that a backend only appends."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.contracts import EARLY_BYTES, ObjectInfo
from holdfast.errors import ClosedError, StorageError
from holdfast.storage._ordered import OrderedWriter


class Record:
    """A sink that notes what it is told, and fails where it is told to."""

    def __init__(self, fail_in=()):
        self.told = []
        self.data = b""
        self.fail_in = fail_in

    def append(self, data):
        self._note("append")
        self.data += bytes(data)

    def publish(self):
        self._note("publish")
        return ObjectInfo(key="k", size_bytes=len(self.data), version="1", modified_s=0.0)

    def discard(self):
        self._note("discard")

    def _note(self, name):
        self.told.append(name)
        if name in self.fail_in:
            raise ConnectionError(name)


def test_pieces_in_order_go_straight_through():
    sink = Record()
    writer = OrderedWriter("k", sink)
    for offset, piece in ((0, b"ab"), (2, b"c"), (3, b""), (3, b"d")):
        writer.write_at(offset, piece)
    assert sink.data == b"abcd"
    assert writer.finish().size_bytes == 4
    assert sink.told == ["append", "append", "append", "publish"]


@given(sizes=st.lists(st.integers(0, 5), max_size=12), order=st.randoms(use_true_random=False))
def test_the_sink_gets_first_what_comes_first(sizes, order: random.Random):
    data = bytes(range(sum(sizes)))
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    pieces = [(end - size, data[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    order.shuffle(pieces)
    sink = Record()
    with OrderedWriter("k", sink, size_bytes=len(data)) as writer:
        for offset, piece in pieces:
            writer.write_at(offset, piece)
            assert data.startswith(sink.data)
        writer.finish()
    assert sink.data == data


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(1, b"x")], "bytes 0 to 1 were never written"),
        ([(0, b"xx"), (3, b"x")], "bytes 2 to 3 were never written"),
        ([(0, b"xx"), (1, b"xxx")], "bytes 1 to 2 were written twice"),
        ([(4, b"xx"), (4, b"y")], "byte 4 was written twice"),
        ([(4, b"xx"), (0, b"xxxxx")], "bytes 4 to 5 were written twice"),
        ([(0, b"xxxxxx")], "bytes up to 6 were written, but 5 were announced"),
        ([(3, b"xxx")], "bytes up to 6 were written, but 5 were announced"),
        ([(0, b"xxx")], "3 bytes were written, but 5 were announced"),
    ],
)
def test_it_says_which_bytes_are_wrong_and_publishes_nothing(pieces, message):
    sink = Record()
    size_bytes = 5 if "announced" in message else None
    with (
        pytest.raises(StorageError, match=message) as caught,
        OrderedWriter("k", sink, size_bytes=size_bytes) as writer,
    ):
        for offset, piece in pieces:
            writer.write_at(offset, piece)
        writer.finish()
    assert caught.value.path == "k"
    assert "publish" not in sink.told
    assert sink.told.count("discard") == 1


def test_what_is_held_ahead_is_bounded_and_counted_off_again():
    sink = Record()
    writer = OrderedWriter("k", sink)
    most = memoryview(bytes(EARLY_BYTES))
    writer.write_at(1, most)
    with pytest.raises(StorageError, match="bytes 0 to 67108865 are still missing"):
        writer.write_at(1 + EARLY_BYTES, b"x")
    writer.write_at(0, b"x")
    assert len(sink.data) == 1 + EARLY_BYTES
    writer.write_at(2 + EARLY_BYTES, most)
    writer.abort()


@pytest.mark.parametrize("failing", ["append", "publish"])
def test_a_failure_of_the_sink_discards_it_once_and_closes_the_writer(failing):
    sink = Record(fail_in={failing})
    writer = OrderedWriter("k", sink)
    with pytest.raises(ConnectionError, match=failing):
        writer.write_at(0, b"x")
        writer.finish()
    assert sink.told[-2:] == [failing, "discard"]
    writer.abort()
    assert sink.told.count("discard") == 1
    with pytest.raises(ClosedError):
        writer.write_at(1, b"x")
    with pytest.raises(ClosedError):
        writer.finish()


def test_a_finished_sink_is_not_discarded():
    sink = Record()
    with OrderedWriter("k", sink) as writer:
        writer.finish()
    writer.abort()
    assert sink.told == ["publish"]
