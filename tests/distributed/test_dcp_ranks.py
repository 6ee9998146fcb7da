"""torch.distributed.checkpoint with holdfast's storage, on real ranks."""

import functools
import gc
import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.catalog import Catalog
from holdfast.catalog._intents import Intent, encode_intent
from holdfast.catalog._names import attempt_of_shard, intent_name
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.testing import RankGang

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LAYOUTS = {
    1: {"rows": ((1,), [Shard(0)])},
    2: {
        "rows": ((2,), [Shard(0)]),
        "columns": ((2,), [Shard(1)]),
        "copies": ((2,), [Replicate()]),
    },
    4: {
        "rows": ((4,), [Shard(0)]),
        "columns": ((4,), [Shard(1)]),
        "blocks": ((2, 2), [Shard(0), Shard(1)]),
        "pairs": ((2, 2), [Replicate(), Shard(0)]),
    },
}
SHAPES = {"large": (37, 41), "few": (3, 5), "square": (64, 64), "half": (6, 2)}


@pytest.fixture(scope="module")
def two():
    with RankGang(2) as gang:
        yield gang


@pytest.fixture(scope="module")
def four():
    with RankGang(4) as gang:
        yield gang


@functools.cache
def mesh(shape):
    return init_device_mesh("cpu", shape)


def values(seed):
    return {
        name: torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape) + seed
        for name, shape in SHAPES.items()
    }


def sharded(layout, seed):
    """The same tensors on any number of ranks, one that is on all of them, and a value."""
    over, placements = LAYOUTS[dist.get_world_size()][layout]
    tensors = {n: distribute_tensor(t, mesh(over), placements) for n, t in values(seed).items()}
    return {"model": tensors, "plain": torch.full((7,), float(seed)), "epoch": seed}


def save_layout(rank, path, layout, seed, **options):
    metadata = dcp.save(sharded(layout, seed), storage_writer=HoldfastWriter(path, **options))
    return metadata.storage_meta.save_id


def load_layout(rank, path, layout, seed):
    into = sharded(layout, seed + 1000)
    dcp.load(into, storage_reader=HoldfastReader(path))
    for name, tensor in values(seed).items():
        assert torch.equal(into["model"][name].full_tensor(), tensor), name
    assert into["plain"].tolist() == [seed] * 7
    assert into["epoch"] == seed


def test_dtensors_of_four_ranks_come_back_on_any_other_mesh(two, four, tmp_path):
    for seed, layout in enumerate(LAYOUTS[4]):
        ids = four.run(save_layout, tmp_path / layout, layout, seed)
        assert len(set(ids)) == 1
        for other in LAYOUTS[4]:
            four.run(load_layout, tmp_path / layout, other, seed)
        for other in LAYOUTS[2]:
            two.run(load_layout, tmp_path / layout, other, seed)
        whole = {"model": {n: torch.zeros(s) for n, s in SHAPES.items()}}
        dcp.load(whole, storage_reader=HoldfastReader(tmp_path / layout), no_dist=True)
        assert all(torch.equal(whole["model"][n], t) for n, t in values(seed).items())
        catalog = Catalog(tmp_path)
        assert catalog.verify(layout).is_intact
        assert catalog.info(layout).world_size == 4
        np.testing.assert_array_equal(
            catalog.read(layout)["model"]["few"], values(seed)["few"].numpy()
        )
    assert catalog.gc().deleted == ()


@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_what_two_ranks_save_four_load(two, four, tmp_path, layout):
    two.run(save_layout, tmp_path / "a", layout, 5, compression_level="fast")
    for other in LAYOUTS[4]:
        four.run(load_layout, tmp_path / "a", other, 5)


def test_what_all_ranks_hold_is_written_once(two, tmp_path):
    two.run(save_layout, tmp_path / "a", "copies", 1)
    found = Catalog(tmp_path).find("a").record
    assert sum(count for t in found.tensors.values() for _, _, count in t.placement.files) == 5
    assert len(found.files) == 2  # and the ranks share the work


def training(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh((dist.get_world_size(),)))
    fully_shard(model, mesh=mesh((dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(4, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def full(model, optimizer):
    """All values of a training, whole, on every rank."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = value
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors.items()
    }


def save_training(rank, path):
    model, optimizer = training(1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state}, storage_writer=HoldfastWriter(path)
    )
    return {name: tensor.numpy() for name, tensor in full(model, optimizer).items()}


def load_training(rank, path):
    model, optimizer = training(2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    into = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(into, storage_reader=HoldfastReader(path))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=into["model"],
        optim_state_dict=into["optimizer"],
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    return {name: tensor.numpy() for name, tensor in full(model, optimizer).items()}


def test_a_sharded_training_goes_on_with_another_number_of_ranks(two, four, tmp_path):
    saved = four.run(save_training, tmp_path / "a")[0]
    for gang in (two, four):
        loaded = gang.run(load_training, tmp_path / "a")[0]
        assert loaded.keys() == saved.keys()
        for name, array in saved.items():
            np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def save_async(rank, path, kind):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # DCP's process would ask the DNS
    group = dist.new_group(backend="gloo")
    writer = HoldfastWriter(path / "0")
    for step in range(2):
        state = sharded("rows", step)
        future = dcp.async_save(
            state,
            checkpoint_id=path / str(step),
            storage_writer=writer,
            process_group=group,
            async_checkpointer_type=kind,
        )
        for tensor in state["model"].values():
            tensor.to_local().zero_()
        future.result()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", AsyncCheckpointerType)
def test_saves_go_on_in_a_thread_or_a_process(tmp_path, kind):
    with RankGang(2) as gang:
        gang.start(save_async, tmp_path, kind)
        for outcome in gang.outcomes(100):
            assert outcome.failure() is None
    with RankGang(2) as gang:
        for step in range(2):
            gang.run(load_layout, tmp_path / str(step), "columns", step)
    assert [info.prefix for info in Catalog(tmp_path).list()] == ["1", "0"]


class Failing(DefaultSavePlanner):
    """Fails, or dies, on one rank, when it has written half."""

    def __init__(self, rank, how):
        super().__init__()
        self.rank = rank
        self.how = how
        self.calls = 0

    def resolve_data(self, write_item):
        self.calls += 1
        if dist.get_rank() == self.rank and self.calls == 2:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no more")
        return super().resolve_data(write_item)


def save_failing(rank, path, failing, how):
    try:
        dcp.save(
            sharded("rows", 9),
            storage_writer=HoldfastWriter(path),
            planner=Failing(failing, how),
        )
    except CheckpointException as error:
        return [*error.failures], str(error)
    return None


def collect(rank, path):
    """The writer of a failed save hangs on its error. With both, what it left goes, too."""
    gc.collect()
    end = time.monotonic() + 30
    while len([*path.iterdir()]) != 3:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_makes_all_fail_and_the_old_checkpoint_stays(two, tmp_path, failing):
    two.run(save_layout, tmp_path / "a", "rows", 1)
    for failed, words in two.run(save_failing, tmp_path / "a", failing, "fails"):
        assert failed == [failing]
        assert "no more" in words
    two.run(load_layout, tmp_path / "a", "columns", 1)
    two.run(save_layout, tmp_path / "a", "rows", 2)
    two.run(load_layout, tmp_path / "a", "columns", 2)
    assert Catalog(tmp_path).verify("a").is_intact
    two.run(collect, tmp_path / "a")


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_leaves_the_old_checkpoint_and_nothing_half(tmp_path, dying):
    for path in ("a", "b"):
        with RankGang(2) as gang:
            if path == "a":
                gang.run(save_layout, tmp_path / "a", "rows", 1)
            gang.start(save_failing, tmp_path / path, dying, "dies")
            outcomes = gang.outcomes(60)
            assert outcomes[dying].exit_code == -signal.SIGKILL
            assert outcomes[1 - dying].failure() is not None
    catalog = Catalog(tmp_path)
    assert [info.prefix for info in catalog.list()] == ["a"]
    assert catalog.verify("a").is_intact
    with RankGang(2) as gang:
        gang.run(load_layout, tmp_path / "a", "columns", 1)
        gang.run(save_layout, tmp_path / "b", "rows", 3)
        gang.run(load_layout, tmp_path / "b", "columns", 3)


def load_damaged(rank, path):
    try:
        dcp.load(sharded("columns", 1), storage_reader=HoldfastReader(path))
    except CheckpointException as error:
        return {at: (type(each[0]), str(each[0])) for at, each in error.failures.items()}
    return None


def test_a_flipped_bit_is_named_on_every_rank_that_reads_it(two, tmp_path):
    two.run(save_layout, tmp_path / "a", "rows", 1)
    record = Catalog(tmp_path).find("a").record
    shard = tmp_path / "a" / record.files[0].name
    data = bytearray(shard.read_bytes())
    data[data.index(values(1)["square"][:32].numpy().tobytes()) + 6] ^= 4
    shard.write_bytes(data)
    for failures in two.run(load_damaged, tmp_path / "a"):
        assert failures.keys() == {0, 1}
        for kind, words in failures.values():
            assert kind is holdfast.CorruptedError
            assert "tensor 'model.square' is damaged" in words
            assert shard.name in words


def save_cached(rank, path):
    """DCP sends unchanged plans only once, and so nothing of what the storage adds to them."""
    listed = []
    for step in range(4):
        state = sharded("rows", step)
        if step == 3 and rank == 0:
            state["more"] = torch.ones(3)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=HoldfastWriter(path / str(step)), planner=planner)
        listed.append(len(SavePlanner._cached_final_save_plan))
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        getattr(SavePlanner, name).clear()
    return listed


def announced_long_ago(folder, record):
    """As if rank 0 had died just after the commit, before it removed what rank 1 had announced."""
    (other,) = {attempt_of_shard(file.name) for file in record.files} - {record.attempt}
    path = folder / intent_name(other)
    path.write_bytes(encode_intent(Intent(prefix=folder.name, attempt=other, lease_s=600)))
    os.utime(path, (1e9, 1e9))


def test_plans_that_dcp_caches_are_used_again(two, tmp_path):
    assert two.run(save_cached, tmp_path) == [[1, 1, 1, 1]] * 2
    for step in range(4):
        two.run(load_layout, tmp_path / str(step), "columns", step)
        names = sorted(path.name.partition("-")[0] for path in (tmp_path / str(step)).iterdir())
        assert names == ["metadata.json", "shard", "shard"]
        assert Catalog(tmp_path).verify(str(step)).is_intact
    catalog = Catalog(tmp_path)
    assert catalog.gc().deleted == ()
    announced_long_ago(tmp_path / "1", catalog.find("1").record)
    assert [name for name in catalog.gc().deleted if "shard" in name] == []
    assert catalog.verify("1").is_intact


def save_alone(rank, path, *, no_dist):
    where = path / f"{rank}" if no_dist else path
    dcp.save(
        sharded("rows", rank),
        storage_writer=HoldfastWriter(where),
        no_dist=no_dist,
        use_collectives=False,
    )
    dist.barrier()
    into = sharded("rows", 1000)
    dcp.load(into, storage_reader=HoldfastReader(where), no_dist=no_dist)
    for name, tensor in sharded("rows", rank)["model"].items():
        assert torch.equal(into["model"][name].to_local(), tensor.to_local())
    assert into["epoch"] == rank


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("no_dist", [False, True])
def test_ranks_may_save_each_for_itself(two, tmp_path, no_dist):
    """Then a checkpoint has parts of tensors only, and each rank has its own."""
    two.run(save_alone, tmp_path / "a", no_dist=no_dist)
    catalog = Catalog(tmp_path / "a")
    assert len(catalog.list()) == 2
    assert all(catalog.verify(info.prefix).is_intact for info in catalog.list())


def save_among(rank, path):
    group = dist.new_group([1, 3])
    if rank in {1, 3}:
        state = {"w": torch.full((3,), float(rank)), f"own{rank}": torch.ones(rank)}
        dcp.save(state, storage_writer=HoldfastWriter(path), process_group=group)
    dist.barrier()
    into = {"w": torch.zeros(3), "own1": torch.zeros(1), "own3": torch.zeros(3)}
    dcp.load(into, storage_reader=HoldfastReader(path))
    return [tensor.tolist() for tensor in into.values()]


def test_some_of_the_ranks_may_save(four, tmp_path):
    assert four.run(save_among, tmp_path / "a") == [[[1.0] * 3, [1.0], [1.0] * 3]] * 4
    assert Catalog(tmp_path).info("a").world_size == 2


def save_apart(rank, path):
    """Each rank has a root of its own, as on hosts that share no disk."""
    try:
        dcp.save(sharded("rows", 1), storage_writer=HoldfastWriter(path / str(rank) / "a"))
    except CheckpointException as error:
        return {at: type(each[0]) for at, each in error.failures.items()}
    return None


def test_storage_that_ranks_do_not_share_is_refused(two, tmp_path):
    assert two.run(save_apart, tmp_path) == [{1: holdfast.SaveError}] * 2
    assert Catalog(tmp_path / "0").list() == Catalog(tmp_path / "1").list() == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_that_see_different_checkpoints_load_none(tmp_path):
    dcp.save({"w": torch.ones(3)}, storage_writer=HoldfastWriter(tmp_path / "a"))
    readers = [HoldfastReader(tmp_path / "a") for _ in range(2)]
    readers[0].read_metadata()
    dcp.save({"w": torch.zeros(3)}, storage_writer=HoldfastWriter(tmp_path / "a"))
    readers[1].read_metadata()
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in readers]
    with pytest.raises(holdfast.LoadError, match="not all ranks see the same checkpoint"):
        readers[0].prepare_global_plan(plans)
