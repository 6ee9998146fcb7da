"""What cannot be saved or loaded is refused in words to act on, and nothing has changed."""

import copy
import os
import random
import re
import shutil
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_jobs import checkpointer, mesh_of, parallel
from torch import nn
from torch.distributed.tensor import DTensor, Partial

import holdfast
from holdfast.catalog._committed import new_tombstone
from holdfast.distributed import LoadOptions, SaveOptions, per_rank
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    CorruptedError,
    IncompatibleVersionError,
    LoadError,
    NoSpaceError,
    RankFailedError,
    ReplicaMismatchError,
    SaveError,
    StorageError,
    ValidationError,
)
from holdfast.format import encode_record
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.testing import Fault, FaultyStorage, RankGang


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as ranks:
        yield ranks


@pytest.fixture
def ckpt(tmp_path):
    with checkpointer(tmp_path) as made:
        yield made


def net_of(seed, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))


def save(ckpt, model, optimizer=None, *, extra=None, prefix="a", **options):
    options = SaveOptions(checkpoint_prefix=prefix, **options)
    return ckpt.save(model, optimizer, options, extra=extra)


def load(ckpt, model=None, optimizer=None, *, extra=None, prefix="a", **options):
    options = LoadOptions(checkpoint_prefix=prefix, **options)
    return ckpt.load(model, optimizer, options, extra=extra)


def files_in(folder):
    """Every file but those that a storage keeps for itself."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )


# ------------------------------------------------------------------ all or nothing


class Training:
    """Everything that a load may change, and whether it has been."""

    def __init__(self, seed, kind="ddp"):
        self.net = net_of(seed)
        self.model = parallel(self.net, kind, dist.get_world_size()) if kind else self.net
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=seed)
        self.step()
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 0.5, 3)
        self.array = np.full(3000, float(seed))
        self.loader = Failing(seed)
        self.extra = {
            "scheduler": self.scheduler,
            "array": self.array,
            "tensor": torch.full((3,), float(seed)),
            "step": seed,
            "nested": {"list": [seed, torch.full((2,), float(seed))]},
            "mine": per_rank(seed),
            "loader": self.loader,
            "after": seed,
        }

    def step(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def snapshot(self):
        """Copies of all values, and which objects they are in."""
        values = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "extra": {k: v for k, v in self.extra.items() if k not in ("scheduler", "loader")},
            "loader": self.loader.state_dict(),
            "rng": (random.getstate(), torch.get_rng_state(), np.random.get_state()),  # noqa: NPY002
        }
        objects = [*self.model.parameters(), *self.extra.values()]
        objects += [self.optimizer.state[p] for p in self.model.parameters()]
        objects += [t for state in self.optimizer.state.values() for t in state.values()]
        return copy.deepcopy(values), [*map(id, objects)]


class Failing:
    """Refuses to be loaded if it is told to, after it has changed half of itself."""

    def __init__(self, seed):
        self.one = self.two = seed
        self.fails = False

    def state_dict(self):
        return {"one": self.one, "two": self.two}

    def load_state_dict(self, state):
        self.one = state["one"]
        if self.fails:
            self.fails = False
            raise RuntimeError("no room on this shelf")
        self.two = state["two"]


def same(one, other):
    if isinstance(one, DTensor):
        one, other = one.to_local(), other.to_local()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def unchanged(before, after):
    changed = [name for name in before[0] if not same(before[0][name], after[0][name])]
    return changed + (["objects"] if before[1] != after[1] else [])


def save_training(rank, folder, kind="ddp"):
    torch.manual_seed(50 + rank)
    training = Training(1, kind)
    with checkpointer(folder) as ckpt:
        save(ckpt, training.model, training.optimizer, extra=training.extra)


def load_and_fail(rank, folder, failing, kind="ddp"):
    training = Training(2, kind)
    training.loader.fails = rank in failing
    before = training.snapshot()
    with checkpointer(folder) as ckpt:
        try:
            load(ckpt, training.model, training.optimizer, extra=training.extra)
        except LoadError as error:
            told = error.rank, str(error)
        changed = unchanged(before, training.snapshot())
        load(ckpt, training.model, training.optimizer, extra=training.extra)
    return told, changed, training.extra["step"], training.loader.two


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_a_load_state_dict_that_raises_on_one_rank_leaves_all_ranks_as_they_were(
    gang, tmp_path, failing, kind
):
    gang.run(save_training, tmp_path, kind)
    for (rank, message), changed, step, loaded in gang.run(load_and_fail, tmp_path, failing, kind):
        assert rank in failing
        assert "no room on this shelf" in message
        assert "put back as it was" in message
        assert changed == []
        assert (step, loaded) == (1, 1)  # and the next load works


def test_in_one_process_too(tmp_path):
    saved, training = Training(1, None), Training(2, None)
    with checkpointer(tmp_path) as ckpt:
        save(ckpt, saved.model, saved.optimizer, extra=saved.extra)
        training.loader.fails = True
        before = training.snapshot()
        with pytest.raises(LoadError, match=r"RuntimeError: no room on this shelf"):
            load(ckpt, training.model, training.optimizer, extra=training.extra)
        assert unchanged(before, training.snapshot()) == []


class Picky(nn.Linear):
    def set_extra_state(self, state):
        raise RuntimeError("not this state")

    def get_extra_state(self):
        return {"n": 1}


def test_a_module_that_raises_midway_is_put_back(ckpt):
    def made(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 2), Picky(2, 2), nn.Linear(2, 2))

    save(ckpt, made(1))
    net = made(2)
    with pytest.raises(LoadError, match="not this state"):
        load(ckpt, net)
    assert same(net.state_dict(), made(2).state_dict())


# --------------------------------------------------------------- broken checkpoints


def whole_and_broken(ckpt, folder, kind="multi_shard"):
    """Checkpoints a, then b, of which b is to be broken. Returns b's folder."""
    save(ckpt, net_of(1), prefix="a", format=kind)
    save(ckpt, net_of(3), prefix="b", format=kind)
    return folder / "b"


def refused(ckpt, error, *words, **options):
    """b cannot be loaded, the model is as it was, and a is well."""
    net = net_of(2)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(error) as raised:
        load(ckpt, net, prefix="b", **options)
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert same(net.state_dict(), before)
    assert "a" in [info.prefix for info in ckpt.list_checkpoints()]
    load(ckpt, net, prefix="a")
    assert same(net.state_dict(), net_of(1).state_dict())
    return raised.value


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("kind", ["single_file", "multi_shard", "consolidated"])
def test_a_flipped_bit_names_tensor_and_file(ckpt, tmp_path, kind, skip):
    broken = whole_and_broken(ckpt, tmp_path, kind)
    needle = net_of(3)[0].weight.detach().numpy().tobytes()
    (file,) = (path for path in broken.glob("*.safetensors") if needle in path.read_bytes())
    flip(file, file.read_bytes().index(needle) + 5)
    refused(ckpt, CorruptedError, "0.weight", file.name, skip_validation=skip)


@pytest.mark.parametrize("strategy", ["parallel", "simple"])
def test_a_flipped_bit_in_a_header_names_the_file(ckpt, tmp_path, strategy):
    broken = whole_and_broken(ckpt, tmp_path)
    (file,) = broken.glob("shard-*")
    flip(file, 20)
    refused(ckpt, CorruptedError, file.name, resharding_strategy=strategy)


def load_one_broken(rank, folder, strategy):
    net = parallel(nn.Linear(64, 64), "fsdp", 2)
    nn.init.zeros_(net.weight)
    with checkpointer(folder) as ckpt:
        try:
            load(ckpt, net, prefix="b", resharding_strategy=strategy)
        except CorruptedError as error:
            return str(error), bool((net.weight.to_local() == 0).all())
    return None


@pytest.mark.parametrize("strategy", ["parallel", "broadcast", "simple"])
def test_what_only_one_rank_reads_broken_is_loaded_by_none(gang, tmp_path, strategy):
    with checkpointer(tmp_path) as ckpt:
        linear = nn.Linear(64, 64)
        save(ckpt, linear, prefix="b", include_rng_state=False)
    (file,) = (tmp_path / "b").glob("shard-*")
    last = linear.weight.detach().numpy().tobytes()
    flip(file, file.read_bytes().index(last) + len(last) - 1)
    for message, is_unchanged in gang.run(load_one_broken, tmp_path, strategy):
        assert "model.weight" in message
        assert file.name in message
        assert is_unchanged


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "empty"])
def test_a_file_that_is_missing_or_of_another_size_is_named(ckpt, tmp_path, damage, skip):
    broken = whole_and_broken(ckpt, tmp_path)
    (file,) = broken.glob("shard-*")
    size = file.stat().st_size
    if damage == "missing":
        file.unlink()
    else:
        os.truncate(file, {"truncated": size // 2, "longer": size + 9, "empty": 0}[damage])
    error = CorruptedError if skip else ValidationError
    refused(ckpt, error, file.name, skip_validation=skip)


def test_a_newer_format(ckpt, tmp_path):
    record = whole_and_broken(ckpt, tmp_path) / "metadata.json"
    record.write_text(record.read_text().replace('"version":1', '"version":2', 1))
    error = refused(ckpt, IncompatibleVersionError, "newer")
    assert "b/metadata.json" in error.path


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'{"hello": "world"}', CheckpointNotFoundError),
        (b"not JSON", CheckpointNotFoundError),
        (b"", CheckpointNotFoundError),
        (encode_record(new_tombstone()), CheckpointNotFoundError),
    ],
    ids=["foreign", "no json", "empty", "tombstone"],
)
def test_a_record_that_is_not_ours(ckpt, tmp_path, content, error):
    record = whole_and_broken(ckpt, tmp_path) / "metadata.json"
    record.write_bytes(content)
    net = net_of(2)
    with pytest.raises((error, CorruptedError), match="b"):
        load(ckpt, net, prefix="b")
    assert same(net.state_dict(), net_of(2).state_dict())
    assert [info.prefix for info in ckpt.list_checkpoints()] == ["a"]


def test_a_record_with_a_flipped_bit(ckpt, tmp_path):
    record = whole_and_broken(ckpt, tmp_path) / "metadata.json"
    record.write_text(record.read_text().replace('"ordinal":2', '"ordinal":3', 1))
    refused(ckpt, CorruptedError, "metadata.json")


def test_a_partial_checkpoint_is_none(ckpt, tmp_path):
    (whole_and_broken(ckpt, tmp_path) / "metadata.json").unlink()
    refused(ckpt, CheckpointNotFoundError, "b")
    assert [info.prefix for info in ckpt.list_checkpoints()] == ["a"]


def test_what_is_not_there(ckpt):
    save(ckpt, net_of(1))
    with pytest.raises(CheckpointNotFoundError, match="nope") as raised:
        load(ckpt, net_of(2), prefix="nope")
    assert isinstance(raised.value, KeyError)
    with pytest.raises(CheckpointNotFoundError, match="nope"):
        ckpt.delete_checkpoint("nope")


def load_missing(rank, folder):
    with checkpointer(folder) as ckpt:
        try:
            load(ckpt, net_of(2), prefix="nope")
        except CheckpointNotFoundError as error:
            return str(error)
    return None


def test_what_is_not_there_is_not_there_for_all_ranks(gang, tmp_path):
    for message in gang.run(load_missing, tmp_path):
        assert "nope" in message


# ------------------------------------------------------------ what does not fit


def test_renamed_keys_are_guessed(ckpt):
    save(ckpt, nn.ModuleDict({"encoder": net_of(1), "head": nn.Linear(4, 2)}))
    net = nn.ModuleDict({"backbone": net_of(2), "head": nn.Linear(4, 2)})
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValidationError) as raised:
        load(ckpt, net)
    message = str(raised.value)
    assert "model.encoder.0.weight (stored) -> model.backbone.0.weight (wanted)" in message
    assert "nothing was changed" in message
    assert "strict=False" in message
    assert same(net.state_dict(), before)


def test_shapes_and_dtypes_are_told(ckpt):
    save(ckpt, net_of(1))
    with pytest.raises(ValidationError, match=r"model\.0\.weight: \(4, 4\) is stored, \(5, 5\)"):
        load(ckpt, net_of(1, width=5))
    net = net_of(2).double()
    with pytest.raises(ValidationError, match=r"model\.0\.weight: float32 is stored, float64"):
        load(ckpt, net)
    assert same(net.state_dict(), net_of(2).double().state_dict())


def test_other_kinds_of_things(ckpt):
    save(ckpt, {"a": torch.ones(1), "b": [1, 2], "c": {"x": torch.ones(1)}}, extra={"d": 3})
    for model, words in [
        ({"a": [torch.ones(1)]}, "model.a is a tensor in the checkpoint, and a list is wanted"),
        ({"b": torch.ones(1)}, "model.b is a list in the checkpoint, and a tensor is wanted"),
        ({"c": net_of(1)}, "model.c.0.weight"),
        ({"a": net_of(1)}, "model.a is a tensor in the checkpoint, and a module's state is"),
        ([torch.ones(1)], "model is a dict in the checkpoint, and a list is wanted"),
    ]:
        with pytest.raises(ValidationError) as raised:
            load(ckpt, model, strict=True)
        assert words in str(raised.value)


def misfit(rank, folder):
    """Each rank wants something else that is not there."""
    torch.manual_seed(2)
    extra = {"all": torch.zeros(1), f"only{rank}": torch.zeros(1)}
    with checkpointer(folder) as ckpt:
        try:
            load(ckpt, {"w": torch.zeros(1)}, extra=extra)
        except ValidationError as error:
            return str(error), float(extra["all"])
    return None


def test_the_reports_of_ranks_are_one(gang, tmp_path):
    with checkpointer(tmp_path) as ckpt:
        save(ckpt, {"w": torch.ones(1)}, extra={"all": torch.ones(1)}, include_rng_state=False)
    for message, value in gang.run(misfit, tmp_path):
        assert "extra.only0" in message
        assert "extra.only1" in message
        assert value == 0


def test_an_optimizer_with_other_parameters_is_told_by_name(ckpt):
    net = net_of(1)
    save(ckpt, net, torch.optim.Adam(net.parameters()))
    other = net_of(2)
    some = torch.optim.Adam(other[0].parameters())
    with pytest.raises(ValidationError, match=r"1\.weight"):
        load(ckpt, other, some)


def test_remap_must_give_a_saved_rank(gang, tmp_path):
    gang.run(save_training, tmp_path)
    training = Training(2, None)
    before = training.snapshot()
    with checkpointer(tmp_path) as ckpt:
        for wrong in (lambda *_: 2, lambda *_: -1, lambda *_: None):
            with pytest.raises(LoadError, match=r"remap gave .* 0 to 1"):
                load(ckpt, training.model, extra=training.extra, remap=wrong)
    assert unchanged(before, training.snapshot()) == []


def test_in_a_tuple_plain_values_must_be_equal(ckpt):
    save(ckpt, {"t": (torch.ones(1), 5)})
    with pytest.raises(ValidationError, match=r"model\.t\.1 is in a tuple"):
        load(ckpt, {"t": (torch.zeros(1), 6)})


def test_targets_that_cannot_be_written_to_are_named(ckpt):
    save(ckpt, {"ok": torch.ones(2)}, extra={"it": torch.ones(3, 2), "array": np.ones(2000)})
    model = {"ok": torch.zeros(2)}
    array = np.zeros(2000)
    array.flags.writeable = False
    for name, target in (("it", torch.zeros(3, 1).expand(3, 2)), ("array", array)):
        with pytest.raises(CheckpointError) as raised:
            load(ckpt, model, extra={name: target})
        assert isinstance(raised.value, LoadError | ValidationError)
        assert f"extra.{name}" in str(raised.value)
        assert not model["ok"].any()


def test_one_tensor_here_and_two_in_the_checkpoint(ckpt):
    save(ckpt, {"a": torch.ones(2), "b": torch.full((2,), 2.0)})
    tensor = torch.zeros(2)
    with pytest.raises(ValidationError, match=r"model\.a and model\.b are one tensor here"):
        load(ckpt, {"a": tensor, "b": tensor})
    assert not tensor.any()


# -------------------------------------------------------- what cannot be stored


class Strange:
    pass


UNSTORABLE = {
    "object": (Strange, "Strange"),
    "function": (lambda: len, "builtin_function"),
    "class": (lambda: Strange, "type"),
    "lock": (threading.Lock, "lock"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "meta": (lambda: torch.empty(2, device="meta"), "meta"),
    "generator": (torch.Generator, "Generator"),
}


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_what_cannot_be_stored_is_named_by_place_and_type(ckpt, tmp_path, kind):
    make, words = UNSTORABLE[kind]
    with pytest.raises(SaveError) as raised:
        save(ckpt, net_of(1), extra={"deep": [{"here": make()}]})
    assert "extra.deep" in str(raised.value)
    assert "here" in str(raised.value)
    assert words in str(raised.value)
    assert files_in(tmp_path) == []


def test_a_value_that_contains_itself(ckpt, tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(SaveError, match=r"extra\.loop.* is nested more than 64 deep"):
        save(ckpt, net_of(1), extra={"loop": loop})
    assert files_in(tmp_path) == []


def save_deep(rank, folder, depth, differs):
    """A value in so many lists, and whether it was saved."""
    value = [rank if differs else 0]
    for _ in range(depth - 1):
        value = [value]
    with checkpointer(folder) as ckpt:
        try:
            save(ckpt, {"w": torch.ones(1)}, extra={"deep": value}, prefix=f"d{depth}{differs}")
        except SaveError as error:
            assert "nested more than" in str(error)  # noqa: PT017 -- or it is saved
            return None
        extra = {"deep": None}
        load(ckpt, extra=extra, prefix=f"d{depth}{differs}")
        return extra["deep"] == value


@pytest.mark.parametrize("differs", [False, True])
def test_what_is_saved_can_be_loaded_however_deep(gang, tmp_path, differs):
    found = {depth: gang.run(save_deep, tmp_path, depth, differs) for depth in range(58, 68)}
    assert found[58] == [True, True]
    assert found[67] == [None, None]
    assert {answer for answers in found.values() for answer in answers} == {True, None}


def test_custom_metadata_that_cannot_be_stored(ckpt, tmp_path):
    with pytest.raises(SaveError, match=r"custom_metadata.*Strange"):
        save(ckpt, net_of(1), custom_metadata={"x": Strange()})
    assert files_in(tmp_path) == []


class Broken:
    def state_dict(self):
        raise RuntimeError("cannot tell")

    def load_state_dict(self, state):
        raise AssertionError


def test_a_state_dict_that_raises(ckpt, tmp_path):
    with pytest.raises(SaveError, match=r"state_dict\(\) of extra\.it, a Broken, failed: Runtime"):
        save(ckpt, net_of(1), extra={"it": Broken()})
    assert files_in(tmp_path) == []


def save_partial(rank, folder):
    tensor = DTensor.from_local(torch.ones(2), mesh_of((2,)), [Partial()])
    with checkpointer(folder) as ckpt:
        try:
            save(ckpt, {"sum": tensor})
        except SaveError as error:
            return str(error)
    return None


def test_a_partial_tensor(gang, tmp_path):
    for message in gang.run(save_partial, tmp_path):
        assert "model.sum is a DTensor with placement" in message
        assert "redistribute it first" in message
    assert files_in(tmp_path) == []


# ------------------------------------------------------------------- the storage


def test_no_space_before_anything_is_written(tmp_path):
    class Full(LocalStorage):
        def free_bytes(self):
            return 1000

    with checkpointer(Full(tmp_path)) as ckpt:
        with pytest.raises(NoSpaceError, match=r"needs [\d,]+ bytes and there are 1,000 free"):
            save(ckpt, {"w": torch.ones(1000)}, include_rng_state=False)
        assert files_in(tmp_path) == []
        save(ckpt, {"w": torch.ones(100)}, include_rng_state=False)


@pytest.mark.parametrize("form", ["single_file", "multi_shard", "consolidated"])
@pytest.mark.parametrize("method", ["open_writer", "write_at", "finish", "create"])
def test_no_space_in_the_middle(tmp_path, method, form):
    with checkpointer(tmp_path) as ckpt:
        save(ckpt, net_of(1), prefix="before")
    before = files_in(tmp_path)
    faulty = FaultyStorage(
        LocalStorage(tmp_path), [Fault(method, error=NoSpaceError("the disk is full"))]
    )
    with checkpointer(faulty) as ckpt:
        with pytest.raises(NoSpaceError, match="the disk is full"):
            save(ckpt, net_of(1), format=form)
        assert not faulty.unfired
        assert files_in(tmp_path) == before
        load(ckpt, net_of(2), prefix="before")
        save(ckpt, net_of(1), format=form)


def test_a_read_that_fails_changes_nothing():
    faulty = FaultyStorage(MemoryStorage(), [Fault("read_into", 3, StorageError("gone away"))])
    training = Training(2, None)
    with checkpointer(faulty) as ckpt:
        saved = Training(1, None)
        save(ckpt, saved.model, saved.optimizer, extra=saved.extra)
        before = training.snapshot()
        with pytest.raises(StorageError, match="gone away"):
            load(ckpt, training.model, training.optimizer, extra=training.extra)
    assert unchanged(before, training.snapshot()) == []


def test_a_prefix_that_is_taken(ckpt, tmp_path):
    save(ckpt, net_of(1))
    before = files_in(tmp_path)
    with pytest.raises(CheckpointExistsError, match=r"overwrite=True"):
        save(ckpt, net_of(2))
    assert files_in(tmp_path) == before


def test_a_closed_checkpointer(tmp_path):
    ckpt = checkpointer(tmp_path)
    ckpt.close()
    ckpt.close()
    for call in (
        lambda: save(ckpt, net_of(1)),
        lambda: load(ckpt, net_of(1)),
        lambda: ckpt.save_model_only(net_of(1)),
        ckpt.list_checkpoints,
        lambda: ckpt.delete_checkpoint("a"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


@pytest.mark.parametrize("extra", [[1], {1: 2}, "text"])
def test_extra_is_a_dict_by_names(ckpt, extra):
    with pytest.raises(ValueError, match="extra must be a dict of things by name"):
        save(ckpt, net_of(1), extra=extra)
    with pytest.raises(ValueError, match="extra must be a dict of things by name"):
        load(ckpt, net_of(1), extra=extra)


def test_options_of_the_wrong_kind(ckpt):
    with pytest.raises(ValueError, match="options must be"):
        ckpt.save(net_of(1), None, LoadOptions())
    with pytest.raises(ValueError, match="options must be"):
        ckpt.load(net_of(1), None, SaveOptions())


# ------------------------------------------------------- ranks that do not agree


def disagree(rank, folder, what):
    """Ranks that call save with different things; says what each is told."""
    options = {"prefix": "a"}
    model, extra = {"w": torch.ones(2)}, None
    if what == "prefix":
        options["prefix"] = "ab"[rank]
    elif what == "format":
        options["format"] = ("single_file", "multi_shard")[rank]
    elif what == "compression_level":
        options["compression_level"] = ("none", "fast")[rank]
    elif what == "keys":
        extra = {"one": 1} if rank else {"two": 2}
    elif what == "shape":
        model = net_of(1, width=4 + rank)
    elif what == "dtype":
        model = net_of(1).to((torch.float32, torch.float64)[rank])
    elif what == "group":
        model = net_of(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    optimizer = optimizer if what == "group" else None
    with checkpointer(folder) as ckpt:
        try:
            save(ckpt, model, optimizer, extra=extra, include_rng_state=False, **options)
        except CheckpointError as error:
            return type(error), str(error)
    return None, ""


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("prefix", SaveError, ["checkpoint_prefix is 'b' on rank 1 and 'a' on rank 0"]),
        ("format", SaveError, ["format is 'multi_shard' on rank 1"]),
        ("compression_level", SaveError, ["compression_level is 'fast' on rank 1"]),
        ("keys", SaveError, ["rank 1 saves", "extra.one", "rank 0", "extra.two"]),
        ("shape", SaveError, ["model.0.weight", "(4, 4)", "(5, 5)"]),
        ("dtype", SaveError, ["model.0.weight", "F32", "F64"]),
        ("group", ReplicaMismatchError, ["optimizer", "lr"]),
    ],
)
def test_ranks_that_do_not_want_the_same_save(gang, tmp_path, what, error, words):
    for found, message in gang.run(disagree, tmp_path, what):
        assert found is error, message
        for word in words:
            assert word in message
        assert re.search("nothing was (saved|changed)", message, re.IGNORECASE)
    assert files_in(tmp_path) == []


def disagree_on_load(rank, folder, name, values):
    net = net_of(2)
    with checkpointer(folder) as ckpt:
        try:
            load(ckpt, net, **{"prefix": "a", name: values[rank]})
        except LoadError as error:
            return str(error), same(net.state_dict(), net_of(2).state_dict())
    return "", False


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prefix", ("a", "b")),
        ("resharding_strategy", ("broadcast", "parallel")),
        ("strict", (False, True)),
    ],
)
def test_ranks_that_do_not_want_the_same_load(gang, tmp_path, name, values):
    with checkpointer(tmp_path) as ckpt:
        for prefix in ("a", "b"):
            save(ckpt, net_of(1), prefix=prefix, include_rng_state=False)
    for message, is_unchanged in gang.run(disagree_on_load, tmp_path, name, values):
        assert f"{name} is {values[1]!r} on rank 1 and {values[0]!r} on rank 0" in message
        assert is_unchanged


def choose_nobody(rank, folder):
    with checkpointer(folder) as ckpt:
        try:
            save(ckpt, net_of(1), replicas_from=5)
        except (ValueError, RankFailedError) as error:
            return str(error)
    return None


def test_replicas_from_a_rank_that_is_not_there(gang, tmp_path):
    for message in gang.run(choose_nobody, tmp_path):
        assert "replicas_from must be one of the 2 ranks, not 5" in message
    assert files_in(tmp_path) == []


def at_home(rank, folder, operation):
    """Every rank has a folder of its own, as on hosts without a shared disk."""
    with checkpointer(folder / f"host{rank}") as ckpt:
        net = net_of(2)
        try:
            save(ckpt, net) if operation == "save" else load(ckpt, net)
        except CheckpointError as error:
            unchanged = same(net.state_dict(), net_of(2).state_dict())
            return type(error), str(error), unchanged
    return None


def test_a_root_that_is_local_to_each_host(gang, tmp_path):
    for error, message, _ in gang.run(at_home, tmp_path, "save"):
        assert error is SaveError
        assert "not the same on all hosts" in message
    assert files_in(tmp_path) == []
    with checkpointer(tmp_path / "host0") as ckpt:
        save(ckpt, net_of(1))
    for error, message, is_unchanged in gang.run(at_home, tmp_path, "load"):
        assert error is LoadError
        assert "not the same on all hosts" in message
        assert is_unchanged
    shutil.copytree(tmp_path / "host0" / "a", tmp_path / "host1" / "a")
    assert gang.run(at_home, tmp_path, "load") == [None, None]


def fail_in_capture(rank, folder):
    with checkpointer(folder) as ckpt:
        try:
            save(ckpt, net_of(1), extra={"x": Strange() if rank else 1})
        except SaveError as error:
            told = error.rank, str(error)
        save(ckpt, net_of(1), extra={"x": 1})
    return told


def test_what_one_rank_cannot_store_fails_on_all_and_the_next_save_works(gang, tmp_path):
    for rank, message in gang.run(fail_in_capture, tmp_path):
        assert rank == 1
        assert "extra.x" in message
        assert "Strange" in message
    assert holdfast.load(tmp_path / "a", as_numpy=True)["extra"] == {"x": 1}
