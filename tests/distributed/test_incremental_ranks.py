"""Incremental saves by several ranks: each refers to its own part, and any number of them loads."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_jobs import checkpointer, mesh_of, new_optimizer, parallel, train, whole
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.catalog import Catalog
from holdfast.distributed import DistributedCheckpoint, LoadOptions, SaveOptions, per_rank
from holdfast.errors import ObjectNotFoundError, SaveError
from holdfast.storage import LocalStorage
from holdfast.storage._wrapped import WrappedStorage
from holdfast.testing import RankGang

KIB = 1024
MIB = 1024 * KIB
STEPS = 4


@pytest.fixture(scope="module")
def two():
    with RankGang(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    with RankGang(3) as ranks:
        yield ranks


class Adapted(nn.Module):
    """Most of it is not trained; its parts on two ranks are larger than the least to refer to."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.ModuleList(nn.Linear(96, 130) for _ in range(6))
        self.body.requires_grad_(False)
        self.up = nn.Linear(96, 20)


def extra_of(rank, step):
    return {
        "step": step,
        "still": per_rank(torch.full((2000,), float(rank))),
        "moving": per_rank(torch.full((2000,), float(10 * rank + step))),
    }


def blank():
    return {"step": -1, "still": torch.zeros(2000), "moving": torch.zeros(2000)}


def reference(step):
    net = Adapted(1)
    train(net, new_optimizer(net), step + 1)
    return net


def chain_job(rank, folder, kind):
    net = parallel(Adapted(1), kind, dist.get_world_size())
    optimizer = new_optimizer(net)
    with checkpointer(folder) as ckpt:
        for step in range(STEPS):
            train(net, optimizer, 1)
            options = SaveOptions(checkpoint_prefix=f"{kind}-{step}", incremental=True)
            ckpt.save(net, optimizer, options, extra=extra_of(rank, step))


def resume_job(rank, folder, kind, saved, prefix):
    """Load what other ranks saved, check it, train one step more, and save incrementally."""
    net = parallel(Adapted(2), kind, dist.get_world_size())
    optimizer = new_optimizer(net)
    with checkpointer(folder) as ckpt:
        options = LoadOptions(
            checkpoint_prefix=saved, remap=lambda rank, now, before: rank % before
        )
        extra = blank()
        ckpt.load(net, optimizer, options, extra=extra)
        wanted = reference(extra["step"]).state_dict()
        for name, value in net.state_dict().items():
            assert torch.equal(whole(value), wanted[name.removeprefix("module.")]), name
        assert extra["still"].tolist() == [rank % 2] * 2000
        assert extra["moving"].tolist() == [10 * (rank % 2) + extra["step"]] * 2000
        train(net, optimizer, 1)
        options = SaveOptions(checkpoint_prefix=prefix, incremental=True)
        ckpt.save(net, optimizer, options, extra=extra_of(rank, extra["step"] + 1))


def require(catalog, prefix, step, ranks):
    report = catalog.verify(prefix)
    assert report.is_intact, report.damage
    found = catalog.read(prefix)
    for name, value in reference(step).state_dict().items():
        assert np.array_equal(found["model"][name], value.numpy()), name
    for rank in range(ranks):
        assert set(found["extra"]["still"].values[rank].tolist()) == {rank}
        assert set(found["extra"]["moving"].values[rank].tolist()) == {10 * rank + step}


def prefixes(catalog, prefix):
    """Where the parts of each tensor are."""
    record = catalog.find(prefix).record
    where = {}
    for name, tensor in record.tensors.items():
        numbers = [
            n for first, step, count in tensor.placement.files for n in _run(first, step, count)
        ]
        where[name] = [record.files[number].prefix for number in numbers]
    return where


def _run(first, step, count):
    return [first + step * n for n in range(count)]


def shard_bytes(folder, prefix):
    return sum(file.stat().st_size for file in (folder / prefix).glob("shard-*"))


def require_referring(catalog, kind, step):
    """What is not trained is in the files of step 0, and still in a grid."""
    prefix = f"{kind}-{step}"
    where = prefixes(catalog, prefix)
    pieces = 2 if kind == "fsdp" else 1
    for number in range(6):
        assert where[f"model.body.{number}.weight"] == [f"{kind}-0"] * pieces
    assert [where[f"extra.still.@{rank}"] for rank in range(2)] == [[f"{kind}-0"]] * 2
    assert [where[f"extra.moving.@{rank}"] for rank in range(2)] == [[None]] * 2
    assert set(where["model.up.weight"]) == {None}
    record = catalog.find(prefix).record
    assert all(tensor.placement.boxes is None for tensor in record.tensors.values())
    assert len(record.files) == 4  # of each rank its own and one of step 0


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_refer_to_their_parts_and_any_number_of_ranks_goes_on(two, three, tmp_path, kind):
    two.run(chain_job, tmp_path, kind)
    catalog = Catalog(tmp_path)
    full = shard_bytes(tmp_path, f"{kind}-0")
    for step in range(1, STEPS):
        assert shard_bytes(tmp_path, f"{kind}-{step}") < full / 4
        require_referring(catalog, kind, step)
    for step in range(STEPS):
        require(catalog, f"{kind}-{step}", step, ranks=2)
    for step in (0, 2):
        catalog.delete(f"{kind}-{step}")
    catalog.gc()
    for step in (1, 3):
        require(catalog, f"{kind}-{step}", step, ranks=2)

    three.run(resume_job, tmp_path, kind, f"{kind}-3", "other")
    require(catalog, "other", 4, ranks=3)
    where = prefixes(catalog, "other")
    # In other parts it is written anew; whole tensors are the same on any number of ranks.
    anew = None if kind == "fsdp" else f"{kind}-0"
    assert set(where["model.body.0.weight"]) == {anew}
    still = [where[f"extra.still.@{rank}"] for rank in range(3)]
    assert still == [[f"{kind}-0"], [f"{kind}-0"], [None]]
    two.run(resume_job, tmp_path, kind, f"{kind}-3", "again")
    require(catalog, "again", 4, ranks=2)
    assert set(prefixes(catalog, "again")["model.body.0.weight"]) == {f"{kind}-0"}


def partly_job(rank, folder, level):
    """Only rank 1's part of a tensor changes; each part is in two files if compressed."""
    torch.manual_seed(0)
    large = torch.zeros(40, MIB // 4 if level == "none" else MIB)
    large[:, ::4096] = torch.rand(40, large.shape[1] // 4096)
    tensor = distribute_tensor(large, mesh_of((2,)), [Shard(0)])
    with checkpointer(folder) as ckpt:
        options = {"incremental": True, "compression_level": level, "include_rng_state": False}
        ckpt.save({"large": tensor}, options=SaveOptions(checkpoint_prefix="one", **options))
        if rank == 1:
            tensor.to_local()[3, 5] = 7
        ckpt.save({"large": tensor}, options=SaveOptions(checkpoint_prefix="two", **options))


@pytest.mark.parametrize("level", ["none", "fast"])
def test_a_rank_refers_to_its_part_of_a_tensor_of_which_another_part_changed(two, tmp_path, level):
    two.run(partly_job, tmp_path, level)
    catalog = Catalog(tmp_path)
    pieces = 1 if level == "none" else 2
    assert prefixes(catalog, "two") == {"model.large": ["one"] * pieces + [None] * pieces}
    assert not list((tmp_path / "two").glob("shard-0-*"))
    assert catalog.find("two").record.tensors["model.large"].placement.boxes is None
    for prefix in ("one", "two"):
        assert catalog.verify(prefix).is_intact
    one, two_ = (catalog.read(prefix)["model"]["large"] for prefix in ("one", "two"))
    assert (np.argwhere(one != two_) == [[23, 5]]).all()
    assert two_[23, 5] == 7


class Blind(WrappedStorage):
    """Does not see one key."""

    key = ""

    def _through(self, method, key, call, /):
        if key == self.key and method in {"stat", "read"}:
            raise ObjectNotFoundError("it is not there", path=key)
        return call()


def blind_job(rank, folder):
    net = parallel(Adapted(1), "fsdp", 2)
    storage = Blind(LocalStorage(folder))
    with DistributedCheckpoint(storage=storage) as ckpt:
        ckpt.save(net, options=SaveOptions(checkpoint_prefix="one", incremental=True))
        if rank == 1:
            storage.key = "one/metadata.json"
        ckpt.save(net, options=SaveOptions(checkpoint_prefix="two", incremental=True))


def test_a_rank_that_does_not_see_the_base_writes_its_part(two, tmp_path):
    two.run(blind_job, tmp_path)
    catalog = Catalog(tmp_path)
    assert prefixes(catalog, "two")["model.body.0.weight"] == ["one", None]
    assert catalog.verify("two").is_intact
    found = catalog.read("two")["model"]
    for name, value in Adapted(1).state_dict().items():
        assert np.array_equal(found[name], value.numpy())


class Stale(WrappedStorage):
    """Reads what was under a key some time ago, as network filesystems do."""

    key = ""
    data = b""

    def read(self, key):
        return self.data if key == self.key else super().read(key)


def stale_job(rank, folder):
    """Rank 1 still sees the record that was replaced; its files are there, for another's sake."""
    first, second = torch.zeros(64, 256), torch.ones(64, 256)
    storage = Stale(LocalStorage(folder))

    def save(ckpt, prefix, value, **options):
        state = {"x": distribute_tensor(value, mesh_of((2,)), [Shard(0)])}
        chosen = SaveOptions(checkpoint_prefix=prefix, include_rng_state=False, **options)
        ckpt.save(state, options=chosen)

    with DistributedCheckpoint(storage=storage) as ckpt:
        save(ckpt, "one", first)
        save(ckpt, "keeper", first, incremental=True)
        old = storage.read("one/metadata.json")
        dist.barrier()
        save(ckpt, "one", second, overwrite=True)
        if rank == 1:
            storage.key, storage.data = "one/metadata.json", old
        save(ckpt, "two", first, incremental=True)


def test_a_rank_that_sees_an_older_record_of_the_base_writes_its_part(two, tmp_path):
    two.run(stale_job, tmp_path)
    catalog = Catalog(tmp_path)
    assert prefixes(catalog, "keeper") == {"model.x": ["one", "one"]}
    assert catalog.verify("keeper").is_intact
    assert not catalog.read("two")["model"]["x"].any()
    assert prefixes(catalog, "two") == {"model.x": [None, None]}


def shared_job(rank, folder):
    """Each rank wants little of a file, both together enough."""
    state = {"a": torch.zeros(5 * KIB), "b": torch.zeros(5 * KIB)}
    state |= {"x": torch.ones(130 * KIB), "y": torch.ones(130 * KIB)}
    with checkpointer(folder) as ckpt:
        chosen = SaveOptions(checkpoint_prefix="two", incremental=True, include_rng_state=False)
        ckpt.save(state, options=chosen)


def test_whether_a_file_is_worth_it_is_judged_by_what_all_ranks_want_of_it(two, tmp_path):
    state = {"a": torch.zeros(5 * KIB), "b": torch.zeros(5 * KIB)}
    state |= {"x": torch.zeros(130 * KIB), "y": torch.zeros(130 * KIB)}
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(state, options=SaveOptions(checkpoint_prefix="one", include_rng_state=False))
    two.run(shared_job, tmp_path)
    catalog = Catalog(tmp_path)
    assert len(list((tmp_path / "two").glob("shard-*"))) == 2
    assert prefixes(catalog, "two") == {
        "model.a": ["one"],
        "model.b": ["one"],
        "model.x": [None],
        "model.y": [None],
    }
    assert catalog.verify("two").is_intact


def refused_job(rank, folder):
    """What each rank is told if ranks differ about the option, and if one fails in comparing."""
    state = {"a": torch.arange(5000)}
    errors = []
    with checkpointer(folder) as ckpt:
        ckpt.save(state, options=SaveOptions(checkpoint_prefix="one"))
        try:
            options = SaveOptions(checkpoint_prefix="two", incremental=rank == 0)
            ckpt.save(state, options=options)
        except SaveError as error:
            errors.append(str(error))

        def fail(progress):
            if rank == 1 and progress.phase == "compare":
                raise SaveError("enough")

        try:
            options = SaveOptions(checkpoint_prefix="two", incremental=True, progress=fail)
            ckpt.save(state, options=options)
        except SaveError as error:
            errors.append(str(error))
        ckpt.save(state, options=SaveOptions(checkpoint_prefix="three", incremental=True))
    return errors


def test_an_error_while_comparing_is_that_of_all_ranks(two, tmp_path):
    for differing, failed in two.run(refused_job, tmp_path):
        assert "incremental" in differing
        assert "enough" in failed
        assert "phase compare" in failed
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["one", "three"]
    catalog = Catalog(tmp_path)
    assert prefixes(catalog, "three")["model.a"] == ["one"]
    assert catalog.read("three")["model"]["a"].tolist() == list(range(5000))
