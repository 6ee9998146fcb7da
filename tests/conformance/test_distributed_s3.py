"""A training on two real ranks that saves to and loads from a real S3 server."""

import urllib.request
import uuid

import pytest
import torch
import torch.distributed as dist
from _servers import moto_server
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.errors import CheckpointExistsError, CheckpointNotFoundError
from holdfast.storage import StorageOptions, open_storage
from holdfast.testing import RankGang

FORMATS = ["multi_shard", "single_file", "consolidated"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield url


@pytest.fixture
def where(server):
    return StorageOptions(
        url=f"s3://bucket/{uuid.uuid4().hex}",
        config={
            "endpoint": server,
            "access_key_id": "key",
            "secret_access_key": "word",
            "region": "us-east-1",
            "client_options": {"timeout": "60s", "connect_timeout": "20s"},
        },
    )


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as started:
        yield started


def new_training(seed):
    """A model of 11 rows, so that two ranks hold unequal parts, trained by one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 11), nn.Linear(11, 3))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return model, optimizer


def at(where):
    return DistributedCheckpoint.create(options=CheckpointOptions(storage=where))


def save_job(rank, where, seed, **options):
    model, optimizer = new_training(seed)
    with at(where) as checkpoint:
        options = SaveOptions(checkpoint_prefix="last", **options)
        checkpoint.save(model, optimizer, options, extra={"seed": seed})


def load_job(rank, where, seed, **options):
    model, optimizer = new_training(seed + 1000)
    extra = {"seed": 0}
    with at(where) as checkpoint:
        options = LoadOptions(checkpoint_prefix="last", **options)
        result = checkpoint.load(model, optimizer, options, extra=extra)
    assert extra == {"seed": seed}
    wanted, wanted_optimizer = new_training(seed)
    for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(local(one), local(other))
        mine, its = optimizer.state[one], wanted_optimizer.state[other]
        assert torch.equal(local(mine["exp_avg"]), local(its["exp_avg"]))
        assert torch.equal(mine["step"], its["step"])
    return result.source_world_size


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fails_job(rank, where, seed):
    with pytest.raises(CheckpointExistsError, match="committed checkpoint of this name"):
        save_job(rank, where, seed)


def delete_job(rank, where):
    """One rank deletes, then none finds it any more."""
    with at(where) as checkpoint:
        if rank == 0:
            checkpoint.delete_checkpoint("last")
        dist.barrier()
        assert checkpoint.list_checkpoints() == []
        with pytest.raises(CheckpointNotFoundError):
            checkpoint.load(nn.Linear(1, 1), options=LoadOptions(checkpoint_prefix="last"))


@pytest.mark.parametrize("layout", FORMATS)
def test_two_ranks_save_to_s3_and_any_number_loads(gang, where, layout):
    gang.run(save_job, where, 1, format=layout)
    keys = [info.key for info in open_storage(where).list("last/")]
    assert not [key for key in keys if "intent" in key]
    assert (
        len([key for key in keys if key.endswith(".safetensors")])
        == {
            "multi_shard": 2,
            "single_file": 1,
            "consolidated": 3,  # the model, and what each rank has of the optimizer
        }[layout]
    )
    assert gang.run(load_job, where, 1) == [2, 2]
    assert load_job(0, where, 1) == 2
    with at(where) as checkpoint:
        assert checkpoint.catalog.verify("last").is_intact


@pytest.mark.parametrize("strategy", ["parallel", "broadcast", "simple"])
def test_one_process_saves_and_two_ranks_read_their_parts(gang, where, strategy):
    save_job(0, where, 2, compression_level="balanced")
    assert gang.run(load_job, where, 2, resharding_strategy=strategy) == [1, 1]


@pytest.mark.parametrize("layout", FORMATS)
def test_a_name_is_taken_until_it_is_overwritten_or_deleted(gang, where, layout):
    gang.run(save_job, where, 3)
    gang.run(fails_job, where, 4)
    gang.run(load_job, where, 3)
    gang.run(save_job, where, 5, format=layout, overwrite=True)
    gang.run(load_job, where, 5)
    with at(where) as checkpoint:
        (info,) = checkpoint.list_checkpoints()
        assert (info.prefix, info.format, info.world_size) == ("last", layout, 2)
    gang.run(delete_job, where)
    left = [info.key for info in open_storage(where).list()]
    assert left == ["last/metadata.json"]  # a tombstone: S3 cannot delete one version of it
    gang.run(save_job, where, 6)
    gang.run(load_job, where, 6)


def chain_job(rank, where):
    """Three incremental saves; the first is deleted while the last is being made."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    still = distribute_tensor(torch.arange(60_000.0).reshape(300, 200), mesh, [Shard(0)])
    once = iter([1])

    def delete(progress):
        if rank == 0 and progress.phase == "write" and next(once, None):
            checkpoint.delete_checkpoint("s0")

    with at(where) as checkpoint:
        for step in range(3):
            state = {"still": still, "moving": torch.full((2000,), float(step))}
            told = delete if step == 2 else None
            options = SaveOptions(checkpoint_prefix=f"s{step}", incremental=True, progress=told)
            checkpoint.save(state, options=options)


def test_incremental_saves_refer_to_objects_that_outlive_their_checkpoint(gang, where):
    gang.run(chain_job, where)
    with at(where) as checkpoint:
        catalog = checkpoint.catalog
        assert [info.prefix for info in catalog.list()] == ["s2", "s1"]
        catalog.delete("s1")
        catalog.gc()
        assert catalog.verify("s2").is_intact
        found = catalog.read("s2")["model"]
        assert found["still"].ravel().tolist() == list(range(60_000))
        assert set(found["moving"].tolist()) == {2.0}
        record = catalog.find("s2").record
        assert {file.prefix for file in record.files} == {None, "s0"}
        catalog.delete("s2")
        catalog.gc()
        keys = [info.key for info in catalog.storage.list() if "shard" in info.key]
        assert keys == []
