"""Of several ranks one prunes, after the save of all."""

import pytest
import torch

from holdfast.catalog import keep_last
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, SaveOptions
from holdfast.storage import LocalStorage
from holdfast.testing import FaultyStorage, RankGang


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as ranks:
        yield ranks


def save_five(rank, root):
    """What is listed after each save, and the keys that this rank changed beside its own files."""
    storage = FaultyStorage(LocalStorage(root))
    options = CheckpointOptions(storage=storage, retention=keep_last(2))
    listed = []
    with DistributedCheckpoint.create(options=options) as ckpt:
        for step in range(5):
            state = {"w": torch.arange(6.0) + step}
            ckpt.save(state, options=SaveOptions(step=step), extra={"rank": rank})
            ckpt.coordinator.barrier()
            listed.append([info.step for info in ckpt.list_checkpoints()])
            ckpt.coordinator.barrier()
    changed = [call for call in storage.calls if call.method in {"create", "replace", "delete"}]
    return listed, len(changed)


def test_only_the_rank_that_commits_prunes(gang, tmp_path):
    (zero, of_zero), (one, of_one) = gang.run(save_five, root=tmp_path / "root")
    assert zero == one == [[0], [1, 0], [2, 1], [3, 2], [4, 3]]
    assert of_one == 0
    assert of_zero > 0
