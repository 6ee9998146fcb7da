"""ls, show, cat and diff on real stores, through real processes."""

import math
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cli_tools import WITHOUT_TORCH, holdfast

import holdfast as library
from holdfast.catalog import Catalog
from holdfast.cli._glance import glance


def test_the_installed_script_answers_and_knows_every_verb():
    script = Path(sysconfig.get_path("scripts"), "holdfast")
    ran = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    for verb in ("ls", "show", "verify", "diff", "cat", "rm", "prune", "gc", "doctor"):
        assert f"\n  {verb} " in ran.stdout
    version = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"holdfast {library.__version__}\n"


def test_help_loads_neither_numpy_nor_a_storage():
    code = WITHOUT_TORCH.replace("main()", "sys.argv = ['holdfast', '--help']\n")
    code += "try:\n    main()\nfinally:\n    print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "typer" in ran.stdout.split()
    assert not set(ran.stdout.split()) & {"numpy", "obstore", "msgspec", "rich", "holdfast.catalog"}


def test_ls_lists_the_newest_first_aligned_and_plain(store):
    ran = holdfast("ls", store)
    assert ran.code == 0
    head, *rows = ran.out.splitlines()
    assert head.split() == ["name", "step", "age", "size", "tensors", "ranks", "metrics", "format"]
    assert [row.split()[0] for row in rows] == ["step_300", "step_200", "step_100"]
    assert "loss=0.01 accuracy=0.1" in rows[2]
    assert "\x1b" not in ran.out
    only = holdfast("ls", store, "--limit", "1", "--json").json
    assert [each["name"] for each in only["checkpoints"]] == ["step_300"]
    assert only["checkpoints"][0] | {"created": "", "size_bytes": 0} == {
        "name": "step_300",
        "step": 300,
        "created": "",
        "ordinal": 3,
        "size_bytes": 0,
        "tensors": 162,
        "world_size": 1,
        "format": "multi_shard",
        "format_version": "1",
        "metrics": {"loss": 1 / 300, "accuracy": 0.3},
    }
    assert only["unreadable"] == []


def test_show_folds_what_is_alike_and_says_where_it_comes_from(store):
    ran = holdfast("show", store / "step_100")
    assert ran.code == 0
    assert "metric loss      0.01" in ran.out
    assert "git: 'abc123'" in ran.out
    assert "epoch: 100" in ran.out
    assert "0 ... 0." not in ran.out
    assert "weight  F32 [300, 500]  585.9 KiB" in ran.out
    assert "0 ... 79.  80 x 2 tensors, F32, F64, 7.5 KiB" in ran.out
    assert "layers.7." not in ran.out


def test_a_store_stands_for_its_newest_and_a_path_into_a_checkpoint_for_that(store):
    assert holdfast("show", store, "--json").json["checkpoint"]["name"] == "step_300"
    (shard,) = (store / "step_200").glob("*.safetensors")
    document = holdfast("show", shard, "--json").json
    assert document["checkpoint"]["name"] == "step_200"
    assert document["checkpoint"]["values"]["epoch"] == 200
    assert document["checkpoint"]["custom"] == {"git": "abc123", "odd": "nan"}
    assert len(document["tensors"]) == 162
    inside = holdfast("show", "--tensors", "model.layers.7?.w", cwd=store / "step_100")
    assert [line.split()[0] for line in inside.out.splitlines()[1:]] == [
        f"model.layers.{nth}.w" for nth in range(70, 80)
    ]


def test_cat_shows_values_numbers_and_a_histogram(store, tmp_path):
    weight = Catalog(store).open("step_300").read("model.weight")
    ran = holdfast("cat", store, "model.weight", "--slice", "-2:,3", "--json").json
    assert ran["values"] == weight[-2:, 3].tolist()
    assert ran["shape"] == [2]
    npy = tmp_path / "weight.npy"
    whole = holdfast("cat", store, "model.weight", "--npy", npy)
    assert whole.code == 0
    np.testing.assert_array_equal(np.load(npy), weight)
    assert [*tmp_path.iterdir()] == [npy]
    told = dict(zip(*[iter(whole.out.splitlines()[-17].split())] * 2, strict=True))
    assert float(told["mean"]) == pytest.approx(weight.astype(float).mean(), rel=1e-5)
    assert float(told["std"]) == pytest.approx(weight.astype(float).std(), rel=1e-5)
    assert sum(int(line.split()[-1]) for line in whole.out.splitlines()[-16:]) == weight.size


def test_types_that_numpy_lacks_are_shown_and_written_exactly(tmp_path):
    values = np.array([1.5, np.nan, -np.inf, 0.0, -3.0], ml_dtypes.bfloat16)
    catalog = Catalog(tmp_path / "s")
    catalog.write("a", {"x": values, "c": np.array([3 + 4j]), "n": np.arange(3), "e": values[:0]})
    ran = holdfast("cat", tmp_path / "s/a", "x", "--npy", tmp_path / "x.npy", "--json").json
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), values.astype(np.float32))
    assert ran["values"] == [1.5, "nan", "-inf", 0.0, -3.0]
    assert ran["stats"] == {
        "elements": 5,
        "min": -3.0,
        "max": 1.5,
        "mean": -0.5,
        "std": pytest.approx(np.std([1.5, 0, -3])),
        "zeros": 1,
        "nan": 1,
        "infinite": 1,
    }
    assert holdfast("cat", tmp_path / "s", "c", "--json").json["stats"]["max"] == 5.0
    assert holdfast("cat", tmp_path / "s", "e").code == 0


def test_diff_finds_what_changed_and_proves_the_rest_by_digests(store):
    same = holdfast("diff", store / "step_100", store / "step_100")
    assert same.code == 0
    assert same.out.endswith("0 removed, 162 unchanged\n")
    ran = holdfast("diff", store / "step_100", store, "--json")
    assert ran.code == 1
    (changed,) = ran.json["changed"]
    assert changed["name"] == "model.weight"
    assert changed["max_abs"] == pytest.approx(200, abs=1e-3)
    assert ran.json["unchanged"] == 161
    assert ran.json["values"] == [{"name": "epoch", "a": 100, "b": 300}]
    text = holdfast("diff", store / "step_100", store)
    assert "changed model.weight F32 [300, 500] 150000 200" in " ".join(text.out.split())


def test_values_are_json_where_json_has_a_word_for_them(tmp_path):
    catalog = Catalog(tmp_path / "s")
    state = {"betas": (0.9, math.inf), "names": ["w", "b"], "raw": b"x", "only": None}
    catalog.write("a", state)
    catalog.write("b", {**{key: state[key] for key in ("names", "raw")}, "betas": (0.8, 1)})
    shown = holdfast("show", tmp_path / "s/a", "--json").json["checkpoint"]["values"]
    assert shown == {"betas": [0.9, "inf"], "names": ["w", "b"], "raw": "b'x'", "only": None}
    line = ["diff", tmp_path / "s/a", tmp_path / "s/b"]
    assert holdfast(*line, "--json").json["values"] == [
        {"name": "betas", "a": [0.9, "inf"], "b": [0.8, 1]},
        {"name": "only", "a": None},
    ]
    assert "value only: None -> (not there)" in holdfast(*line).out


def test_diff_reads_nothing_that_digests_prove(own_store):
    """The data of a frozen tensor is destroyed in both; only its digests are looked at."""
    for step in (100, 200):
        (shard,) = (own_store / f"step_{step}").glob("*.safetensors")
        data = bytearray(shard.read_bytes())
        frozen = Catalog(own_store).open(f"step_{step}").read("model.frozen").tobytes()
        at = data.index(frozen)
        data[at : at + len(frozen)] = bytes(len(frozen))
        shard.write_bytes(data)
    ran = holdfast("diff", own_store / "step_100", own_store / "step_200", "--tensors", "*frozen")
    assert (ran.code, ran.err) == (0, "")


def test_diff_knows_added_removed_and_other_tensors(tmp_path):
    catalog = Catalog(tmp_path / "s")
    catalog.write("a", {"gone": np.zeros(2), "x": np.zeros(3), "nan": np.array([np.nan, 1.0, 2.0])})
    catalog.write(
        "b", {"new": np.zeros(2), "x": np.zeros((3, 1)), "nan": np.array([np.nan, np.nan, 4.0])}
    )
    ran = holdfast("diff", tmp_path / "s/a", tmp_path / "s/b", "--json").json
    assert [each["name"] for each in ran["added"]] == ["new"]
    assert [each["name"] for each in ran["removed"]] == ["gone"]
    assert [each["name"] for each in ran["other"]] == ["x"]
    (changed,) = ran["changed"]
    assert (changed["elements"], changed["max_abs"], changed["nan_changed"]) == (2, 2.0, 1)


def test_what_a_checkpoint_refers_to_is_shown_and_read(tmp_path):
    golden = Path(__file__).parents[1] / "golden" / "v1"
    shutil.copytree(golden, tmp_path / "deep" / "er")
    referring = [
        info.prefix
        for info in Catalog(golden).list()
        if any(f.prefix for f in Catalog(golden).find(info.prefix).record.files)
    ]
    assert referring
    for prefix in referring:
        ran = holdfast("show", tmp_path / "deep/er" / prefix)
        assert ran.code == 0
        assert "refers to" in ran.out
        assert holdfast("verify", tmp_path / "deep/er" / prefix).code == 0


def test_names_that_would_move_the_cursor_or_be_markup_are_shown_as_text(tmp_path):
    state = {"\x1b[2J[red]x": np.zeros(1), "new\nline": np.zeros(1), "v": "\x1b[31m"}
    Catalog(tmp_path / "s").write("a", state)
    ran = holdfast("show", tmp_path / "s")
    assert "\x1b" not in ran.out
    assert r"\x1b[2J[red]x" in ran.out
    assert r"new\nline" in ran.out


def test_a_tensor_that_is_stored_in_other_parts_is_read_and_found_the_same(tmp_path):
    golden = Path(__file__).parents[1] / "golden" / "v1"
    shutil.copytree(golden, tmp_path / "s")
    catalog = Catalog(tmp_path / "s")
    parts = [len(t.placement.files) for t in catalog.find("sliced").record.tensors.values()]
    assert max(parts) > 1 or catalog.info("sliced").world_size > 1
    catalog.write("copy", catalog.read("sliced"))
    found = holdfast("diff", tmp_path / "s/sliced", tmp_path / "s/copy", "--json").json
    assert (found["changed"], found["added"], found["removed"]) == ([], [], [])
    assert found["unchanged"] == catalog.info("sliced").tensors


def test_a_glance_sees_what_a_catalog_sees(own_store):
    catalog = Catalog(own_store)
    catalog.write("nan", {"x": 1}, metrics={"loss": float("nan"), "n": 3})
    catalog.write("inf", {"x": np.zeros(2)}, metrics={"loss": float("inf")})
    catalog.write("gone", {"x": 1})
    catalog.delete("gone")
    record = own_store / "step_200" / "metadata.json"
    record.write_bytes(record.read_bytes().replace(b'"version":1', b'"version":9'))
    record = own_store / "step_300" / "metadata.json"
    record.write_bytes(record.read_bytes().replace(b'"step":300', b'"step":301'))
    for foreign in ("theirs", "step_100/inner"):
        (own_store / foreign).mkdir()
        (own_store / foreign / "metadata.json").write_text('{"mine": 1}')
    seen, scanned = glance(Catalog(own_store)), catalog.scan()
    assert repr(seen.infos) == repr(scanned.infos)  # as text: one of the metrics is NaN
    assert [(each.prefix, str(each.error)) for each in seen.unreadable] == [
        (each.prefix, str(each.error)) for each in scanned.unreadable
    ]
    assert len(seen.unreadable) == 2
