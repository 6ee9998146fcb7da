"""reshard: the same checkpoint as the files of another number of ranks."""

import shutil
import signal

import ml_dtypes
import numpy as np
import pytest
from cli_tools import holdfast
from convert_tools import MIB, done, left_by_ctrl_c, refused, with_torch

from holdfast.catalog import Catalog
from holdfast.format import PerRank

STATE = {
    "model": {
        "weight": np.random.default_rng(0).normal(size=(3000, 500)).astype(np.float32),
        "cube": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
        "half": np.arange(700_001).astype(ml_dtypes.bfloat16),
        "single": np.array(3.5),
        "none": np.zeros((0, 3), np.int64),
    },
    "layers": [np.full((40, 100), nth, np.float32) for nth in range(20)],
    "rng": PerRank(({"seed": 1}, {"seed": 2})),
    "epoch": 7,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("reshard") / "a"
    Catalog(root).write("step_7", STATE, step=7, metrics={"loss": 0.5}, custom={"git": "abc"})
    return root


def same(found, expected):
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert [*found] == [*expected]
        for key, each in expected.items():
            same(found[key], each)
    elif isinstance(expected, list):
        for mine, other in zip(found, expected, strict=True):
            same(mine, other)
    else:
        assert found == expected


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_all_that_it_has_is_the_same_in_other_files(store, tmp_path, ranks, axis):
    along = () if axis is None else ("--axis", axis)
    done("reshard", store, tmp_path / "b" / "x", "--ranks", ranks, *along, run=holdfast)
    catalog = Catalog(tmp_path / "b")
    opened = catalog.open("x")
    same(opened.read_tree(), STATE)
    info = opened.info
    assert (info.step, info.metrics, opened.custom) == (7, {"loss": 0.5}, {"git": "abc"})
    assert info.world_size == ranks
    assert catalog.verify("x").is_intact
    sizes = [file.size_bytes for file in opened.found.record.files]
    assert len(sizes) == ranks
    if axis is None:  # none has more than the mean and one piece, and its header
        weight = STATE["model"]["weight"].nbytes
        assert max(sizes) < sum(sizes) / ranks + weight / ranks + 16 * 1024
    assert holdfast("diff", tmp_path / "b" / "x", store).code == 0


def test_many_files_become_one_and_compressed_ones_are_read(store, tmp_path):
    packed = tmp_path / "b" / "packed"
    line = ("reshard", store, packed, "--ranks", 6, "--axis", 0, "--compression", "fast")
    done(*line, run=holdfast)
    assert Catalog(tmp_path / "b").info("packed").size_bytes < Catalog(store).list()[0].size_bytes
    told = done("reshard", packed, tmp_path / "b" / "one", "--ranks", 1, run=holdfast)
    assert told.out.endswith("/b/one: 25 tensors, 7.4 MiB, 1 file\n")
    same(Catalog(tmp_path / "b").read("one"), STATE)


def test_it_needs_no_file_of_another(tmp_path):
    holdfast_save(tmp_path / "a")
    catalog = Catalog(tmp_path / "a")
    assert any(file.prefix for file in catalog.find("second").record.files)
    done("reshard", tmp_path / "a" / "second", tmp_path / "b" / "x", "--ranks", 2, run=holdfast)
    shutil.rmtree(tmp_path / "a")
    assert Catalog(tmp_path / "b").read("x")["model"]["w"].tolist() == [*range(100_000)]


def holdfast_save(root):
    """Two checkpoints, of which the second refers to the first."""
    import torch

    from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, SaveOptions

    with DistributedCheckpoint.create(options=CheckpointOptions(storage=root)) as checkpoint:
        for name in ("first", "second"):
            state = {"w": torch.arange(100_000), "b": torch.ones(3) * len(name)}
            options = SaveOptions(checkpoint_prefix=name, incremental=True, include_rng_state=False)
            checkpoint.save_model_only(state, options)


def test_a_flipped_bit_is_found_and_nothing_is_committed(store, tmp_path):
    done("reshard", store, tmp_path / "own" / "x", "--ranks", 3, run=holdfast)
    shard = next((tmp_path / "own" / "x").glob("shard-1-*"))
    data = bytearray(shard.read_bytes())
    data[100_000] ^= 1
    shard.write_bytes(data)
    line = ("reshard", tmp_path / "own", tmp_path / "b" / "x", "--ranks", 2)
    refused(*line, code=4, saying=["is damaged", shard.name], run=holdfast)
    assert [each.name for each in (tmp_path / "b").rglob("*") if each.is_file()] == [
        ".holdfast.lock"
    ]


def test_lines_that_cannot_be_meant(store, tmp_path):
    run = {"run": holdfast}
    target = tmp_path / "b" / "x"
    refused("reshard", store, target, code=2, saying="--ranks", **run)
    refused("reshard", store, target, "--ranks", 0, code=2, saying="--ranks must be 1", **run)
    refused("reshard", store, target, "--ranks", "two", code=2, saying="'--ranks'", **run)
    refused("reshard", store, target, "--ranks", 2, "--axis", -1, code=2, saying="--axis", **run)
    refused("reshard", store, target, "--ranks", 2, "--axis", 7, code=2, saying="--axis 7", **run)
    refused("reshard", tmp_path, target, "--ranks", 2, code=3, saying="no checkpoints", **run)
    refused("reshard", tmp_path / "no", target, "--ranks", 2, code=3, saying="no such", **run)
    own = ("reshard", store, store / "step_7", "--ranks", 2, "--overwrite")
    refused(*own, code=2, saying="the checkpoint that is read", **run)
    done("reshard", store, target, "--ranks", 2, **run)
    refused("reshard", store, target, "--ranks", 3, code=5, saying="there already", **run)
    done("reshard", store, target, "--ranks", 3, "--overwrite", **run)
    assert Catalog(tmp_path / "b").info("x").world_size == 3
    assert len([*target.glob("*.safetensors")]) == 3
    assert Catalog(store).verify("step_7").is_intact


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_one_that_is_cut_off_is_no_checkpoint(tmp_path, sign):
    Catalog(tmp_path / "a").write("x", {"w": np.zeros(256 * MIB, np.uint8)})
    for nth in range(20):
        root = tmp_path / f"b{nth}"
        ran = with_torch(
            *("reshard", tmp_path / "a", root / "x", "--ranks", 8),
            watch=lambda root=root: any(root.glob("x/shard-*")),
            sign=sign,
        )
        if ran.code and not (root / "x" / "metadata.json").exists():
            break
    if sign is signal.SIGINT:
        assert (ran.code, ran.err) == (130, "holdfast: interrupted\n")
        assert left_by_ctrl_c(root, 8) == []
    else:
        assert ran.code == -signal.SIGKILL
    assert Catalog(root).list() == []
    done("reshard", tmp_path / "a", root / "x", "--ranks", 2)
    assert Catalog(root).verify("x").is_intact
    shutil.rmtree(tmp_path)
