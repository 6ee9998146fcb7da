"""The index of model files: derived from the commit record, and settled whenever that changes."""

import json

import msgspec
import numpy as np
import pytest
from catalog_tools import Observed, aged, leftovers, put
from model_files import ARRAYS, begin, index_of, save

from holdfast.catalog import Attempt, Catalog
from holdfast.catalog._model_index import check_index, model_index, settle_index, write_index
from holdfast.errors import SaveError, StorageError
from holdfast.format import StoredFile
from holdfast.storage import MemoryStorage

KEY = "a/model.safetensors.index.json"
FOREIGN = json.dumps({"metadata": {"total_size": 5}, "weight_map": {"w": "pytorch.bin"}}).encode()


def weights(storage, prefix="a"):
    index = index_of(storage, prefix)
    return None if index is None else index["weight_map"]


def in_place(storage, prefix="a"):
    """Whether the index is exactly that of the record in place."""
    wanted = model_index(Catalog(storage).find(prefix).record)
    return storage.read(f"{prefix}/model.safetensors.index.json") == wanted


def test_it_says_which_file_holds_which_tensor():
    storage = MemoryStorage()
    attempt, record = save(storage)
    assert index_of(storage) == {
        "metadata": {"total_size": 800_480, "holdfast": attempt.intent.attempt},
        "weight_map": {
            "embed.weight": record.files[0].name,
            "head.weight": record.files[1].name,
        },
    }


def test_it_depends_on_nothing_but_the_model():
    _, record = save(MemoryStorage())
    fenced = msgspec.structs.replace(record, fence=3, ordinal=9)
    turned = msgspec.structs.replace(record, tensors=dict(reversed(record.tensors.items())))
    assert model_index(fenced) == model_index(turned) == model_index(record)


def test_a_name_is_that_of_the_entry_in_the_file():
    save(storage := MemoryStorage(), arrays={"x[0:2]": np.zeros(2), "y": np.zeros(())})
    assert [*weights(storage)] == ["x[0:2][0:2]", "y"]


def test_a_checkpoint_without_model_files_has_none():
    storage = MemoryStorage()
    Catalog(storage).write("a", ARRAYS)
    record = Catalog(storage).find("a").record
    assert model_index(record) is None
    write_index(storage, "a", record)
    settle_index(storage, "a")
    assert index_of(storage) is None


def test_files_of_another_checkpoint_are_not_in_it():
    _, record = save(MemoryStorage())
    first, *others = record.files
    elsewhere = StoredFile(
        name=first.name,
        size_bytes=first.size_bytes,
        digest=first.digest,
        prefix="b",
        table=first.table,
    )
    borrowed = msgspec.structs.replace(record, files=(elsewhere, *others))
    assert [*json.loads(model_index(borrowed))["weight_map"]] == ["head.weight"]


def test_settling_writes_what_is_missing_or_differs_and_is_idempotent():
    save(storage := MemoryStorage())
    for wrong in (None, b'{"metadata":{"holdfast":"0"},"weight_map":{}}'):
        storage.delete(KEY)
        if wrong is not None:
            put(storage, KEY, wrong)
        settle_index(storage, "a")
        assert in_place(storage)
    version = storage.stat(KEY).version
    settle_index(storage, "a")
    assert storage.stat(KEY).version == version


@pytest.mark.parametrize("way", ["delete", "rollback"])
def test_it_goes_with_its_checkpoint(way):
    save(storage := MemoryStorage())
    getattr(Catalog(storage), way)("a")
    assert [*storage.list()] == []


@pytest.mark.parametrize("way", ["delete", "rollback"])
def test_it_goes_before_the_files_that_it_names(way):
    storage = MemoryStorage()
    save(storage)
    deleted = []
    observed = Observed(storage, before=lambda method, key: deleted.append((method, key)))
    getattr(Catalog(observed), way)("a")
    keys = [key for method, key in deleted if method == "delete"]
    assert keys.index(KEY) < min(n for n, key in enumerate(keys) if "/model-" in key)


def test_it_goes_when_a_checkpoint_without_model_files_takes_the_place():
    save(storage := MemoryStorage())
    Catalog(storage).write("a", ARRAYS, overwrite=True)
    assert index_of(storage) is None
    assert leftovers(storage) == []


def test_it_is_renewed_when_another_model_takes_the_place():
    storage = MemoryStorage()
    save(storage)
    _, record = save(storage, arrays={"other": np.zeros(3)}, overwrite=True)
    assert weights(storage) == {"other": record.files[0].name}


def test_a_save_that_does_not_commit_takes_its_index_along():
    storage = MemoryStorage()
    attempt, record = begin(storage)
    write_index(storage, "a", record)
    attempt.abort()
    assert [*storage.list()] == []


def test_a_save_that_does_not_replace_another_leaves_its_index():
    storage = MemoryStorage()
    save(storage)
    attempt, _ = begin(storage, arrays={"other": np.zeros(3)}, overwrite=True)
    attempt.abort()
    assert in_place(storage)


@pytest.mark.parametrize("left", ["an index too many", "an index too few"])
def test_gc_settles_what_a_dead_save_left(left):
    storage = MemoryStorage()
    if left == "an index too many":
        _, record = begin(storage)
        write_index(storage, "a", record)
        aged(storage, intent=10_000).gc()
        assert index_of(storage) is None
        assert [info.key for info in storage.list()] == ["a/metadata.json"]
    else:
        save(storage)
        storage.delete(KEY)
        Catalog(storage).gc()
        assert in_place(storage)


def test_gc_leaves_the_index_of_a_save_that_is_alive():
    storage = MemoryStorage()
    attempt, record = begin(storage)
    write_index(storage, "a", record)
    Catalog(storage).gc()
    assert weights(storage) is not None
    attempt.commit(record)
    assert in_place(storage)


@pytest.mark.parametrize(
    "foreign",
    [FOREIGN, b"", b"no JSON", b"[" * 100_000, b'{"metadata":{"holdfast":1}}', b'{"metadata":[]}'],
    ids=["theirs", "empty", "no JSON", "deep", "other type", "other shape"],
)
def test_one_that_is_not_holdfasts_is_never_touched(foreign):
    storage = MemoryStorage()
    put(storage, KEY, foreign)
    for call in (
        lambda: check_index(storage, "a"),
        lambda: write_index(storage, "a", save(MemoryStorage())[1]),
    ):
        with pytest.raises(SaveError, match=r"not holdfast's, so it stays; nothing was written"):
            call()
    attempt, record = begin(storage)
    attempt.commit(record)
    for settle in (
        lambda: settle_index(storage, "a"),
        Catalog(storage).gc,
        lambda: Catalog(storage).delete("a"),
    ):
        settle()
        assert storage.read(KEY) == foreign
    assert [info.key for info in storage.list()] == [KEY]
    Catalog(storage).rollback("a")
    assert storage.read(KEY) == foreign


def test_a_folder_with_somebody_elses_model_in_it_is_left_alone():
    storage = MemoryStorage()
    put(storage, KEY, FOREIGN)
    put(storage, "a/model-00001-of-00002.safetensors", b"theirs")
    catalog = Catalog(storage)
    catalog.gc()
    catalog.rollback("a")
    assert catalog.list() == []
    assert len([*storage.list()]) == 2


def test_settling_looks_again_if_the_record_changes_meanwhile():
    """A settler that deletes the index of a save that commits at that moment puts it back."""
    storage = MemoryStorage()
    attempt, record = begin(storage)
    write_index(storage, "a", record)

    def before(method, key):
        if (method, key) == ("delete", KEY):
            observed.before = lambda method, key: None
            attempt.commit(record)

    observed = Observed(storage, before=before)
    settle_index(observed, "a")
    assert in_place(storage)


def test_settling_over_a_newer_record_ends_with_that():
    storage = MemoryStorage()
    save(storage)
    storage.delete(KEY)

    def before(method, key):
        if (method, key) == ("open_writer", KEY):
            observed.before = lambda method, key: None
            save(storage, arrays={"newer": np.zeros(2)}, overwrite=True)

    observed = Observed(storage, before=before)
    settle_index(observed, "a")
    assert [*weights(storage)] == ["newer"]
    assert in_place(storage)


def test_an_index_that_cannot_be_removed_leaves_the_files_to_gc():
    storage = MemoryStorage()
    save(storage)

    def before(method, key):
        if (method, key) == ("delete", KEY):
            raise StorageError("no")

    with pytest.raises(StorageError, match="this is no checkpoint any more"):
        Catalog(Observed(storage, before=before)).delete("a")
    assert Catalog(storage).list() == []
    Catalog(storage).gc()
    assert [info.key for info in storage.list()] == ["a/metadata.json"]


def test_a_prefix_may_be_saved_again_over_a_holdfast_index():
    storage = MemoryStorage()
    _, record = begin(storage)  # it died, and its intent is still there
    write_index(storage, "a", record)
    check_index(storage, "a")
    with Attempt.begin(storage, "a"):
        pass
    save(storage)
    assert in_place(storage)
