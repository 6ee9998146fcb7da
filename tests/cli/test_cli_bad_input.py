"""What cannot work: one clear line, a code that is not 0, no traceback unless it is asked for."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cli_tools import COMMAND, holdfast, refused

from holdfast.catalog import Catalog
from holdfast.cli._app import _os_words
from holdfast.format import encode_record


def test_paths_to_nothing(store, tmp_path):
    refused("ls", tmp_path / "no", code=3, saying=["no such file or folder", "no]"])
    refused("show", store / "step_999", code=3, saying="no such file or folder")
    (tmp_path / "file.txt").write_bytes(b"x")
    refused("verify", tmp_path / "file.txt", code=3, saying="no part of a checkpoint")
    (tmp_path / "stray.safetensors").write_bytes(b"x")
    refused("show", tmp_path / "stray.safetensors", code=3, saying="no commit record beside it")
    refused("ls", "ftp://host/run", code=2, saying="no storage is known for ftp://")
    refused("ls", "s3:/bucket", code=2, saying="lacks the slashes")
    for verb in ("ls", "doctor", "bench"):
        refused(verb, "s3:///run", code=2, saying="names no bucket")
    for verb in (["ls"], ["doctor"], ["bench"], ["convert", store]):
        refused(*verb, "file://host/run", code=2, saying="on this machine")
    (tmp_path / "round").symlink_to("about")
    (tmp_path / "about").symlink_to("round")
    refused("ls", tmp_path / "round", code=3, saying="no such file or folder")
    refused("ls", tmp_path / ("x" * 300), code=5, saying=["holdfast: file name too long", "xxx]"])


def test_an_empty_store(tmp_path):
    (tmp_path / "empty").mkdir()
    assert refused("ls", tmp_path / "empty", "--json", code=3, saying="no checkpoints").json == {
        "store": (tmp_path / "empty").as_uri(),
        "checkpoints": [],
        "unreadable": [],
    }
    for verb in (["show"], ["verify"], ["verify", "--all"], ["prune", "--keep-last", "1"]):
        refused(*verb, tmp_path / "empty", code=3, saying="no checkpoints")
    (tmp_path / "empty/notes.txt").write_text("not a checkpoint")
    for line in (["gc"], ["gc", "--yes"]):
        refused(*line, tmp_path / "empty", code=3, saying="no checkpoints")
    assert [each.name for each in (tmp_path / "empty").iterdir()] == ["notes.txt"]
    Catalog(tmp_path / "emptied").write("a", {"x": 1})
    Catalog(tmp_path / "emptied").delete("a")
    assert holdfast("gc", tmp_path / "emptied", "--yes").code == 0


def test_damage_stops_those_who_read_it(own_store):
    record = own_store / "step_300" / "metadata.json"
    record.write_bytes(b"\0" + record.read_bytes()[1:])
    refused("show", own_store / "step_300", code=4, saying="not a holdfast commit record")
    passed = holdfast("show", own_store, "--json")
    assert passed.json["checkpoint"]["name"] == "step_200"
    assert "passed over" in passed.err
    (shard,) = (own_store / "step_200").glob("*.safetensors")
    size = shard.stat().st_size
    os.truncate(shard, size // 2)
    refused("cat", own_store / "step_200", "model.weight", code=4, saying=[shard.name, str(size)])
    debug = holdfast("cat", own_store / "step_200", "model.weight", "--debug")
    assert debug.code == 4
    assert "Traceback" in debug.err
    assert debug.err.splitlines()[-1].startswith("holdfast: a file of the checkpoint has ")


def test_names_and_slices_that_are_not_there(store):
    refused("cat", store, "model.wieght", code=3, saying="did you mean 'model.weight'")
    refused("show", store, "--tensors", "nope*", code=3, saying="no tensor fits 'nope*'")
    refused("cat", store, "model.weight", "--slice", "0:1:2", code=2, saying="step")
    refused("cat", store, "model.weight", "--slice", "999", code=2, saying="the size is 300")
    refused("prune", store, "--keep-best", "acc", code=3, saying="there are accuracy, loss")
    refused("verify", store, "--sample", "0%", code=2, saying="--sample")
    for option in (["cat", store, "model.weight", "--npy"], ["verify", store, "--state"]):
        refused(*option, "nowhere/file", code=3, saying="no such folder [path nowhere]")
    refused("lss", code=2, saying="Did you mean 'ls'")
    refused("ls", "--nope", code=2, saying="--nope")
    refused("cat", store, code=2, saying="TENSOR")


def test_no_permission(tmp_path):
    """A root gives its powers up first."""
    closed = tmp_path / "closed"
    closed.mkdir()
    Catalog(closed).write("a", {"x": 1})
    closed.chmod(0)
    try:
        refused("ls", closed, code=5, saying="ermission denied", powerless=True)
    finally:
        closed.chmod(0o700)


def test_no_permission_for_a_folder_in_a_store_names_that_folder():
    with tempfile.TemporaryDirectory() as root:  # pytest's own nobody else may enter
        Path(root).chmod(0o755)
        Catalog(root).write("a", {"x": 1})
        closed = Path(root, "lost+found/inner")
        closed.mkdir(parents=True)
        closed.chmod(0)
        for line in (["ls"], ["verify", "--all"], ["prune", "--keep-last", 1], ["gc"]):
            saying = "permission denied [path lost+found/inner]"
            refused(*line, root, code=5, saying=saying, powerless=True)


def test_an_error_of_the_system_tells_of_a_path_or_of_a_number():
    for named, told in (("/nowhere", "/nowhere"), (b"/nowhere", "/nowhere"), (2**20, str(2**20))):
        with pytest.raises(OSError) as raised:
            os.statvfs(named)
        assert raised.value.filename == named
        assert _os_words(raised.value).endswith(f" [path {told}]")


@pytest.mark.parametrize("verb", [["show", "--full"], ["show", "--json"], ["--help"]])
def test_a_pipe_that_is_closed_ends_it_quietly(store, verb):
    with subprocess.Popen(
        [*COMMAND, *verb, *[store] * (verb[0] == "show")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, "")


def test_streams_that_are_closed_or_full(store):
    """Nothing that is opened later may get the number of a stream that a shell has closed."""

    def shell(line, *words):
        command = ["sh", "-c", f'"$@" {line}', "sh", *COMMAND, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ran := shell(">&-", "ls", store)).returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert shell("2>&-", "ls", "/nowhere/to/be/found").returncode == 3
    assert shell("<&- 2>&-", "ls", store).stdout.startswith("name")
    no_answer = shell("<&-", "rm", store / "step_100")
    assert (no_answer.returncode, "give --yes" in no_answer.stderr) == (2, True)
    full = shell(">/dev/full", "ls", store)
    assert full.returncode == 5
    assert full.stderr == (
        "holdfast: what was to be printed cannot be written: No space left on device\n"
    )


def test_without_its_packages_it_says_how_to_get_them():
    code = "import sys; sys.modules['typer'] = None; from holdfast.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code, "ls"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr == ('holdfast: the command line needs more: pip install "holdfast[cli]"\n')


def test_what_a_record_merely_claims_takes_no_memory_and_no_time(tmp_path):
    """A record that is well formed and says that a tensor of 16 bytes has an exbibyte."""
    catalog = Catalog(tmp_path)
    catalog.write("a", {"x": np.zeros(2), ".".join("x" * 3000): np.zeros(1)})
    found = catalog.find("a").record
    (cut,) = found.tensors["x"].placement.cuts
    placement = msgspec.structs.replace(
        found.tensors["x"].placement, cuts=(msgspec.structs.replace(cut, step=2**56),)
    )
    huge = msgspec.structs.replace(found.tensors["x"], shape=(2**56,), placement=placement)
    record = msgspec.structs.replace(found, tensors={**found.tensors, "x": huge})
    (tmp_path / "a" / "metadata.json").write_bytes(encode_record(record))
    refused("cat", tmp_path / "a", "x", code=4, saying="the record says that this file holds 'x'")
    refused(
        "diff",
        tmp_path / "a",
        tmp_path / "a/metadata.json",
        "--tensors",
        "nope",
        code=3,
        saying="no tensor of either fits",
    )
    shown = holdfast("show", tmp_path / "a")
    assert "x  F64 [72057594037927936]  512.0 PiB" in shown.out
