"""Conversions that are killed, interrupted or out of room leave nothing that is taken for whole,
and take no more memory for more bytes."""

import contextlib
import shutil
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from convert_tools import MIB, done, large_safetensors, left_by_ctrl_c, refused, with_torch

from holdfast.catalog import Catalog

TARGETS = {
    "safetensors": "out.safetensors",
    "huggingface": "out",
    "holdfast": "store/out",
    "torch": "out.pt",
    "dcp": "out",
}
MOST = 128 * MIB
"""What docs/convert.md says."""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Three times as much as a conversion may take, more than half of it in one tensor. The file
    takes no room itself."""
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    return large_safetensors(path, [224 * MIB, *[8 * MIB] * 20])


def in_the_middle(folder):
    """Whether some bytes of the target, and not all of it, have been written."""
    for each in folder.rglob("*"):
        if "shard" in each.name or ".part" in str(each.relative_to(folder)):
            with contextlib.suppress(FileNotFoundError):
                if each.is_file() and each.stat().st_blocks:
                    return True
    return False


def cut_off(large, tmp_path, kind, sign):
    """Convert until one was cut off in the middle. Returns how that one ended."""
    for nth in range(20):
        folder = tmp_path / f"try_{nth}"
        folder.mkdir()
        ran = with_torch(
            *("convert", large, folder / TARGETS[kind], "--to", kind),
            watch=lambda folder=folder: in_the_middle(folder),
            sign=sign,
        )
        target = folder / TARGETS[kind]
        is_there = (target / "metadata.json" if kind == "holdfast" else target).exists()
        if ran.code and not is_there:
            return ran, folder
        if ran.code:  # it was through just before
            done("convert", target, folder / "whole.safetensors")
            assert (folder / "whole.safetensors").stat().st_size > 384 * MIB
        shutil.rmtree(folder)
    raise AssertionError("every one was through before it was cut off")


@pytest.mark.parametrize("kind", TARGETS)
def test_one_that_is_killed_leaves_no_target(large, tmp_path, kind):
    ran, folder = cut_off(large, tmp_path, kind, signal.SIGKILL)
    assert ran.code == -signal.SIGKILL
    target = folder / TARGETS[kind]
    if kind == "holdfast":
        refused("convert", target.parent, folder / "x.safetensors", code=3, saying="no format")
        assert Catalog(target.parent).list() == []
    else:
        assert not target.exists()
        refused("convert", target, folder / "x.safetensors", code=3, saying="no such file")
    done("convert", large, target, "--to", kind, "--select", "t1")
    assert names_in(target, folder) == ["t1"]


@pytest.mark.parametrize("kind", ["huggingface", "holdfast", "torch"])
def test_ctrl_c_leaves_nothing_at_all(large, tmp_path, kind):
    ran, folder = cut_off(large, tmp_path, kind, signal.SIGINT)
    assert (ran.code, ran.err) == (130, "holdfast: interrupted\n")
    assert left_by_ctrl_c(folder, 1 if kind == "holdfast" else 0) == []


@pytest.mark.parametrize("kind", TARGETS)
def test_where_there_is_no_room_nothing_is_left(large, tmp_path, kind):
    target = tmp_path / TARGETS[kind]
    line = ("convert", large, target, "--to", kind)
    refused(*line, code=5, saying="", largest=100 * MIB)
    left = [each.name for each in tmp_path.rglob("*") if each.is_file()]
    assert left in ([], [".holdfast.lock"])


@pytest.mark.parametrize("kind", TARGETS)
def test_memory_does_not_grow_with_what_is_written(large, tmp_path, kind):
    ran = done("convert", large, tmp_path / TARGETS[kind], "--to", kind)
    assert ran.memory < MOST
    shutil.rmtree(tmp_path)


def test_memory_does_not_grow_with_what_is_read(tmp_path):
    """Of a tensor that is not even contiguous in the first source."""
    torch.save({"large": torch.zeros(8192, 12288).t(), "b": torch.ones(1)}, tmp_path / "x.pt")
    for line in (
        ("convert", tmp_path / "x.pt", tmp_path / "dcp", "--to", "dcp"),
        ("convert", tmp_path / "dcp", tmp_path / "a" / "x"),
        ("convert", tmp_path / "a", tmp_path / "y.safetensors"),
        ("reshard", tmp_path / "a", tmp_path / "b" / "x", "--ranks", "3"),
    ):
        assert done(*line).memory < MOST, line
    shutil.rmtree(tmp_path)


def names_in(target, folder):
    if target.suffix == ".pt":
        return [*torch.load(target)]
    if (target / ".metadata").exists():
        return [*dcp.FileSystemReader(target).read_metadata().state_dict_metadata]
    done("convert", target, folder / "again" / "x")
    return [*Catalog(folder / "again").open("x").tensors]
