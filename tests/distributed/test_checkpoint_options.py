"""Every option of a save, a load and a checkpointer does what it says; listing and deleting."""

import datetime as dt
import random
import re
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_jobs import checkpointer, parallel
from torch import nn

from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    Finding,
    LoadOptions,
    RequiredMetadata,
    SameWorldSize,
    SaveOptions,
    per_rank,
)
from holdfast.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptedError,
    OperationTimeoutError,
    RankFailedError,
    RankTimeoutError,
    ReplicaMismatchError,
    SaveError,
    TransientStorageError,
    ValidationError,
)
from holdfast.resilience import RetryPolicy
from holdfast.storage import LocalStorage, MemoryStorage, StorageOptions
from holdfast.storage._wrapped import WrappedStorage
from holdfast.testing import Fault, FaultyStorage, RankGang

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as ranks:
        yield ranks


@pytest.fixture
def ckpt(tmp_path):
    with checkpointer(tmp_path) as made:
        yield made


class Reads(WrappedStorage):
    """Notes the memory that every read of a data file goes into."""

    def __init__(self, storage):
        super().__init__(storage)
        self.into = []

    def _through(self, method, key, call):
        return call()

    def read_into(self, key, ranges):
        self.into += [np.frombuffer(each.into, np.uint8) for each in ranges]
        self._inner.read_into(key, ranges)

    @property
    def nbytes(self):
        return sum(each.nbytes for each in self.into)


def net_of(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def stepped(net, lr=0.5):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def save(ckpt, model, optimizer=None, *, extra=None, prefix="a", **options):
    options = SaveOptions(checkpoint_prefix=prefix, **options)
    return ckpt.save(model, optimizer, options, extra=extra)


def load(ckpt, model=None, optimizer=None, *, extra=None, prefix="a", **options):
    options = LoadOptions(checkpoint_prefix=prefix, **options)
    return ckpt.load(model, optimizer, options, extra=extra)


def run_long(gang, function, *args):
    """As ``gang.run``, for what a busy machine may not do in a minute."""
    gang.start(function, *args)
    outcomes = gang.outcomes(110)
    for outcome in outcomes:
        if (error := outcome.failure()) is not None:
            raise error
    return [outcome.value for outcome in outcomes]


def data_files(folder):
    return sorted(path.name for path in Path(folder).glob("*.safetensors"))


# ---------------------------------------------------------- what is put on disk


def save_some(rank, folder, prefix, **options):
    with checkpointer(folder) as ckpt:
        torch.manual_seed(1)
        model = {"w": torch.zeros(300, 1000), "v": torch.arange(5000.0)}
        save(ckpt, model, prefix=prefix, extra={"mine": per_rank(torch.ones(9))}, **options)


def test_formats_differ_in_files(gang, tmp_path):
    for form in ("single_file", "multi_shard", "consolidated"):
        gang.run(save_some, tmp_path, form, format=form)
    assert len(data_files(tmp_path / "single_file")) == 1
    shards = data_files(tmp_path / "multi_shard")
    assert [re.sub("-[0-9a-f]{16}", "", name) for name in shards] == [
        "shard-0.safetensors",
        "shard-1.safetensors",
    ]
    files = data_files(tmp_path / "consolidated")
    assert len([name for name in files if name.startswith("model-00001-of-00001")]) == 1
    assert (tmp_path / "consolidated" / "model.safetensors.index.json").exists() or any(
        name.startswith("model") for name in files
    )
    with checkpointer(tmp_path) as ckpt:
        for info in ckpt.list_checkpoints():
            assert info.format == info.prefix


@pytest.mark.parametrize("form", ["single_file", "multi_shard"])
def test_levels_of_compression_differ_in_size(gang, tmp_path, form):
    sizes = []
    for level in ("none", "fast", "balanced", "maximum"):
        gang.run(save_some, tmp_path, level, format=form, compression_level=level)
        with checkpointer(tmp_path) as ckpt:
            sizes.append(ckpt.catalog.info(level).size_bytes)
            found = {"w": torch.ones(300, 1000), "v": torch.zeros(5000)}
            load(ckpt, found, prefix=level)
        assert not found["w"].any()
        assert torch.equal(found["v"], torch.arange(5000.0))
    none, fast, balanced, maximum = sizes
    assert none > 4 * fast
    assert fast >= balanced >= maximum


def save_large(rank, folder):
    net = parallel(nn.Linear(1024, 6 * 1024, bias=False), "ddp", dist.get_world_size())
    with torch.no_grad():
        net.module.weight.copy_(torch.arange(6 * MIB).view(6 * 1024, 1024))
    with checkpointer(folder) as ckpt:
        save(ckpt, net, include_rng_state=False)


def test_a_large_replicated_tensor_is_written_once_and_in_equal_parts(gang, tmp_path):
    gang.run(save_large, tmp_path)
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("shard-*")]
    assert len(sizes) == 2
    assert sum(sizes) < 25 * MIB  # 24 MiB of tensor, and two headers
    assert abs(sizes[0] - sizes[1]) <= 8 * MIB
    net = nn.Linear(1024, 6 * 1024, bias=False)
    with checkpointer(tmp_path) as ckpt:
        load(ckpt, net)
    assert torch.equal(net.weight.view(-1), torch.arange(6.0 * MIB))


FORMS = ("multi_shard", "single_file", "consolidated")


def save_changing(rank, folder):
    """One checkpointer, which remembers its plans, and a state that changes in values and form."""
    with checkpointer(folder) as ckpt:
        for turn, rows in enumerate((5, 5, 5, 7, 5)):
            for form in FORMS:
                net = parallel(nn.Linear(3, rows), "fsdp", dist.get_world_size())
                nn.init.constant_(net.weight, turn)
                extra = {"mine": per_rank(torch.full((turn % 2 + rank,), turn)), "turn": turn}
                save(ckpt, net, prefix=f"{form}{turn}", extra=extra, format=form)
        found = []
        for turn, rows in enumerate((5, 5, 5, 7, 5)):
            for form in FORMS:
                net = parallel(nn.Linear(3, rows), "fsdp", dist.get_world_size())
                extra = {"mine": None, "turn": None}
                load(ckpt, net, prefix=f"{form}{turn}", extra=extra)
                assert extra["mine"].tolist() == [turn] * (turn % 2 + rank)
                assert extra["turn"] == turn
                found.append(bool((net.weight.to_local() == turn).all()))
    return found


def test_plans_of_earlier_saves_do_not_matter(gang, tmp_path):
    assert run_long(gang, save_changing, tmp_path) == [[True] * 15] * 2


# --------------------------------------------------------- parts of the state


def test_without_its_optimizer(ckpt):
    net = net_of(1)
    optimizer = stepped(net)
    save(ckpt, net, optimizer, include_optimizer=False)
    names = ckpt.catalog.open("a").tensors
    assert not [name for name in names if name.startswith("optimizer")]
    other = net_of(2)
    with pytest.raises(ValidationError, match=r"not in the checkpoint.*\noptimizer|optimizer"):
        load(ckpt, other, stepped(other))
    loaded = stepped(other, lr=0.25)
    result = load(ckpt, other, loaded, strict=False)
    assert torch.equal(other.weight, net.weight)
    assert loaded.param_groups[0]["lr"] == 0.25
    assert any(place.startswith("optimizer") for place in result.report.missing)


def test_load_optimizer_leaves_it_alone(ckpt):
    net = net_of(1)
    save(ckpt, net, stepped(net))
    other = net_of(2)
    loaded = stepped(other, lr=0.125)
    moment = loaded.state[other.weight]["momentum_buffer"].clone()
    result = load(ckpt, other, loaded, load_optimizer=False)
    assert torch.equal(other.weight, net.weight)
    assert loaded.param_groups[0]["lr"] == 0.125
    assert torch.equal(loaded.state[other.weight]["momentum_buffer"], moment)
    assert result.optimizer_state is None


def test_save_model_only(ckpt):
    net = net_of(1)
    ckpt.save_model_only(net, SaveOptions(checkpoint_prefix="a", step=9))
    tree = ckpt.catalog.read("a")
    assert tree.keys() == {"model"}
    other = net_of(2)
    assert load(ckpt, other).metadata.step == 9
    assert torch.equal(other.weight, net.weight)


def test_include_loads_only_what_fits(ckpt):
    net = net_of(1)
    save(ckpt, net, stepped(net), extra={"a": 1, "b": {"c": 2}})
    other = net_of(2)
    bias, loaded = other.bias.detach().clone(), stepped(other, lr=0.125)
    bias = other.bias.detach().clone()
    extra = {"a": 0, "b": {"c": 0}}
    load(ckpt, other, loaded, extra=extra, include=["model.weight", "extra.b"])
    assert torch.equal(other.weight, net.weight)
    assert torch.equal(other.bias, bias)
    assert loaded.param_groups[0]["lr"] == 0.125
    assert extra == {"a": 0, "b": {"c": 2}}
    load(ckpt, other, loaded, include=["optimizer.*"])
    assert loaded.param_groups[0]["lr"] == 0.5
    assert torch.equal(other.bias, bias)


def test_strict_refuses_and_not_strict_loads_what_fits(ckpt):
    save(ckpt, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1), "d": torch.ones(2)})

    def target():
        return {
            "a": torch.zeros(2),
            "b": torch.zeros(4),
            "d": torch.zeros(2, dtype=torch.float64),
            "e": torch.zeros(1),
        }

    model = target()
    with pytest.raises(ValidationError) as raised:
        load(ckpt, model)
    for words in ("model.e", "model.c", "model.b: (3,) is stored, (4,) is wanted", "float64"):
        assert words in str(raised.value)
    assert not any(tensor.any() for tensor in model.values())
    report = load(ckpt, model, strict=False).report
    assert model["a"].tolist() == [1, 1]
    assert model["d"].tolist() == [1, 1]
    assert model["d"].dtype == torch.float64
    assert not model["b"].any()
    assert report.missing == ("model.e",)
    assert report.unexpected == ("model.c",)
    assert [each.place for each in report.shapes] == ["model.b"]
    assert [each.place for each in report.dtypes] == ["model.d"]


# -------------------------------------------------------------- what is recorded


def test_custom_metadata_step_and_metrics(ckpt):
    before = dt.datetime.now(dt.UTC)
    custom = {"git": "abc", "shape": (1, 2), "nested": {"lr": 0.1}}
    save(ckpt, net_of(1), custom_metadata=custom, step=12, metrics={"loss": 0.5, "acc": 1})
    (info,) = ckpt.list_checkpoints()
    assert (info.prefix, info.step, info.metrics) == ("a", 12, {"loss": 0.5, "acc": 1.0})
    assert info.world_size == 1
    assert info.size_bytes > 0
    metadata = load(ckpt, net_of(2)).metadata
    assert dict(metadata.custom_metadata) == custom
    assert (metadata.prefix, metadata.step, dict(metadata.metrics)) == ("a", 12, info.metrics)
    assert before - dt.timedelta(seconds=1) <= metadata.created <= dt.datetime.now(dt.UTC)


def test_a_name_is_made_if_none_is_given(ckpt):
    names = {ckpt.save(net_of(1)) for _ in range(3)}
    assert len(names) == 3
    for name in names:
        assert re.fullmatch(r"checkpoint_\d{8}_\d{6}(-\d+)?", name)
    assert {info.prefix for info in ckpt.list_checkpoints()} == names


def save_unnamed(rank, folder):
    with checkpointer(folder) as ckpt:
        return [ckpt.save(net_of(1)) for _ in range(3)]


def test_ranks_agree_on_the_name_that_is_made(gang, tmp_path):
    one, other = gang.run(save_unnamed, tmp_path)
    assert one == other
    assert len({*one}) == 3


def test_a_made_name_that_is_taken_gets_a_number(ckpt, tmp_path):
    """Every name of the next minute is taken, by a checkpoint or by something unknown."""
    now = dt.datetime.now(dt.UTC)
    for second in range(60):
        name = f"checkpoint_{now + dt.timedelta(seconds=second):%Y%m%d_%H%M%S}"
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("not ours")
    assert ckpt.save(net_of(1)).endswith("-2")


def test_overwrite_replaces_in_one_step(ckpt, tmp_path):
    save(ckpt, net_of(1), step=1)
    with pytest.raises(CheckpointExistsError, match=r"overwrite"):
        save(ckpt, net_of(2), step=2)
    assert ckpt.catalog.info("a").step == 1
    files = data_files(tmp_path / "a")
    save(ckpt, net_of(2), step=2, overwrite=True)
    assert ckpt.catalog.info("a").step == 2
    assert not {*files} & {*data_files(tmp_path / "a")}
    other = net_of(3)
    load(ckpt, other)
    assert torch.equal(other.weight, net_of(2).weight)
    save(ckpt, net_of(1), prefix="new", overwrite=True)


def test_listing_and_deleting(ckpt, tmp_path):
    assert ckpt.list_checkpoints() == []
    for name in ("b", "c", "a"):
        save(ckpt, net_of(1), prefix=name)
    (tmp_path / "partial").mkdir()
    for file in (tmp_path / "b").glob("shard-*"):
        (tmp_path / "partial" / file.name).write_bytes(file.read_bytes())
    assert [info.prefix for info in ckpt.list_checkpoints()] == ["a", "c", "b"]
    ckpt.delete_checkpoint("c")
    assert [info.prefix for info in ckpt.list_checkpoints()] == ["a", "b"]
    assert not data_files(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError, match="c"):
        load(ckpt, net_of(2), prefix="c")
    with pytest.raises(CheckpointNotFoundError):
        ckpt.delete_checkpoint("c")
    load(ckpt, net_of(2), prefix="b")


def test_a_load_needs_a_name(ckpt):
    with pytest.raises(ValueError, match=r"checkpoint_prefix=\.\.\.\) is required; list_check"):
        ckpt.load(net_of(1))


# ----------------------------------------------------------------------- progress


class Stop(Exception):  # noqa: N818 -- not an error
    pass


def test_progress_is_told_and_may_stop(ckpt, tmp_path):
    told = []
    net = net_of(1)
    save(ckpt, net, progress=told.append)
    write = [each for each in told if each.phase == "write"]
    assert {each.operation for each in told} == {"save"}
    assert [each.phase for each in told if each.done_bytes == each.total_bytes][-1] == "commit"
    assert write[0].done_bytes == 0
    assert write[-1].done_bytes == write[-1].total_bytes >= 80
    told.clear()
    load(ckpt, net_of(2), progress=told.append)
    assert {each.operation for each in told} == {"load"}
    read = [each for each in told if each.phase == "read"]
    assert read[-1].done_bytes == read[-1].total_bytes >= 80

    def stop(progress):
        if progress.phase in {"write", "read"}:
            raise Stop

    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RankFailedError, match="Stop"):
        save(ckpt, net, prefix="b", progress=stop)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == [
        path for path in before if path.is_file()
    ]
    other = net_of(2)
    with pytest.raises(RankFailedError, match="Stop"):
        load(ckpt, other, progress=stop)
    assert torch.equal(other.weight, net_of(2).weight)


# ----------------------------------------------------------- reading and strategies


def fsdp_of(rank, rows):
    net = nn.Linear(512, rows, bias=False)
    return parallel(net, "fsdp", dist.get_world_size())


def save_rows(rank, folder, rows):
    net = fsdp_of(rank, rows)
    with torch.no_grad():
        net.weight.copy_(torch.ones(rows, 512))
    with checkpointer(folder) as ckpt:
        save(ckpt, net, include_rng_state=False)


def bytes_read(rank, folder, strategy, rows, kind):
    reads = Reads(LocalStorage(folder))
    net = fsdp_of(rank, rows) if kind == "fsdp" else nn.Linear(512, rows, bias=False)
    with checkpointer(reads) as ckpt:
        load(ckpt, net, resharding_strategy=strategy)
    weight = net.weight.full_tensor() if kind == "fsdp" else net.weight
    assert bool((weight == 1).all())
    return reads.nbytes


def test_strategies_differ_in_who_reads_what(gang, tmp_path):
    rows = 8192
    whole = rows * 512 * 4  # 16 MiB
    with checkpointer(tmp_path) as ckpt:  # one box of all of it, by one rank
        net = nn.Linear(512, rows, bias=False)
        nn.init.ones_(net.weight)
        save(ckpt, net, include_rng_state=False)
    read = {
        (kind, strategy): gang.run(bytes_read, tmp_path, strategy, rows, kind)
        for kind in ("fsdp", "ddp")
        for strategy in ("parallel", "broadcast", "simple")
    }
    slack = MIB  # headers, and chunks at the edges
    for each in read["fsdp", "parallel"]:
        assert each < whole / 2 + slack
    for each in read["fsdp", "simple"]:
        assert whole <= each < whole + slack
    for each in read["ddp", "parallel"]:
        assert whole <= each < whole + slack
    assert whole <= sum(read["ddp", "broadcast"]) < whole + slack
    for each in read["ddp", "broadcast"]:
        assert each < whole / 2 + slack


def test_in_place_reads_into_the_tensor_itself(tmp_path):
    reads = Reads(LocalStorage(tmp_path))
    with checkpointer(reads) as ckpt:
        save(ckpt, {"w": torch.arange(MIB, dtype=torch.float32)}, include_rng_state=False)
        for in_place in (False, True):
            model = {"w": torch.zeros(MIB)}
            start = model["w"].data_ptr()
            reads.into.clear()
            load(ckpt, model, in_place=in_place)
            direct = sum(
                each.nbytes for each in reads.into if start <= each.ctypes.data < start + 4 * MIB
            )
            assert direct == (4 * MIB if in_place else 0)
            assert torch.equal(model["w"], torch.arange(MIB, dtype=torch.float32))


# ------------------------------------------------------------------------ replicas


def save_differing(rank, folder, what, *, kind="ddp", prefix="a", **options):
    """Ranks that should hold the same and do not. Says what the error was."""
    world = dist.get_world_size()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    net = parallel(net, kind, world)
    inner = net.module if kind == "ddp" else net
    if what == "buffer":
        inner[1].running_mean.fill_(rank)
    elif what == "one number":
        with torch.no_grad():
            inner[0].weight[32, 32] = rank
    else:
        with torch.no_grad():
            local = inner[0].weight
            local = local.to_local() if kind == "hsdp" else local
            local.fill_(rank // 2 if kind == "hsdp" else rank)
    with checkpointer(folder) as ckpt:
        try:
            save(ckpt, net, prefix=prefix, **options)
        except SaveError as error:
            return f"{type(error).__name__}: {error.message}"
        return None


def test_buffers_that_differ_are_named(gang, tmp_path):
    for message in gang.run(save_differing, tmp_path, "buffer"):
        assert message.startswith(ReplicaMismatchError.__name__)
        assert "model.1.running_mean" in message
        assert "one value on rank 0, another on rank 1" in message
        assert "replicas_from=0" in message
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.list_checkpoints() == []


def test_parameters_that_differ_are_named(gang, tmp_path):
    """All over, they are noticed; one number somewhere, if it is asked for."""
    assert gang.run(save_differing, tmp_path, "one number") == [None, None]
    found = gang.run(save_differing, tmp_path, "one number", prefix="b", check_replicas=True)
    found += gang.run(save_differing, tmp_path, "weight", prefix="b")
    for message in found:
        assert message.startswith(ReplicaMismatchError.__name__)
        assert "model.0.weight" in message
        assert "bias" not in message
    with checkpointer(tmp_path) as ckpt:
        assert [info.prefix for info in ckpt.list_checkpoints()] == ["a"]


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize("form", ["single_file", "multi_shard", "consolidated"])
def test_of_replicas_that_differ_one_may_be_chosen(gang, tmp_path, chosen, form):
    for what, name in (("buffer", "1.running_mean"), ("weight", "0.weight")):
        options = {"check_replicas": True, "replicas_from": chosen, "format": form}
        assert gang.run(save_differing, tmp_path, what, prefix=what, **options) == [None, None]
        with checkpointer(tmp_path) as ckpt:
            tree = ckpt.catalog.read(what)
        assert (tree["model"][name] == chosen).all()


def test_replicas_of_shards_are_compared_too(tmp_path):
    with RankGang(4) as four:
        options = {"kind": "hsdp", "check_replicas": True}
        for message in four.run(save_differing, tmp_path, "weight", **options):
            assert "model.0.weight" in message
        options["replicas_from"] = 2  # has a part only
        for message in four.run(save_differing, tmp_path, "weight", **options):
            assert "cannot be chosen between" in message
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.list_checkpoints() == []


# ------------------------------------------------------------- random generators


def draw():
    return random.random(), float(np.random.rand()), torch.rand(1).item()  # noqa: NPY002


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def save_rng(rank, folder, include):
    seed_all(100 + rank)
    with checkpointer(folder) as ckpt:
        save(ckpt, {"w": torch.ones(1)}, include_rng_state=include, overwrite=True)
    return draw()


def load_rng(rank, folder, remap=None, **options):
    seed_all(200 + rank)
    with checkpointer(folder) as ckpt:
        result = load(ckpt, {"w": torch.zeros(1)}, remap=remap, **options)
    return draw(), result.not_restored


def untouched(rank):
    seed_all(200 + rank)
    return draw()


def swap(rank, world_size, saved_world_size):
    return (rank + 1) % saved_world_size


def test_every_rank_gets_its_own_generators_back(gang, tmp_path):
    drawn = gang.run(save_rng, tmp_path, include=True)
    assert drawn[0] != drawn[1]
    assert gang.run(load_rng, tmp_path) == [(each, ()) for each in drawn]
    # On as many ranks there is nothing to remap.
    assert gang.run(load_rng, tmp_path, swap) == [(each, ()) for each in drawn]


def test_generators_are_left_alone_unless_saved_and_wanted(gang, tmp_path):
    fresh = gang.run(untouched)
    gang.run(save_rng, tmp_path, include=True)
    assert gang.run(load_rng, tmp_path, load_rng_state=False) == [(each, ()) for each in fresh]
    gang.run(save_rng, tmp_path, include=False)
    assert gang.run(load_rng, tmp_path) == [(each, ()) for each in fresh]


def test_on_another_number_of_ranks_generators_are_remapped_or_listed(gang, tmp_path):
    drawn = gang.run(save_rng, tmp_path, include=True)
    assert load_rng(0, tmp_path) == (untouched(0), ("rng",))
    assert load_rng(0, tmp_path, swap) == (drawn[1], ())
    assert load_rng(0, tmp_path, load_rng_state=False) == (untouched(0), ())


# --------------------------------------------------------- values of each rank's own


def save_own(rank, folder):
    extra = {
        "marked": per_rank({"n": rank, "t": torch.full((rank + 1,), rank)}),
        "differs": {"same": 1, "seen": 10 + rank, "where": torch.tensor([rank])},
        "list": [1, rank],
        "all": torch.ones(2),
        "array": np.full(2000, rank, np.int64),
    }
    with checkpointer(folder) as ckpt:
        save(ckpt, {"w": torch.ones(1)}, extra=extra)


def blank():
    return {
        "marked": {"n": -1, "t": None},
        "differs": {"same": 0, "seen": 0, "where": torch.tensor([-1])},
        "list": [0, 0],
        "all": torch.zeros(2),
        "array": None,
    }


def plain(extra):
    return {
        "marked": (extra["marked"]["n"], extra["marked"]["t"].tolist()),
        "differs": {**extra["differs"], "where": extra["differs"]["where"].tolist()},
        "list": extra["list"],
        "all": extra["all"].tolist(),
        "array": sorted({*extra["array"].tolist()}),
    }


def load_own(rank, folder, **options):
    extra = blank()
    with checkpointer(folder) as ckpt:
        result = load(ckpt, {"w": torch.zeros(1)}, extra=extra, **options)
    return plain(extra), result.not_restored


def own_of(rank):
    return {
        "marked": (rank, [rank] * (rank + 1)),
        "differs": {"same": 1, "seen": 10 + rank, "where": [rank]},
        "list": [1, rank],
        "all": [1, 1],
        "array": [rank],
    }


def test_values_that_differ_or_are_marked_are_kept_for_each_rank(gang, tmp_path):
    gang.run(save_own, tmp_path)
    assert gang.run(load_own, tmp_path) == [(own_of(0), ()), (own_of(1), ())]


def test_values_of_ranks_on_another_number_of_ranks(gang, tmp_path):
    gang.run(save_own, tmp_path)
    with pytest.raises(ValidationError) as raised:
        load_own(0, tmp_path, load_rng_state=False)
    for words in ("extra.marked", "extra.differs.seen", "extra.list.1", "extra.array", "remap"):
        assert words in str(raised.value)
    assert load_own(0, tmp_path, remap=swap) == (own_of(1), ())
    extra = blank()
    with checkpointer(tmp_path) as ckpt:
        result = load(ckpt, {"w": torch.zeros(1)}, extra=extra, strict=False)
    assert extra["marked"] == {"n": -1, "t": None}
    assert extra["differs"]["same"] == 1
    assert extra["differs"]["seen"] == 0
    assert extra["all"].tolist() == [1, 1]
    assert extra["list"] == [0, 0]
    assert {"rng", "extra.marked", "extra.differs.seen", "extra.list.1"} <= {*result.not_restored}


class Loader:
    """As a data loader that is at another place on every rank."""

    def __init__(self, at):
        self.state = {"at": at, "epoch": 3}

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


def save_loader(rank, folder):
    with checkpointer(folder) as ckpt:
        save(ckpt, net_of(1), extra={"loader": Loader(rank)}, include_rng_state=False)


def load_loader(rank, folder, **options):
    loader = Loader(-1)
    with checkpointer(folder) as ckpt:
        result = load(ckpt, net_of(2), extra={"loader": loader}, **options)
    return loader.state["at"], result.not_restored


def test_a_stateful_of_each_rank_is_left_alone_on_another_number_of_ranks(gang, tmp_path):
    gang.run(save_loader, tmp_path)
    assert gang.run(load_loader, tmp_path) == [(0, ()), (1, ())]
    assert load_loader(0, tmp_path, remap=swap) == (1, ())
    assert load_loader(0, tmp_path, strict=False) == (-1, ("extra.loader.at",))
    with pytest.raises(ValidationError, match=r"extra\.loader\.at: each rank has its own"):
        load_loader(0, tmp_path)


def any_tree(rng, rank, depth=0):
    """A tree of any form. ``rng`` is the same on all ranks; what differs, differs by the rank."""
    kind = rng.randrange(13 if depth < 4 else 6)
    mine = rank if rng.random() < 0.3 else 0
    number = rng.randrange(10**6)
    size = rng.randrange(4)

    def inner():
        return any_tree(rng, rank, depth + 1)

    makers = [
        lambda: number + mine,
        lambda: f"{number} {mine}",
        lambda: torch.full((size,), float(number + mine)),
        lambda: torch.full((2 + mine,), float(number)),
        lambda: np.full((3, 2000)[size % 2], number + mine),
        lambda: mine or [None, True, 1.5, (), [], {}, "", b"x", 2j][number % 9],
        lambda: {f"k{n}": inner() for n in range(size)},
        lambda: {f"k{n}": inner() for n in range(size)},
        lambda: [inner() for _ in range(size)],
        lambda: tuple([inner() for _ in range(size)]),
        lambda: OrderedDict((f"o{n}", inner()) for n in range(size)),
        lambda: {(n if n % 2 else ("t", n)): inner() for n in range(size)},
        lambda: {f"key{mine}": inner(), "same": inner()},
    ]
    return makers[kind]()


def equal(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def emptied(value):
    """The same tree with zeros in its tensors and arrays."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value * 0
    if isinstance(value, dict):
        return type(value)((key, emptied(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value)(map(emptied, value))
    return value


def save_and_load_any(rank, folder, seeds):
    """The seeds of those trees that came back otherwise."""
    wrong = []
    with checkpointer(folder) as ckpt:
        for seed in seeds:
            rng = random.Random(seed)
            tree = {f"e{n}": any_tree(rng, rank) for n in range(4)}
            own = any_tree(rng, rank)
            form = ("single_file", "multi_shard", "consolidated")[seed % 3]
            extra = {**tree, "own": per_rank(own)}
            save(ckpt, {"w": torch.ones(3)}, extra=extra, prefix=f"p{seed}", format=form)
            tree["own"] = own
            strategy = ("parallel", "broadcast", "simple")[seed // 3 % 3]
            for found in (dict.fromkeys(tree), emptied(tree)):
                load(ckpt, extra=found, prefix=f"p{seed}", resharding_strategy=strategy)
                if not equal(found, tree):
                    wrong.append(seed)
    return wrong


def save_reshaped(rank, folder):
    """Tensors whose bytes are the same on all ranks, though they are not."""
    extra = {
        "shape": torch.ones(6).view((2, 3) if rank else (3, 2)),
        "empty": torch.empty((0, 2) if rank else (0, 3)),
        "dtype": torch.zeros(2, dtype=torch.int32 if rank else torch.float32),
        "array": np.zeros(2000, np.int64 if rank else np.float64),
    }
    with checkpointer(folder) as ckpt:
        save(ckpt, {"w": torch.ones(1)}, extra=extra)
        found = dict.fromkeys(extra)
        load(ckpt, extra=found)
    return equal(found, extra)


def test_the_same_bytes_in_another_shape_or_dtype_are_another_value(gang, tmp_path):
    assert gang.run(save_reshaped, tmp_path) == [True, True]


def test_trees_that_differ_between_ranks_in_any_way(gang, tmp_path):
    assert run_long(gang, save_and_load_any, tmp_path, range(30)) == [[], []]


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_many_trees_that_differ_between_ranks_in_any_way(tmp_path, first):
    with RankGang(3) as three:
        found = three.run(save_and_load_any, tmp_path, range(first, first + 100))
    assert found == [[], [], []]


# ----------------------------------------------------------------------- timeouts


def late(rank, folder, operation, default_s, timeout_s):
    """Rank 1 comes only when rank 0 has given up waiting for it."""
    with checkpointer(folder, default_timeout_s=default_s) as ckpt:
        caught = None
        if rank == 0:
            try:
                if operation == "save":
                    save(ckpt, net_of(1), timeout_s=timeout_s)
                else:
                    load(ckpt, net_of(1), timeout_s=timeout_s)
            except RankTimeoutError as error:
                caught = error.ranks, error.timeout_s
        dist.barrier()
        return caught


@pytest.mark.parametrize("operation", ["save", "load"])
def test_how_long_ranks_wait_for_each_other(gang, tmp_path, operation):
    with checkpointer(tmp_path) as ckpt:
        save(ckpt, net_of(1))
    assert gang.run(late, tmp_path, operation, 60, 3)[0] == ((1,), 3)
    assert gang.run(late, tmp_path, operation, 3, None)[0] == ((1,), 3)


class Slow(WrappedStorage):
    """Takes a while for each piece of a file."""

    def _through(self, method, key, call):
        if method in {"write_at", "read_into"}:
            time.sleep(0.1)
        return call()


def test_one_process_has_a_timeout_too(tmp_path):
    with checkpointer(Slow(LocalStorage(tmp_path))) as ckpt:
        model = {f"w{n}": torch.rand(MIB // 4) for n in range(4)}
        with pytest.raises(OperationTimeoutError):
            save(ckpt, model, timeout_s=0.15)
        assert ckpt.list_checkpoints() == []
        assert not data_files(tmp_path / "a")
        save(ckpt, model, timeout_s=60)
        before = {name: torch.zeros(MIB // 4) for name in model}
        with pytest.raises(OperationTimeoutError):
            load(ckpt, before, timeout_s=0.15)
        assert not any(tensor.any() for tensor in before.values())


# ------------------------------------------------------- options of the checkpointer


@pytest.mark.parametrize("form", [str, Path, "file://{}".format, LocalStorage])
def test_the_storage_is_one_or_says_where(tmp_path, form):
    with checkpointer(form(tmp_path)) as ckpt:
        save(ckpt, net_of(1))
    assert (tmp_path / "a" / "metadata.json").exists()


def test_the_storage_may_be_in_options_in_memory_or_in_the_default_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with DistributedCheckpoint.create() as ckpt:
        save(ckpt, net_of(1))
    assert (tmp_path / "checkpoints" / "a" / "metadata.json").exists()
    storage = MemoryStorage()
    with checkpointer(storage) as ckpt:
        save(ckpt, net_of(1))
    with DistributedCheckpoint(storage=storage) as ckpt:
        other = net_of(2)
        load(ckpt, other)
        assert torch.equal(other.weight, net_of(1).weight)
    with checkpointer(StorageOptions(url=str(tmp_path / "there"))) as ckpt:
        save(ckpt, net_of(1))
    assert (tmp_path / "there" / "a" / "metadata.json").exists()


@pytest.mark.parametrize("method", ["open_writer", "finish"])
def test_the_retry_policy_is_for_what_may_pass(method):
    def run(retries):
        inner = MemoryStorage()
        fault = Fault(method, error=TransientStorageError("busy"))
        faulty = FaultyStorage(inner, [fault])
        policy = RetryPolicy(max_retries=retries, initial_delay_s=0.001, max_delay_s=0.01)
        with checkpointer(faulty, retry_policy=policy) as ckpt:
            save(ckpt, net_of(1))
            other = net_of(2)
            load(ckpt, other)
        assert not faulty.unfired
        assert torch.equal(other.weight, net_of(1).weight)

    run(retries=2)
    with pytest.raises(TransientStorageError):
        run(retries=0)


class Says:
    name = "my check"

    def __init__(self, *findings):
        self.findings = findings
        self.seen = []

    def check(self, checkpoint, *world_size):
        self.seen.append((checkpoint.info.prefix, *world_size))
        return self.findings


def test_checks_are_asked_before_every_load(tmp_path):
    integrity, compatibility = Says(Finding.warning("old")), Says(Finding.error("not for you"))
    with checkpointer(tmp_path, integrity_checkers=[integrity]) as ckpt:
        save(ckpt, net_of(1))
        result = load(ckpt, net_of(2))
        assert result.validation.has_warnings
        assert "old" in result.validation.summary()
        assert integrity.seen == [("a",)]
    with checkpointer(tmp_path, compatibility_checkers=[compatibility]) as ckpt:
        net = net_of(2)
        with pytest.raises(ValidationError, match="not for you"):
            load(ckpt, net)
        assert torch.equal(net.weight, net_of(2).weight)
        assert compatibility.seen == [("a", 1)]
        assert load(ckpt, net, skip_validation=True).validation is None
        assert len(compatibility.seen) == 1
        assert torch.equal(net.weight, net_of(1).weight)


def refused_on_all(rank, folder):
    net = net_of(2)
    checkers = {"compatibility_checkers": [SameWorldSize()]}
    with checkpointer(folder, **checkers) as ckpt:
        try:
            load(ckpt, net)
        except ValidationError as error:
            return str(error), torch.equal(net.weight, net_of(2).weight)
    return None


def test_a_check_refuses_on_all_ranks(gang, tmp_path):
    with checkpointer(tmp_path, integrity_checkers=[RequiredMetadata(["git"])]) as ckpt:
        save(ckpt, net_of(1))
        with pytest.raises(ValidationError, match="git"):
            load(ckpt, net_of(2))
    for message, unchanged in gang.run(refused_on_all, tmp_path):
        assert "2" in message
        assert unchanged


def test_digests_are_compared_without_validation_too(ckpt, tmp_path):
    save(ckpt, {"w": torch.ones(1000)}, include_rng_state=False)
    (file,) = (tmp_path / "a").glob("shard-*")
    data = bytearray(file.read_bytes())
    data[data.index(np.ones(9, np.float32).tobytes())] ^= 1
    file.write_bytes(data)
    model = {"w": torch.zeros(1000)}
    with pytest.raises(CorruptedError, match=r"model\.w"):
        load(ckpt, model, skip_validation=True)
    assert not model["w"].any()


ELSEWHERE = {
    "incremental": "unit/test_incremental.py",
    "snapshot": "unit/test_save_async.py",
    "when_busy": "unit/test_save_async_faults.py",
    "staging_bytes": "unit/test_save_async.py",
    "on_save": "unit/test_save_async.py",
    "retention": "unit/test_upkeep.py",
}


def test_every_option_is_in_this_file_or_in_one_that_is_named():
    """An option that is added needs a test there that fails without it."""
    here = Path(__file__)
    for options in (SaveOptions, LoadOptions, CheckpointOptions):
        for name in options.__dataclass_fields__:
            path = here.parent.parent / ELSEWHERE[name] if name in ELSEWHERE else here
            text = path.read_text(encoding="utf-8")
            assert re.search(rf'\b{name}=|"{name}"', text), f"{options.__name__}.{name}"
