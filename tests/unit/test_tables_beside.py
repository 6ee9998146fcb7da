"""Files that hold nothing but tensors, with their chunk tables in objects beside them."""

import json

import numpy as np
import pytest
from catalog_tools import aged, files_of, leftovers, memory_of, put, reread
from made_shards import open_shard
from model_files import ARRAYS, begin, save
from safetensors import safe_open

from holdfast.catalog import Catalog
from holdfast.catalog._names import (
    MODEL_INDEX,
    attempt_of_shard,
    is_model_name,
    model_name,
    shard_key,
    table_name,
)
from holdfast.catalog._shard_write import write_shard
from holdfast.errors import CorruptedError, SaveError
from holdfast.format import (
    CompressionLevel,
    ShardEntry,
    StoredFile,
    chunk_digests,
    encode_record,
    encode_table,
    file_digest,
    parse_shard_header,
    parse_table,
    plan_shard,
)
from holdfast.storage import LocalStorage, MemoryStorage

ENTRY = ShardEntry(name="w", dtype="F32", shape=(2,))
ATTEMPT = "0123456789abcdef"


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.BALANCED])
def test_what_is_written_is_read_and_verified(level, tmp_path):
    storage = LocalStorage(tmp_path)
    _, record = save(storage, level=level)
    catalog = Catalog(storage)
    assert catalog.verify("a").is_intact
    found = catalog.read("a")
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
    assert record.files[0].table == record.files[0].name.replace(".safetensors", ".chunks")
    assert (catalog.info("a").world_size, catalog.info("a").format) == (2, "consolidated")


def test_another_reader_sees_the_tensors_and_nothing_else(tmp_path):
    storage = LocalStorage(tmp_path)
    _, record = save(storage)
    with safe_open(tmp_path / "a" / record.files[0].name, "np") as file:
        assert [*file.keys()] == ["embed.weight"]
        assert file.metadata()["format"] == "pt"
        about = json.loads(file.metadata()["holdfast"])
        np.testing.assert_array_equal(file.get_tensor("embed.weight"), ARRAYS["embed.weight"])
    assert about == {"version": 1, "chunk_bytes": 262_144, "table": "beside"}


def test_the_layout_says_where_the_table_is():
    inside, beside = plan_shard([ENTRY]), plan_shard([ENTRY], table_beside=True)
    assert not inside.table_beside
    assert (beside.table_offset, beside.table_bytes) == (0, inside.table_bytes)
    assert beside.file_bytes == inside.file_bytes - inside.table_bytes
    parsed = parse_shard_header(beside.header, beside.file_bytes, path="x")
    assert parsed == beside
    table = encode_table(beside, [chunk_digests(b"12345678")])
    assert parse_table(parsed, table, path="x").digests == table


def test_a_file_of_no_bytes_has_an_empty_table_beside_it():
    save(storage := MemoryStorage(), arrays={"none": np.zeros((0, 3), np.float32)})
    catalog = Catalog(storage)
    assert catalog.verify("a").is_intact
    assert catalog.read("a")["none"].shape == (0, 3)


def test_a_header_that_contradicts_itself_is_refused():
    layout = plan_shard([ENTRY])
    table = encode_table(layout, [chunk_digests(b"12345678")])
    shard = layout.header + b"12345678" + table
    lying = shard.replace(rb"262144}", rb"262144,\"table\":\"beside\"}")
    with pytest.raises(CorruptedError, match="says that it is beside the file"):
        open_shard(_shortened(lying, len(shard)))
    odd = shard.replace(rb"262144}", rb"262144,\"table\":\"inside\"}")
    with pytest.raises(CorruptedError, match="header of the shard is wrong"):
        open_shard(_shortened(odd, len(shard)))
    beside = plan_shard([ENTRY], table_beside=True)
    without = (beside.header + b"12345678").replace(rb",\"table\":\"beside\"", b"")
    with pytest.raises(CorruptedError, match="last entry is not the chunk table"):
        open_shard(without[:4000] + b" " * (4104 - len(without)) + without[4000:])


def _shortened(data, size):
    """With fewer of the spaces that pad the header."""
    extra = len(data) - size
    assert data[4000 - extra : 4000].isspace()
    return data[: 4000 - extra] + data[4000:]


def _changed(change):
    """A storage with such a checkpoint in it after a change of its first table."""
    save(storage := MemoryStorage())
    (key, *_) = [info.key for info in storage.list("a/model-") if info.key.endswith(".chunks")]
    change(storage, key)
    return storage, key


DAMAGE = {
    "missing": (lambda storage, key: storage.delete(key), "missing"),
    "short": (lambda storage, key: put(storage, key, storage.read(key)[:-1]), "63 bytes, but 64"),
    "long": (lambda storage, key: put(storage, key, storage.read(key) + b"x"), "65 bytes, but 64"),
    "other": (
        lambda storage, key: put(storage, key, bytes(len(storage.read(key)))),
        "not the one that was written",
    ),
}


@pytest.mark.parametrize(("change", "words"), DAMAGE.values(), ids=DAMAGE)
def test_damage_of_a_table_is_found(change, words):
    storage, _ = _changed(change)
    catalog = Catalog(storage)
    with pytest.raises(CorruptedError, match=words):
        catalog.read("a")
    (damage,) = catalog.verify("a").damage
    assert words in damage.problem


def test_a_table_is_where_both_the_record_and_the_header_say():
    save(storage := MemoryStorage())
    (found,) = [Catalog(storage).find("a")]
    first, *others = found.record.files
    file = StoredFile(name=first.name, size_bytes=first.size_bytes, digest=first.digest)
    put(storage, "a/metadata.json", reread(found.record, files=(file, *others)))
    with pytest.raises(CorruptedError, match="do not agree on where its chunk table is"):
        Catalog(storage).read("a")


@pytest.mark.parametrize(
    "table",
    ["x.chunks", "../a.chunks", f"model-00001-of-00001-{ATTEMPT}.safetensors", ""],
)
def test_a_record_names_a_table_as_its_file(table):
    _, record = save(MemoryStorage())
    file = StoredFile(
        name=f"model-00001-of-00001-{ATTEMPT}.safetensors",
        size_bytes=5000,
        digest="0" * 32,
        table=table,
    )
    with pytest.raises(ValueError, match=r"must be named as it is, but with \.chunks"):
        reread(record, files=(file, *record.files[1:]))


def test_a_commit_looks_for_the_tables():
    storage = MemoryStorage()
    attempt, record = begin(storage)
    storage.delete(f"a/{record.files[0].table}")
    with pytest.raises(SaveError, match="is gone, though it was written"), attempt:
        attempt.commit(record)
    assert [*storage.list()] == []


def test_what_an_attempt_wrote_is_removed_if_it_does_not_commit():
    storage = MemoryStorage()
    attempt, _ = begin(storage)
    assert len([*storage.list("a/model-")]) == 4
    attempt.abort()
    assert [*storage.list()] == []


@pytest.mark.parametrize("way", ["delete", "rollback"])
def test_deleting_removes_the_tables_too(way):
    save(storage := MemoryStorage())
    getattr(Catalog(storage), way)("a")
    assert [*storage.list()] == []


def test_overwriting_removes_the_old_tables_and_keeps_the_new():
    storage = MemoryStorage()
    save(storage)
    Catalog(storage).write("a", {"x": np.arange(3)}, overwrite=True)
    assert leftovers(storage) == []
    assert not [*storage.list("a/model")]


def test_gc_removes_what_a_dead_save_left_and_nothing_that_is_named():
    storage = MemoryStorage()
    save(storage, "kept")
    begin(storage, "dead")
    kept = {key: data for key, data in files_of(storage).items() if key.startswith("kept/")}
    assert len(kept) == 7
    report = aged(storage, intent=10_000).gc()
    assert len([key for key in report.deleted if key.startswith("dead/model-")]) == 4
    left = files_of(storage)
    assert {key: left.get(key) for key in kept} == kept
    assert {key for key in left if key.startswith("dead/")} == {"dead/metadata.json"}
    assert Catalog(storage).verify("kept").is_intact


def test_a_table_that_another_checkpoint_needs_stays():
    storage = MemoryStorage()
    _, record = save(storage)
    first = record.files[0]
    borrowed = StoredFile(
        name=first.name,
        size_bytes=first.size_bytes,
        digest=first.digest,
        prefix="a",
        table=first.table,
    )
    other = encode_record(
        type(record)(
            state="committed",
            ordinal=9,
            attempt=ATTEMPT,
            created=record.created,
            world_size=1,
            writer="test",
            files=(borrowed,),
            tensors={"embed.weight": record.tensors["embed.weight"]},
        )
    )
    storage.create("b/metadata.json", other)
    Catalog(storage).delete("a")
    assert [info.key for info in storage.list("a/")] == [f"a/{first.table}", f"a/{first.name}"]
    assert Catalog(storage).verify("b").is_intact


def test_a_table_goes_beside_its_file_and_nowhere_else():
    with pytest.raises(ValueError, match=r"table_key must be 'a/x\.chunks'"):
        write_shard(memory_of({}), "a/x.safetensors", [], table_key="b/x.chunks")


def test_names_tell_the_attempt():
    names = [
        model_name(1, 2, ATTEMPT),
        model_name(123_456, 200_000, ATTEMPT),
        shard_key("", ATTEMPT, 3).removeprefix("/"),
        shard_key("", ATTEMPT, 3, 4).removeprefix("/"),
    ]
    assert names == [
        f"model-00001-of-00002-{ATTEMPT}.safetensors",
        f"model-123456-of-200000-{ATTEMPT}.safetensors",
        f"shard-3-{ATTEMPT}.safetensors",
        f"shard-3-{ATTEMPT}-4.safetensors",
    ]
    for name in names:
        assert attempt_of_shard(name) == attempt_of_shard(table_name(name)) == ATTEMPT
        assert is_model_name(name) is name.startswith("model-")
        assert not is_model_name(table_name(name))
    for name in [MODEL_INDEX, "model-00001-of-00002.safetensors", "model.safetensors", "x.chunks"]:
        assert attempt_of_shard(name) is None
    with pytest.raises(ValueError, match="number must be 1 to 2"):
        model_name(0, 2, ATTEMPT)
    with pytest.raises(ValueError, match="must be the name of"):
        table_name("x.chunks")


def test_the_digest_is_the_same_as_that_of_a_table_inside():
    save(storage := MemoryStorage())
    record = Catalog(storage).find("a").record
    file = record.files[1]
    data = storage.read(f"a/{file.name}")
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    assert file.digest == file_digest(header, storage.read(f"a/{file.table}")).hex()
