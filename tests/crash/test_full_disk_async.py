"""A disk that fills up, for real, while a save is under way in the background."""

import os

import pytest
import torch
from mounts import small_memory
from torch import nn

from holdfast.catalog import Catalog
from holdfast.distributed import DistributedCheckpoint, SaveOptions, _aftermath
from holdfast.errors import NoSpaceError
from holdfast.storage import LocalStorage
from holdfast.storage._wrapped import WrappedStorage

MIB = 1024 * 1024
SOON_S = 60.0


@pytest.fixture(autouse=True)
def _what_failed_is_removed_however_long_it_takes(monkeypatch):
    monkeypatch.setattr(_aftermath, "_CLEAN_S", SOON_S)


class FillingStorage(WrappedStorage):
    """Somebody else takes the last byte just before one call, for which there was room when the
    save began."""

    def __init__(self, storage, folder, method, name):
        super().__init__(storage)
        self._folder, self._method, self._name = folder, method, name

    def _through(self, method, key, call, /):
        if method == self._method and self._name in key:
            with (self._folder / "filler").open("ab", buffering=0) as file:
                for size in (MIB, 4096, 1):
                    try:
                        while True:
                            file.write(bytes(size))
                    except OSError:
                        continue
        return call()


def files(root):
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("compression", ["none", "fast"])
@pytest.mark.parametrize(
    ("method", "name"),
    [("create", "intent-"), ("open_writer", "shard-"), ("create", "metadata.json")],
)
def test_the_disk_fills_up_in_the_midst_of_a_save(method, name, compression, tmp_path):
    model = nn.Linear(700, 700)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with small_memory(tmp_path / "small", "24m") as path:
        root = path / "runs"
        with DistributedCheckpoint(storage=root) as ckpt:
            ckpt.save(model, optimizer, SaveOptions(checkpoint_prefix="before"))
        before = files(root)
        storage = FillingStorage(LocalStorage(root), path, method, name)
        options = SaveOptions(checkpoint_prefix="next", compression_level=compression)
        with DistributedCheckpoint(storage=storage) as ckpt:
            handle = ckpt.save_async(model, optimizer, options)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            with pytest.raises(NoSpaceError) as caught:
                handle.result(SOON_S)
            assert "next" in caught.value.path
            assert caught.value.rank == 0
            os.unlink(path / "filler")  # noqa: PTH108
            assert files(root) == before
            assert ckpt.catalog.verify("before").is_intact
            # There is room again, and nothing of the failure stands in the way.
            storage._method = ""
            assert ckpt.save_async(model, optimizer, options).result(SOON_S) == "next"
        assert [info.prefix for info in Catalog(root).list()] == ["next", "before"]


def test_a_state_that_is_too_large_is_refused_before_anything_is_written(tmp_path):
    model = nn.Linear(2000, 2000)
    refused = pytest.raises(NoSpaceError, match=r"and there are .* free; nothing was saved")
    with small_memory(tmp_path / "small", "8m") as path:
        with DistributedCheckpoint(storage=path / "runs") as ckpt, refused:
            ckpt.save_async(model).result(SOON_S)
        assert files(path / "runs") <= {".holdfast.lock"}
