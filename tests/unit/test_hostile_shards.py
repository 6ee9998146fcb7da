"""Shard files made to break a reader: each is refused with words that say why, at no cost."""

import pytest
from hostile_shards import CORRUPTED, NEWER, PATH, file_of, good
from hostile_tools import assert_refused, peak_of
from made_shards import make_shard, open_shard

from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError
from holdfast.format import CHUNK_BYTES, ShardEntry, parse_table


@pytest.mark.parametrize(("data", "words"), CORRUPTED.values(), ids=CORRUPTED)
def test_a_hostile_shard_is_refused_with_words(data, words):
    most = 2_000_000 + 12 * len(data)
    assert_refused(lambda: open_shard(data, PATH), words, path=PATH, most_bytes=most)


@pytest.mark.parametrize(("data", "words"), NEWER.values(), ids=NEWER)
def test_a_shard_of_a_newer_version_says_so(data, words):
    with pytest.raises(IncompatibleVersionError, match=words) as raised:
        open_shard(data, PATH)
    assert raised.value.path == PATH


@pytest.mark.parametrize(
    ("sizes", "data"),
    [([3], b"abcd"), ([5], b"abcd"), ([0], b"abcd"), ([2**32 - 1], b"abcd")],
)
def test_frames_that_do_not_fill_their_entry_are_refused(sizes, data):
    shard = make_shard(
        [ShardEntry(name="w", dtype="F32", shape=(9,))], [bytes(36)], frames={0: [data]}
    )
    wrong = shard[:-4] + sizes[0].to_bytes(4, "little")
    with pytest.raises(CorruptedError, match="frames of entry 'w'") as raised:
        open_shard(wrong, PATH)
    assert raised.value.path == PATH


def test_an_empty_frame_beside_a_full_one_is_refused():
    size = 262_144 + 4
    shard = make_shard(
        [ShardEntry(name="w", dtype="F32", shape=(size // 4,))],
        [bytes(size)],
        frames={0: [b"ab", b"c"]},
    )
    wrong = shard[:-8] + (3).to_bytes(4, "little") + bytes(4)
    with pytest.raises(CorruptedError, match="one of them is empty"):
        open_shard(wrong, PATH)


@pytest.mark.parametrize("sizes", [(CHUNK_BYTES + 1, 3), (CHUNK_BYTES - 1, 5)])
def test_a_frame_longer_than_its_chunk_is_refused(sizes):
    shard = make_shard(
        [ShardEntry(name="w", dtype="U8", shape=(CHUNK_BYTES + 4,))],
        [bytes(CHUNK_BYTES + 4)],
        frames={0: [bytes(CHUNK_BYTES), bytes(4)]},
    )
    wrong = shard[:-8] + b"".join(size.to_bytes(4, "little") for size in sizes)
    with pytest.raises(CorruptedError, match="frames of entry 'w' is longer than its chunk"):
        open_shard(wrong, PATH)
    assert open_shard(shard, PATH).entries[0].frames == 2


@pytest.mark.parametrize("change", [-1, 1, -16])
def test_a_table_of_another_length_is_refused(change):
    layout = open_shard(good())
    with pytest.raises(CorruptedError, match="where the header says 16") as raised:
        parse_table(layout, bytes(16 + change), path=PATH)
    assert raised.value.path == PATH


def test_a_header_cut_anywhere_is_refused():
    data = good()
    for end in [*range(300), *range(300, len(data), 111), len(data) - 1]:
        with pytest.raises(CheckpointError):
            open_shard(data[:end])


def test_more_entries_than_a_shard_has_are_refused_in_bounded_memory():
    entry = ':{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    data = file_of("{" + ",".join(f'"{i}"{entry}' for i in range(250_002)) + "}")
    most = 2 * len(data)
    assert_refused(lambda: open_shard(data, PATH), "250001 entries", path=PATH, most_bytes=most)


def test_many_entries_cost_memory_in_proportion_to_the_header():
    entry = ':{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    data = file_of("{" + ",".join(f'"{i}"{entry}' for i in range(20_000)) + "}")
    assert len(open_shard(data, PATH).entries) == 20_000
    assert peak_of(lambda: open_shard(data, PATH)) < 16 * len(data)
