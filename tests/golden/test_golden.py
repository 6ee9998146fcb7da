import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

import make_golden
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from holdfast.catalog import Catalog
from holdfast.errors import CheckpointNotFoundError
from holdfast.format import PerRank, decode_record, encode_value
from holdfast.format._dtypes import DTYPES
from holdfast.storage import LocalStorage, MemoryStorage

FOLDER = pathlib.Path(__file__).parent / "v1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
SHARDS = sorted(FOLDER.rglob("*.safetensors"))


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    """A copy: reading must not change it, and a mistake of a test must not change the originals."""
    copy = tmp_path_factory.mktemp("golden") / "v1"
    shutil.copytree(FOLDER, copy)
    return Catalog(LocalStorage(copy))


def test_all_of_them_are_listed_newest_first(catalog):
    listed = [info.prefix for info in catalog.list()]
    assert sorted(listed) == sorted(EXPECTED)
    assert listed[:4] == ["consolidated", "ranks", "reference", "values"]
    assert listed[-1] == "plain"


@pytest.mark.parametrize("prefix", EXPECTED)
def test_what_was_written_once_is_read_as_it_was(catalog, prefix):
    assert catalog.verify(prefix).is_intact
    found = json.loads(json.dumps(make_golden.expected(catalog)[prefix]))
    assert found == EXPECTED[prefix]


def test_the_digests_are_those_of_the_arrays_that_were_saved():
    """Not only of what some version read."""
    given = {
        "plain": make_golden.plain(),
        "sliced": make_golden.sliced(),
        "ranks": make_golden.of_ranks(),
        "consolidated": make_golden.consolidated(),
        **{f"compressed/{name}": make_golden.compressible() for name in make_golden.COMPRESSED},
    }
    for prefix, tensors in given.items():
        for name, tensor in tensors.items():
            code, shape, dtype, digest = EXPECTED[prefix]["tensors"][name]
            assert (code, tuple(shape)) == (tensor.code, tensor.shape)
            assert dtype == str(tensor.array.dtype)
            assert digest == hashlib.sha256(tensor.array.tobytes()).hexdigest()


def test_the_values_are_those_that_were_saved(catalog):
    record = catalog.open("values")._found.record
    assert record.tree == record.custom == encode_value(make_golden.VALUES)
    back = encode_value(catalog.read("values"))
    assert back == record.tree


def test_each_ranks_own_values_are_those_that_were_saved(catalog):
    rng = catalog.read("ranks")["rng"]
    assert isinstance(rng, PerRank)
    assert [own["spare"] for own in rng.values] == [None, 0.5]
    saved = [tensor.array for tensor in make_golden.of_ranks().values()]
    np.testing.assert_array_equal([own["state"] for own in rng.values], saved)


def test_model_files_hold_nothing_but_the_model_and_are_found_by_their_index(catalog):
    folder = pathlib.Path(catalog.storage.url.removeprefix("file://")) / "consolidated"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("model-*.safetensors"))
    assert {*index["weight_map"].values()} == {file.name for file in files}
    found = {}
    for file in files:
        with safetensors.safe_open(file, "np") as shard:
            assert shard.metadata()["format"] == "pt"
            found |= dict.fromkeys(shard.keys(), file.name)
    assert found == index["weight_map"]
    assert found.keys() == {"embed.weight", "x[0:2][0:2]", "head.weight"}
    assert index["metadata"]["total_size"] == 56


def test_they_hold_every_dtype_of_the_format():
    stored = {code for code, *_ in EXPECTED["plain"]["tensors"].values()}
    assert stored == set(DTYPES)


def test_a_tombstone_is_no_checkpoint(catalog):
    with pytest.raises(CheckpointNotFoundError):
        catalog.read("tombstone")
    data = catalog.storage.read("tombstone/metadata.json")
    assert decode_record(data, path="x").state == "tombstone"


def test_a_checkpoint_that_refers_to_another_reads_its_files(catalog):
    found = catalog.read("reference")
    np.testing.assert_array_equal(found["some F32"], make_golden.plain()["some F32"].array)
    assert catalog.verify("reference").files == 1


def test_todays_writer_makes_the_same_bytes():
    storage = MemoryStorage()
    make_golden.make(storage)
    made = {info.key: storage.read(info.key) for info in storage.list()}
    golden = {
        path.relative_to(FOLDER).as_posix(): path.read_bytes()
        for path in FOLDER.rglob("*")
        if path.is_file() and path.name != "expected.json"
    }
    assert made.keys() == golden.keys()
    for key, data in made.items():
        if not key.startswith("compressed/"):
            assert data == golden[key], key
    fresh = make_golden.expected(Catalog(storage))
    for prefix, found in json.loads(json.dumps(fresh)).items():
        assert found["tensors"] == EXPECTED[prefix]["tensors"]


@pytest.mark.parametrize("path", SHARDS, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_the_safetensors_library_opens_every_shard(path):
    with safetensors.safe_open(path, "np") as shard:
        names = set(shard.keys())
    assert ("__holdfast_chunks__" in names) is not path.name.startswith("model-")
    assert names - {"__holdfast_chunks__"}


def test_the_safetensors_library_reads_plain_tensors_as_they_were(tmp_path):
    storage = LocalStorage(tmp_path)
    tensors = {
        name: tensor
        for name, tensor in make_golden.plain().items()
        if tensor.code in {"F32", "F64", "I64", "U8", "BOOL", "F16"} and "[" not in name
    }
    record = make_golden.commit(storage, 1, "plain", tensors)
    found = load_file(tmp_path / "plain" / record.files[0].name)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.array)


def test_they_are_small_and_never_made_again():
    total = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert total < 400 * 1024
    done = subprocess.run(
        [sys.executable, make_golden.__file__, FOLDER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "never made again" in done.stderr
