"""``holdfast.save`` and ``holdfast.load``: any state in one line, with torch and without."""

import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast._shortcuts import split_path
from holdfast.catalog import Catalog
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.distributed._shortcuts import save_tree
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ValidationError,
)


def made(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(net.parameters(), lr=seed)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def same_state(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# ---------------------------------------------------------------- kinds of state


def test_a_tensor(tmp_path):
    tensor = torch.rand(3, 4)
    assert holdfast.save(tensor, tmp_path / "t") == "t"
    found = holdfast.load(tmp_path / "t")
    assert torch.equal(found, tensor)
    into = torch.zeros(3, 4)
    assert holdfast.load(tmp_path / "t", into) is into
    assert torch.equal(into, tensor)


def test_a_module(tmp_path):
    net, _ = made(1)
    holdfast.save(net, tmp_path / "m")
    same_state(holdfast.load(tmp_path / "m"), net.state_dict())
    other, _ = made(2)
    weight = other[0].weight
    assert holdfast.load(tmp_path / "m", into=other) is other
    same_state(other.state_dict(), net.state_dict())
    assert other[0].weight is weight


def test_a_training(tmp_path):
    net, optimizer = made(1)
    state = {"net": net, "opt": optimizer, "step": 5, "rates": [0.1, 0.2]}
    holdfast.save(state, tmp_path / "run/step_5")
    other, loaded = made(2)
    into = {"net": other, "opt": loaded, "step": 0, "rates": None}
    assert holdfast.load(tmp_path / "run/step_5", into) is into
    same_state(other.state_dict(), net.state_dict())
    assert loaded.param_groups[0]["lr"] == 1
    moment = loaded.state[other[0].weight]["exp_avg"]
    assert torch.equal(moment, optimizer.state[net[0].weight]["exp_avg"])
    assert (into["step"], into["rates"]) == (5, [0.1, 0.2])


def test_nested_lists_tuples_and_plain_values(tmp_path):
    state = [1, (torch.ones(2), "text"), {"deep": [torch.zeros(1), None]}]
    holdfast.save(state, tmp_path / "n")
    found = holdfast.load(tmp_path / "n")
    assert type(found[1]) is tuple
    assert repr(found) == repr(state)
    into = [0, (torch.zeros(2), "text"), {"deep": [torch.ones(1), 7]}]
    holdfast.load(tmp_path / "n", into)
    assert repr(into) == repr(state)


@pytest.mark.parametrize("state", [7, "text", None, [], {}, 2.5, (1, [2])])
def test_plain_values_alone(tmp_path, state):
    holdfast.save(state, tmp_path / "p")
    found = holdfast.load(tmp_path / "p")
    assert type(found) is type(state)
    assert found == state


def test_a_state_keeps_its_own_keys_whatever_they_are_called(tmp_path):
    state = {"model": torch.ones(1), "rng": 4, "optimizer": [1], "extra": {"x": 2}}
    holdfast.save(state, tmp_path / "k")
    assert repr(holdfast.load(tmp_path / "k")) == repr(state)
    into = {"model": torch.zeros(1), "rng": 0, "optimizer": None, "extra": None}
    holdfast.load(tmp_path / "k", into)
    assert repr(into) == repr(state)


def test_an_array_of_numpy(tmp_path):
    array = np.random.default_rng(0).random((30, 40))
    holdfast.save({"a": array}, tmp_path / "a")
    np.testing.assert_array_equal(holdfast.load(tmp_path / "a")["a"], array)
    into = {"a": np.zeros((30, 40))}
    kept = into["a"]
    holdfast.load(tmp_path / "a", into)
    assert into["a"] is kept
    np.testing.assert_array_equal(kept, array)


# ---------------------------------------------------------------------- options


def test_options_are_those_of_the_checkpointer(tmp_path):
    holdfast.save({"w": torch.ones(9)}, tmp_path / "o", step=3, metrics={"loss": 0.5})
    info = Catalog(tmp_path).info("o")
    assert (info.step, info.metrics) == (3, {"loss": 0.5})
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        holdfast.save({"w": torch.zeros(9)}, tmp_path / "o")
    holdfast.save({"w": torch.zeros(9)}, tmp_path / "o", overwrite=True)
    assert holdfast.load(tmp_path / "o")["w"].tolist() == [0] * 9
    with pytest.raises(TypeError, match="takes the prefix from path"):
        holdfast.save({}, tmp_path / "o", checkpoint_prefix="p")
    with pytest.raises(TypeError, match="takes the prefix from path"):
        holdfast.load(tmp_path / "o", checkpoint_prefix="p")
    with pytest.raises(TypeError, match="compresion"):
        holdfast.save({}, tmp_path / "q", compresion="fast")


def test_only_what_is_included_is_read(tmp_path):
    holdfast.save({"a": {"x": torch.ones(1), "y": torch.ones(2)}, "n": 3}, tmp_path / "i")
    into = {"a": {"x": torch.zeros(1), "y": torch.zeros(2)}, "n": 0}
    holdfast.load(tmp_path / "i", into, include=["a.x"])
    assert (into["a"]["x"].item(), into["a"]["y"].sum().item(), into["n"]) == (1, 0, 0)
    found = holdfast.load(tmp_path / "i", as_numpy=True, include=["a.*"])
    assert {name for name in found["a"] if isinstance(found["a"][name], np.ndarray)} == {"x", "y"}
    with pytest.raises(ValidationError, match=r"nothing .* fits 'b\.\*'"):
        holdfast.load(tmp_path / "i", into, include=["a.x", "b.*"])


def test_without_into_what_is_not_included_is_not_there(tmp_path):
    """As with ``as_numpy``: a reference to what was not read would be of no use to anybody."""
    holdfast.save({"a": torch.ones(1), "b": torch.ones(1), "n": 3}, tmp_path / "i")
    with_torch = holdfast.load(tmp_path / "i", include=["a"])
    without = holdfast.load(tmp_path / "i", as_numpy=True, include=["a"])
    assert with_torch["a"].tolist() == without["a"].tolist() == [1]
    assert with_torch.keys() == without.keys()
    assert type(with_torch.get("b")) is type(without.get("b"))


def test_random_generators_only_on_request(tmp_path):
    holdfast.save({"x": 1}, tmp_path / "without")
    holdfast.save({"x": 1}, tmp_path / "with", include_rng_state=True)
    expected = random.random(), torch.rand(1).item(), np.random.rand()  # noqa: NPY002
    holdfast.load(tmp_path / "without", {"x": 0})
    assert random.random() != expected[0]
    holdfast.load(tmp_path / "with", {"x": 0}, load_rng_state=False)
    assert random.random() != expected[0]
    holdfast.load(tmp_path / "with", {"x": 0})
    assert (random.random(), torch.rand(1).item(), np.random.rand()) == expected  # noqa: NPY002
    with pytest.raises(ValueError, match="a dict without a key 'rng'"):
        holdfast.save(torch.ones(1), tmp_path / "t", include_rng_state=True)


def test_new_tensors_are_made_on_the_device_that_is_asked_for(tmp_path):
    holdfast.save({"w": torch.ones(2), "n": [torch.ones(1)]}, tmp_path / "d")
    for device in ("cpu", torch.device("cpu")):
        assert holdfast.load(tmp_path / "d", map_location=device)["w"].device.type == "cpu"
    found = holdfast.load(tmp_path / "d", map_location="meta")
    assert found["w"].is_meta
    assert found["n"][0].is_meta


def test_a_meta_model_becomes_real_where_map_location_says(tmp_path):
    net, _ = made(1)
    holdfast.save(net, tmp_path / "m")
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    holdfast.load(tmp_path / "m", other, map_location="cpu")
    same_state(other.state_dict(), net.state_dict())


def test_for_hugging_face(tmp_path):
    net, optimizer = made(1)
    holdfast.save(net, tmp_path / "alone", format="consolidated")
    holdfast.save({"model": net, "o": optimizer}, tmp_path / "both", format="consolidated")
    for name in ("alone", "both"):
        (file,) = (tmp_path / name).glob("model*.safetensors")
        same_state(load_file(file), net.state_dict())
    other, _ = made(2)
    same_state(holdfast.load(tmp_path / "alone", other).state_dict(), net.state_dict())
    with pytest.raises(ValueError, match="one model: give the model itself"):
        holdfast.save({"net": net}, tmp_path / "no", format="consolidated")


# ------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "root", "prefix"),
    [
        ("runs/a/step_1", "runs/a", "step_1"),
        ("step_1", ".", "step_1"),
        ("/tmp/runs/step_1/", "/tmp/runs", "step_1"),
        (Path("/tmp/runs/step_1"), "/tmp/runs", "step_1"),
        ("s3://bucket/run/step_1", "s3://bucket/run", "step_1"),
        ("s3://bucket/step_1", "s3://bucket", "step_1"),
        ("file:///tmp/step_1", "file:///tmp", "step_1"),
        ("memory://x/step_1", "memory://x", "step_1"),
    ],
)
def test_a_path_is_a_root_and_a_prefix(path, root, prefix):
    assert split_path(path) == (root, prefix)


@pytest.mark.parametrize("path", ["", "/", "s3://bucket", "/step", b"runs/a", "s3://", "file:///"])
def test_a_path_without_a_root_or_a_prefix_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path must be"):
        holdfast.save({}, path)
    with pytest.raises(ValueError, match="path must be"):
        holdfast.load(path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("form", [str, Path, "file://{}".format, "{}/".format])
def test_every_form_of_a_path_leads_to_the_same(tmp_path, form):
    holdfast.save({"x": 1}, form(tmp_path / "runs" / "a"))
    assert (tmp_path / "runs" / "a" / "metadata.json").exists()
    assert holdfast.load(form(tmp_path / "runs" / "a")) == {"x": 1}


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    holdfast.save({"x": 1}, "a")
    holdfast.save({"x": 2}, "runs/b")
    assert holdfast.load("./a") == {"x": 1}
    assert holdfast.load(tmp_path / "runs" / "b") == {"x": 2}


def test_what_is_not_there(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="none"):
        holdfast.load(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match="none"):
        holdfast.load(tmp_path / "none", as_numpy=True)
    assert not (tmp_path / "none").exists()


def test_a_store_is_no_checkpoint(tmp_path):
    holdfast.save({"x": 1}, tmp_path / "runs/a/step_1")
    for how in ({}, {"as_numpy": True}):
        with pytest.raises(CheckpointNotFoundError, match="if this is a store, name one that is"):
            holdfast.load(tmp_path / "runs/a", **how)


# --------------------------------------------------------- and the checkpointer


def test_a_checkpoint_of_the_checkpointer_and_the_other_way(tmp_path):
    net, optimizer = made(1)
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path)) as ckpt:
        ckpt.save(net, optimizer, SaveOptions(checkpoint_prefix="a"), extra={"step": 4})
        found = holdfast.load(tmp_path / "a")
        same_state(found["model"], net.state_dict())
        assert found["extra"] == {"step": 4}
        assert found["optimizer"]["param_groups"][0]["lr"] == 1
        names = found["optimizer"]["param_groups"][0]["params"]
        assert names == [name for name, _ in net.named_parameters()]

        other, loaded = made(2)
        holdfast.load(tmp_path / "a", {"model": other, "optimizer": loaded})
        same_state(other.state_dict(), net.state_dict())

        holdfast.save({"model": net, "optimizer": optimizer}, tmp_path / "b")
        third, again = made(3)
        ckpt.load(third, again, LoadOptions(checkpoint_prefix="b"))
        same_state(third.state_dict(), net.state_dict())
        assert again.param_groups[0]["lr"] == 1


def test_a_load_that_fails_changes_nothing(tmp_path):
    net, _ = made(1)
    holdfast.save({"net": net, "n": 1}, tmp_path / "a")
    other, _ = made(2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    into = {"net": other, "n": 0, "more": torch.ones(1)}
    with pytest.raises(ValidationError, match="more"):
        holdfast.load(tmp_path / "a", into)
    same_state(other.state_dict(), before)
    assert into["n"] == 0
    with pytest.raises(CheckpointError):
        holdfast.load(tmp_path / "a", torch.zeros(1))


# ----------------------------------------------------------------- without torch

WITHOUT_TORCH = """
    import sys

    class NoTorch:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "torch":
                raise ImportError("there is no torch here")

    sys.meta_path.insert(0, NoTorch())
    import holdfast

    state = holdfast.load(sys.argv[1], as_numpy=True)
    assert type(state["w"]).__name__ == "ndarray" and state["w"].tolist() == [0, 1, 2], state
    assert state["net"]["0.weight"].shape == (4, 3)
    assert state["half"].dtype.name == "bfloat16", state["half"].dtype
    assert state["n"] == [1, (2,)]
    try:
        holdfast.load(sys.argv[1])
    except ImportError as error:
        print(error)
    assert "torch" not in sys.modules
"""


def test_reading_as_numpy_needs_no_torch(tmp_path):
    net, _ = made(1)
    state = {"w": torch.arange(3.0), "net": net, "half": torch.ones(2).bfloat16(), "n": [1, (2,)]}
    holdfast.save(state, tmp_path / "a")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TORCH), str(tmp_path / "a")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout


@pytest.mark.parametrize("option", [{"into": {}}, {"map_location": "cpu"}, {"strict": False}])
def test_as_numpy_refuses_what_it_would_not_read(tmp_path, option):
    holdfast.save({"x": 1}, tmp_path / "a")
    with pytest.raises(ValueError, match="as_numpy goes with no other option than include"):
        holdfast.load(tmp_path / "a", as_numpy=True, **option)


def nested(root, folder="run/"):
    """A store with a folder of checkpoints, one of which needs files of another."""
    state = {"a": torch.arange(65536.0)}
    with DistributedCheckpoint(storage=root) as ckpt:
        for name in ("one", "two"):
            prefix = f"{folder}{name}"
            options = SaveOptions(
                checkpoint_prefix=prefix, incremental=True, include_rng_state=False
            )
            save_tree(ckpt, state, options)
    assert not list((root / folder / "two").glob("shard*"))
    return state


@pytest.mark.parametrize("as_numpy", [False, True])
def test_a_checkpoint_is_loaded_by_its_path_wherever_its_store_begins(tmp_path, as_numpy):
    state = nested(tmp_path / "store")
    nested(tmp_path / "other", folder="")
    for name in ("one", "two"):  # without the lock file, so that nothing says where a store begins
        shutil.copytree(tmp_path / "other" / name, tmp_path / "store" / "copied" / name)
    for name in ("run/one", "run/two", "copied/one", "copied/two"):
        found = holdfast.load(tmp_path / "store" / name, as_numpy=as_numpy)["a"]
        assert np.array_equal(found, state["a"]), name


def test_what_is_missing_is_told_by_the_path_that_was_given(tmp_path):
    nested(tmp_path)
    for path in (tmp_path / "run" / "one").glob("shard*"):
        path.unlink()
    with pytest.raises(ValidationError, match=r"run/one/shard-0-[^ ]*: this file of the check"):
        holdfast.load(tmp_path / "run" / "two")
