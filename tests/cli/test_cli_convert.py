"""convert where no torch is: safetensors, Hugging Face and holdfast, in processes that cannot
import it. Names, refusals, targets that are taken, what an interrupted one leaves."""

import functools
import os
import urllib.request

import ml_dtypes
import numpy as np
import pytest
from cli_tools import holdfast
from convert_tools import done, refused
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from holdfast.catalog import Catalog

STATE = {
    "model": {
        "weight": np.random.default_rng(0).normal(size=(300, 500)).astype(np.float32),
        "half": np.arange(7).astype(ml_dtypes.bfloat16),
        "small": np.linspace(-3, 3, 9).astype(ml_dtypes.float8_e4m3fn),
        "mask": np.array([True, False]),
        "single": np.array(3.5),
        "none": np.zeros((0, 3), np.int64),
        "large": np.arange(2_000_000, dtype=np.int32).reshape(2, 1_000_000),
    },
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One checkpoint, of tensors only."""
    root = tmp_path_factory.mktemp("convert") / "a"
    Catalog(root).write("step_1", STATE, step=1, metrics={"loss": 0.5}, custom={"git": "abc"})
    return root


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def test_there_and_back_every_bit_is_the_same(store, tmp_path):
    one = tmp_path / "one.safetensors"
    ran = done("convert", store, one, run=holdfast)
    assert ran.out == f"{one}: a safetensors file, 7 tensors, 8.2 MiB\n"
    named = {f"model.{name}": array for name, array in STATE["model"].items()}
    with safe_open(one, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert {*file.keys()} == {*named}
        plain = {name: each for name, each in named.items() if name != "model.small"}
        same({name: file.get_tensor(name) for name in plain}, plain)
    done("convert", one, tmp_path / "b" / "back", run=holdfast)
    same(Catalog(tmp_path / "b").read("back"), named)
    assert Catalog(tmp_path / "b").verify("back").is_intact
    done("convert", store, f"file://{tmp_path}/b/copy", "--compression", "fast", run=holdfast)
    opened = Catalog(tmp_path / "b").open("copy")
    same(opened.read_tree()["model"], STATE["model"])
    assert (opened.info.step, opened.info.metrics, opened.custom) == (
        *(1, {"loss": 0.5}, {"git": "abc"}),
    )


def test_a_hugging_face_folder_of_several_files(store, tmp_path):
    folder = tmp_path / "model"
    told = done(
        *("convert", store, folder, "--to", "huggingface", "--file-size", "1MB"),
        *("--strip-prefix", "model."),
        run=holdfast,
    )
    assert told.out.startswith(f"{folder}: a Hugging Face folder, 7 tensors")
    files = sorted(each.name for each in folder.iterdir())
    assert files == [
        *(f"model-{nth:05}-of-00002.safetensors" for nth in (1, 2)),
        "model.safetensors.index.json",
    ]
    done("convert", folder, tmp_path / "b" / "x", "--prefix", "model", run=holdfast)
    same(Catalog(tmp_path / "b").read("x")["model"], STATE["model"])
    (folder / files[0]).unlink()
    refused(
        *("convert", folder, tmp_path / "b" / "y"),
        code=4,
        saying=["which is not there", files[0]],
        run=holdfast,
    )
    (folder / files[2]).write_text('{"weight_map": {"a": "../one.safetensors"}}')
    refused("convert", folder, tmp_path / "y", code=4, saying="elsewhere", run=holdfast)
    (folder / files[2]).write_text("[")
    refused("convert", folder, tmp_path / "y", code=4, saying="no index", run=holdfast)
    assert not (tmp_path / "y").exists()


def test_a_model_of_one_file_has_no_index(tmp_path):
    save_file({"w": np.arange(3)}, tmp_path / "w.safetensors")
    one = tmp_path / "one"
    done("convert", tmp_path / "w.safetensors", one, "--to", "huggingface", run=holdfast)
    assert [each.name for each in one.iterdir()] == ["model.safetensors"]
    done("convert", one, tmp_path / "back.safetensors", run=holdfast)
    assert load_file(tmp_path / "back.safetensors")["w"].tolist() == [0, 1, 2]


def test_what_a_format_cannot_hold_is_listed_and_left_out_only_if_told(tmp_path):
    state = {"w": np.arange(3), "wide": np.ones(2, np.complex128), "opt": [{"lr": 0.1}, None]}
    Catalog(tmp_path / "a").write("x", state)
    target = tmp_path / "x.safetensors"
    words = ["wide (a tensor of complex128)", "opt.0.lr (float)", "opt.1 (NoneType)", "nothing was"]
    refused("convert", tmp_path / "a", target, code=2, saying=words, run=holdfast)
    refused(
        *("convert", tmp_path / "a", target, "--tensors-only"),
        code=2,
        saying="cannot hold wide (a tensor of complex128); nothing was written",
        run=holdfast,
    )
    assert not target.exists()
    picked = ("--select", "w", "--select", "opt.*", "--tensors-only")
    done("convert", tmp_path / "a", target, *picked, run=holdfast)
    assert [*load_file(target)] == ["w"]
    done("convert", tmp_path / "a", tmp_path / "b" / "x", run=holdfast)
    same_state = Catalog(tmp_path / "b").read("x")
    assert same_state["opt"] == [{"lr": 0.1}, None]
    assert same_state["wide"].dtype == np.complex128


def test_names_that_cannot_be(tmp_path):
    Catalog(tmp_path / "a").write("x", {"a": {"b": np.ones(1)}, "a.b": np.zeros(1), "c": 1})
    run = {"run": holdfast}
    target = tmp_path / "x.safetensors"
    line = ("convert", tmp_path / "a", target, "--tensors-only")
    refused(*line, code=2, saying="two tensors are called 'a.b'", **run)
    refused(*line, "--select", "nope*", code=3, saying="no tensor fits 'nope*'", **run)
    refused(*line, "--select", "c", code=3, saying="no tensors in what is to be", **run)
    refused(*line, "--strip-prefix", "x.", code=2, saying="a.b, a.b do not begin so", **run)
    refused(*line, "--strip-prefix", "a.b", code=2, saying="leave 'b' without a name", **run)
    refused(*line, "--file-size", "many", code=2, saying="must be a size", **run)
    assert not target.exists()


def test_a_flipped_bit_of_a_checkpoint_is_found_on_the_way(store, tmp_path):
    done("convert", store, tmp_path / "own" / "x", run=holdfast)
    (shard,) = (tmp_path / "own" / "x").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[data.index(STATE["model"]["large"][:1, 5000:5100].tobytes())] ^= 1
    shard.write_bytes(data)
    for target in ("x.safetensors", "hf", "again/x"):
        to = ("--to", "huggingface") if target == "hf" else ()
        refused(
            *("convert", tmp_path / "own", tmp_path / target, *to),
            code=4,
            saying=["tensor 'model.large' is damaged", shard.name],
            run=holdfast,
        )
    assert left_in(tmp_path) == {"own", "again"}
    refused("ls", tmp_path / "again", code=3, saying="no checkpoints", run=holdfast)


def left_in(folder):
    return {each.name for each in folder.iterdir()}


def test_paths_and_files_that_are_nothing(store, tmp_path):
    run = {"run": holdfast}
    target = tmp_path / "new.safetensors"
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.pt").write_bytes(b"")
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    (tmp_path / "c.txt").write_text("some words")
    cut = tmp_path / "cut.safetensors"
    save_file({"w": np.arange(1000)}, cut)
    os.truncate(cut, cut.stat().st_size - 8)
    (shard,) = (store / "step_1").glob("*.safetensors")
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(shard.read_bytes())
    refused("convert", tmp_path / "no.pt", target, code=3, saying="no such file or folder", **run)
    refused("convert", tmp_path / "a.pt", target, code=4, saying="not a torch.save file", **run)
    refused("convert", tmp_path / "b.safetensors", target, code=4, saying="cut short", **run)
    refused("convert", tmp_path / "c.txt", target, code=4, saying="no format that is", **run)
    refused("convert", tmp_path / "empty", target, code=3, saying="no format that is", **run)
    Catalog(tmp_path / "z").write("x", {"w": np.zeros(100_000)}, compression="fast")
    (packed,) = (tmp_path / "z/x").glob("*.safetensors")
    packed.rename(tmp_path / "packed.safetensors")
    part = tmp_path / "packed.safetensors"
    refused("convert", part, target, code=2, saying="give the checkpoint", **run)
    refused("convert", cut, target, code=4, saying="but the file has", **run)
    refused("convert", store, "s3://b/x.pt", "--to", "torch", code=2, saying="to a disk", **run)
    refused("convert", store, "ftp://b/x", code=2, saying="no storage is known", **run)
    refused("convert", store, "s3://bucket", code=2, saying="names no checkpoint", **run)
    refused("convert", store, tmp_path / "no" / "x.safetensors", code=3, saying="folder", **run)
    refused("convert", store, target, "--to", "zip", code=2, saying="'zip' is not one of", **run)
    for name in ("x.pt", "folder"):
        to = ("--to", "dcp") if name == "folder" else ()
        line = ("convert", store, tmp_path / name, *to)
        refused(*line, code=2, saying='needs torch: pip install "holdfast[torch]"', **run)
    assert not target.exists()
    done("convert", alone, target, **run)  # a file of a checkpoint is a safetensors file, too


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.pt")
    refused("convert", tmp_path / "a.pt", tmp_path / "b", code=2, saying="neither a file nor")


def test_a_target_that_is_taken_stays_unless_it_is_told(store, tmp_path):
    run = {"run": holdfast}
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"mine")
    refused("convert", store, file, code=5, saying="there already", **run)
    assert file.read_bytes() == b"mine"
    done("convert", store, file, "--overwrite", **run)
    assert len(load_keys(file)) == 7
    folder = tmp_path / "hf"
    line = ("convert", file, folder, "--to", "huggingface")
    done(*line, **run)
    refused(*line, code=5, saying="there already", **run)
    done(*line, "--overwrite", "--file-size", "2MB", **run)
    assert len([*folder.glob("*.safetensors")]) > 1
    (folder / "config.json").write_text("{}")
    refused(*line, "--overwrite", code=5, saying="it has config.json, too", **run)
    assert len(left_in(folder)) > 3
    refused("convert", file, tmp_path / "hf", "--to", "safetensors", "--overwrite",
            code=5, saying="there is a folder of this name", **run)  # fmt: skip
    done("convert", file, tmp_path / "b" / "x", **run)
    refused("convert", file, tmp_path / "b" / "x", code=5, saying="give --overwrite", **run)
    done("convert", file, tmp_path / "b" / "x", "--overwrite", "--select", "*.half", **run)
    assert [*Catalog(tmp_path / "b").open("x").tensors] == ["model.half"]
    assert left_in(tmp_path) == {"x.safetensors", "hf", "b"}


def load_keys(file):
    with safe_open(file, "np") as opened:
        return [*opened.keys()]


def test_a_source_is_never_its_own_target(store, tmp_path):
    run = {"run": holdfast}
    file = tmp_path / "x.safetensors"
    done("convert", store, file, **run)
    (tmp_path / "link.safetensors").hardlink_to(file)
    before = file.read_bytes()
    for target in (file, tmp_path / "link.safetensors", tmp_path / "." / "x.safetensors"):
        refused("convert", file, target, "--overwrite", code=2, saying="another target", **run)
    line = ("convert", store, store / "step_1", "--overwrite")
    refused(*line, code=2, saying="the checkpoint that is read", **run)
    refused(*line, "--to", "huggingface", code=5, saying="it has metadata.json", **run)
    inside = store / "step_1" / "x.safetensors"
    refused("convert", store, inside, code=2, saying="or lies in it", **run)
    assert file.read_bytes() == before
    assert Catalog(store).verify("step_1").is_intact


def test_to_an_object_store_and_from_it(store, tmp_path):
    from _servers import moto_server

    with moto_server(tmp_path / "log") as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        env = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "word",
            "AWS_REGION": "us-east-1",
        }
        run = functools.partial(holdfast, env=env)
        done("convert", store, "s3://bucket/run/step_1", run=run)
        line = ("convert", store, "s3://bucket/run//step_1")
        refused(*line, code=5, saying="there already", run=run)
        done("reshard", "s3://bucket/run", "s3://bucket/run//far/step_2", "--ranks", "2", run=run)
        done("convert", "s3://bucket/run/far/step_2", tmp_path / "x.safetensors", run=run)
    done("convert", store, tmp_path / "y.safetensors", run=holdfast)
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
