"""torch.distributed.checkpoint with holdfast's storage, in one process."""

import copy
import io
import json
import os
import pathlib
import pickle
import random
import re
import subprocess
import sys
import time
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import holdfast
from holdfast.catalog import Catalog
from holdfast.contracts import COMMIT_RECORD
from holdfast.errors import StorageError
from holdfast.format import CommitRecord, decode_record, encode_record
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.testing import Fault, FaultyStorage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state(seed=0):
    torch.manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(130, 70),
            "bias": torch.randn(7, dtype=torch.bfloat16),
            "mask": torch.rand(5, 5) > 0.5,
            "scale": torch.tensor(1.5),
            "empty": torch.empty(0, 4),
            "odd[0:3]": torch.randn(2, 3, dtype=torch.complex64),
        },
        "optimizer": {
            "state": {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(130, 70)}},
            "param_groups": [{"lr": 0.1 + seed, "betas": (0.9, 0.99), "params": ["weight"]}],
        },
        "step": 100 + seed,
        "rng": random.Random(seed).getstate(),
        "names": ["a", "b"],
        "order": OrderedDict(b=1, a=2),
        "loader": b"\0bytes",
        "nothing": None,
        "history": [{"loss": float("inf")}, {"loss": 0.5}],
        "large": np.arange(20_000 + seed),
    }


def flat(value, place=()):
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, (*place, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from flat(each, (*place, index))
    else:
        yield place, value


def assert_same(found, wanted):
    ours, theirs = dict(flat(found)), dict(flat(wanted))
    assert ours.keys() == theirs.keys()
    for place, value in theirs.items():
        assert type(ours[place]) is type(value), place
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[place], value), place
        else:
            np.testing.assert_equal(ours[place], value)


def save(path, what, planner=None, **options):
    return dcp.save(what, storage_writer=HoldfastWriter(path, **options), planner=planner)


def load(path, into, planner=None, **options):
    dcp.load(into, storage_reader=HoldfastReader(path, **options), planner=planner)
    return into


def cause(caught):
    """The error of the first rank that failed: DCP wraps it."""
    return next(iter(caught.value.failures.values()))[0]


def test_a_state_comes_back_whole_and_of_the_same_types(tmp_path):
    save(tmp_path / "step_7", state())
    assert_same(load(tmp_path / "step_7", state(1)), state())


def test_what_is_loaded_is_what_dcp_itself_would_have_loaded(tmp_path):
    save(tmp_path / "ours", state())
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    theirs = state(1)
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "theirs"))
    assert_same(load(tmp_path / "ours", state(1)), theirs)
    ours_md = HoldfastReader(tmp_path / "ours").read_metadata()
    theirs_md = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert ours_md.planner_data == theirs_md.planner_data
    assert [*ours_md.state_dict_metadata] == [*theirs_md.state_dict_metadata]
    for key, kind in theirs_md.state_dict_metadata.items():
        mine = ours_md.state_dict_metadata[key]
        assert type(mine) is type(kind)
        if not isinstance(kind, BytesStorageMetadata):
            assert (mine.size, mine.chunks) == (kind.size, kind.chunks)
            assert mine.properties.dtype == kind.properties.dtype
    assert ours_md.version == theirs_md.version


def test_it_is_a_checkpoint_like_any_other(tmp_path):
    save(tmp_path / "run" / "step_7", state(), metrics={"loss": 0.5}, custom_metadata={"git": "a1"})
    catalog = Catalog(tmp_path / "run")
    (info,) = catalog.list()
    assert (info.prefix, info.step, info.metrics, info.world_size) == (
        "step_7",
        7,
        {"loss": 0.5},
        1,
    )
    assert catalog.open("step_7").custom["git"] == "a1"
    assert catalog.verify("step_7").is_intact
    np.testing.assert_array_equal(
        catalog.read("step_7")["model"]["weight"], state()["model"]["weight"].numpy()
    )
    assert_same(holdfast.load(tmp_path / "run" / "step_7"), state())
    assert catalog.gc().deleted == ()


def test_a_model_that_dcp_saved_is_loaded_by_a_distributed_checkpoint(tmp_path):
    torch.manual_seed(0)
    saved, model = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    save(tmp_path / "a", {"model": saved.state_dict()})
    options = holdfast.CheckpointOptions(storage=tmp_path)
    with holdfast.DistributedCheckpoint.create(options=options) as checkpoint:
        chosen = holdfast.LoadOptions(checkpoint_prefix="a", load_rng_state=False)
        checkpoint.load(model, options=chosen)
    assert torch.equal(model.weight, saved.weight)


def test_nothing_on_the_disk_is_a_pickle(tmp_path):
    save(tmp_path / "a", {**state(), "text": "needle"})
    for path in (tmp_path / "a").iterdir():
        data = path.read_bytes()
        assert b"PK\x03\x04" not in data
        assert path.suffix in {".json", ".safetensors"}
    assert "needle" in (tmp_path / "a" / "metadata.json").read_text()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: None, r"'hook' is a function, which cannot be stored"),
        ({"a": [1, object()]}, r"'hook\.a'\[1\] is "),
        (torch.ones(2).to_sparse(), r"'hook' is a torch.sparse_coo tensor"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_key_and_nothing_is_saved(tmp_path, value, words):
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "a", {"w": torch.ones(3), "hook": value})
    assert isinstance(cause(caught), holdfast.SaveError)
    assert "hook" in str(cause(caught))
    assert re.search(words, str(cause(caught)))
    del caught
    assert Catalog(tmp_path).list() == []


def test_a_key_that_a_tensor_inside_of_a_value_would_be_stored_as_is_refused(tmp_path):
    state = {"v": (torch.ones(2),), "v::0": torch.zeros(3)}
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "a", state)
    assert isinstance(cause(caught), holdfast.SaveError)
    assert "a tensor in 'v' would be stored as 'v::0'" in str(cause(caught))
    del caught
    assert Catalog(tmp_path).list() == []


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_no_byte_of_a_checkpoint_is_unpickled(tmp_path, monkeypatch):
    """Whoever can write a checkpoint cannot have anything run by whoever loads it."""
    monkeypatch.chdir(tmp_path)
    data = io.BytesIO()
    torch.save(Evil(), data)
    save(tmp_path / "a", {"w": torch.ones(3), "value": data.getvalue()})
    assert load(tmp_path / "a", {"value": 0})["value"] == data.getvalue()
    assert not (tmp_path / "evil").exists()


class OwnBytes(DefaultSavePlanner):
    """Makes bytes of its own of values."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def resolve_data(self, write_item):
        if write_item.type is not WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        data = io.BytesIO()
        torch.save(self.make(self.lookup_object(write_item.index)), data)
        return data


def test_a_planner_that_makes_bytes_of_its_own_is_asked_for_them(tmp_path):
    save(tmp_path / "a", {"w": torch.ones(3), "x": 5}, OwnBytes(lambda x: {"value": 2 * x}))
    assert load(tmp_path / "a", {"x": 0}) == {"x": {"value": 10}}


def test_bytes_of_a_planner_that_are_not_safe_to_load_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "a", {"x": 5}, OwnBytes(lambda _: Evil()))
    assert "'x' is bytes of OwnBytes's own" in str(cause(caught))
    assert not (tmp_path / "evil").exists()


class Half(DefaultSavePlanner):
    """As DCP's documents show: tensors are converted on their way."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item):
        item = super().resolve_data(write_item)
        return item if write_item.type is WriteItemType.BYTE_IO else item.to(torch.float16)


class Liar(Half):
    def resolve_data(self, write_item):
        return DefaultSavePlanner.resolve_data(self, write_item)


def test_a_planner_may_convert_tensors(tmp_path):
    weight = torch.randn(40, 3)
    save(tmp_path / "a", {"w": weight, "x": 5}, Half())
    assert Catalog(tmp_path).open("a").tensors["w"].dtype == "F16"
    found = load(tmp_path / "a", {"w": torch.zeros(40, 3), "x": 0})
    assert torch.equal(found["w"], weight.half().float())
    assert found["x"] == 5


def test_a_tensor_that_is_not_as_planned_is_refused(tmp_path):
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "a", {"w": torch.ones(3)}, Liar())
    assert "'w' was planned as torch.float16" in str(cause(caught))
    assert isinstance(cause(caught), holdfast.SaveError)


class Rename(DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        super().set_up_planner({f"foo_{k}": v for k, v in state_dict.items()}, metadata)


class ToCpuFirst(DefaultLoadPlanner):
    """Gives tensors of its own, and takes them back when they are filled."""

    def __init__(self):
        super().__init__()
        self.committed = {}

    def resolve_tensor(self, read_item):
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item, tensor):
        self.committed[read_item.dest_index.fqn] = tensor


def test_planners_of_loads_may_rename_and_give_tensors_of_their_own(tmp_path):
    weight = torch.randn(40, 3)
    save(tmp_path / "a", {"foo_w": weight, "w": weight + 1})
    into = {"w": torch.zeros(40, 3)}
    load(tmp_path / "a", into, Rename())
    assert torch.equal(into["w"], weight)
    planner = ToCpuFirst()
    load(tmp_path / "a", into, planner)
    assert torch.equal(planner.committed["w"], weight + 1)
    assert torch.equal(into["w"], weight)


@pytest.mark.parametrize("flatten", [True, False])
def test_a_state_is_flattened_or_not(tmp_path, flatten):
    what = {"model": {"w": torch.randn(3, 4), "n": [torch.ones(2), 5]}, "x": (1, torch.zeros(2))}
    save(tmp_path / "a", what, DefaultSavePlanner(flatten_state_dict=flatten))
    into = copy.deepcopy(what)
    into["model"]["w"].zero_()
    into["x"] = (2, torch.ones(2)) if not flatten else into["x"]
    flags = {"flatten_state_dict": flatten, "flatten_sharded_tensors": False}
    load(tmp_path / "a", into, DefaultLoadPlanner(**flags))
    assert torch.equal(into["model"]["w"], what["model"]["w"])
    assert into["model"]["n"][1] == 5
    assert into["x"][0] == 1
    assert Catalog(tmp_path).verify("a").is_intact


def test_keys_that_the_tree_cannot_tell_apart_stay_apart(tmp_path):
    """Paths of a planner that are no tree: then the keys are kept, and the paths beside them."""
    one = DefaultSavePlanner(flatten_state_dict=False)
    save(tmp_path / "a", {"a": torch.ones(2), "a.b": torch.zeros(2), "0": 7}, one)
    into = {"a": torch.zeros(2), "a.b": torch.ones(2), "0": 0}
    flags = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    load(tmp_path / "a", into, DefaultLoadPlanner(**flags))
    assert into["a"].tolist() == [1, 1]
    assert into["a.b"].tolist() == [0, 0]
    assert into["0"] == 7


def test_a_state_can_be_made_from_the_checkpoint_alone(tmp_path):
    save(tmp_path / "a", state())
    found = _load_state_dict_from_keys(storage_reader=HoldfastReader(tmp_path / "a"))
    assert_same(found, state())
    reader = HoldfastReader(tmp_path / "a")
    part = _load_state_dict_from_keys({"model.bias"}, storage_reader=reader)
    assert [place for place, _ in flat(part)] == [("model", "bias")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(70, 130).t(),
        lambda: torch.zeros(130, 70, dtype=torch.float64),
        lambda: torch.zeros(260, 140)[::2, ::2],
        lambda: torch.nn.Parameter(torch.zeros(130, 70)),
        lambda: torch.zeros(200, 70)[30:160],
    ],
    ids=["transposed", "another dtype", "strided", "parameter", "a view"],
)
def test_a_tensor_is_filled_however_it_lies(tmp_path, make):
    weight = torch.randn(130, 70)
    save(tmp_path / "a", {"w": weight.t().contiguous().t()})
    into = make()
    before = into._version
    load(tmp_path / "a", {"w": into})
    assert torch.equal(into.detach().to(weight.dtype), weight)
    assert into._version > before  # or autograd would not notice


def test_only_what_is_wanted_is_read(tmp_path):
    storage = FaultyStorage(LocalStorage(tmp_path))
    what = {f"w{n}": torch.full((1_000_000,), float(n)) for n in range(8)}
    dcp.save(what, storage_writer=HoldfastWriter("a", storage=storage))
    counted = Counting(storage)
    into = {"w3": torch.zeros(1_000_000)}
    dcp.load(into, storage_reader=HoldfastReader("a", storage=counted))
    assert into["w3"][7] == 3
    assert counted.nbytes < 4_000_000 + 400_000


class Counting:
    def __init__(self, storage):
        self._storage = storage
        self.nbytes = 0

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def read_into(self, key, ranges):
        self.nbytes += sum(each.into.nbytes for each in ranges)
        self._storage.read_into(key, ranges)


def test_a_flipped_bit_is_found_and_named(tmp_path):
    save(tmp_path / "a", state())
    (shard,) = (tmp_path / "a").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[data.index(state()["model"]["weight"].numpy().tobytes()) + 5000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "a", state(1))
    assert isinstance(cause(caught), holdfast.CorruptedError)
    assert "tensor 'model.weight' is damaged" in str(cause(caught))
    assert shard.name in str(cause(caught))
    assert shard.name in str(caught.value)


@pytest.mark.parametrize("harm", ["shard gone", "shard cut", "record cut", "record edited"])
def test_damage_is_an_error_and_no_state(tmp_path, harm):
    save(tmp_path / "a", state())
    (shard,) = (tmp_path / "a").glob("*.safetensors")
    record = tmp_path / "a" / "metadata.json"
    if harm == "shard gone":
        shard.unlink()
    elif harm == "shard cut":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif harm == "record cut":
        record.write_bytes(record.read_bytes()[:-10])
    else:
        record.write_bytes(record.read_bytes().replace(b'"step":100', b'"step":101'))
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "a", state(1))
    assert "record" in str(caught.value) if "record" in harm else shard.name in str(caught.value)


@pytest.mark.parametrize(
    "notes",
    [
        7,
        {"version": 1, "save_id": "a"},
        {"version": "1", "save_id": "a", "whole": 3},
        {"version": "1", "save_id": "a", "more": 3},
        {"version": "1", "save_id": "a", "parts": {"w": {"shape": [3], "starts": {"no": [0]}}}},
        {"version": "1", "save_id": "a", "parts": {"w": {"shape": [3], "starts": {"w": [0, 0]}}}},
        {"version": "1", "save_id": "a", "parts": {"w": {"shape": [3], "starts": {}}}},
    ],
)
def test_a_record_that_is_made_up_is_corrupted(tmp_path, notes):
    save(tmp_path / "a", {"w": torch.ones(3)})
    edit_record(tmp_path / "a" / "metadata.json", custom={"dcp": notes})
    with pytest.raises(holdfast.CorruptedError):
        HoldfastReader(tmp_path / "a").read_metadata()


def edit_record(path, **changes):
    record = decode_record(path.read_bytes(), path="a")
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    path.write_bytes(encode_record(CommitRecord(**{**fields, **changes})))


def test_what_dcp_did_not_save_is_refused_with_the_way_to_load_it(tmp_path):
    holdfast.save({"w": torch.ones(3)}, tmp_path / "ours")
    dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    with pytest.raises(holdfast.LoadError, match=r"load it with holdfast\.load"):
        HoldfastReader(tmp_path / "ours").read_metadata()
    with pytest.raises(holdfast.CheckpointNotFoundError, match="FileSystemReader"):
        HoldfastReader(tmp_path / "theirs").read_metadata()


def test_what_cannot_be_loaded_is_told_of_the_name_that_was_given(tmp_path):
    """DCP looks for a rank's own checkpoint then, and tells last that there is none."""
    holdfast.save({"w": torch.ones(3)}, tmp_path / "ours")
    dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    save(tmp_path / "damaged", {"w": torch.ones(3)})
    (tmp_path / "damaged" / COMMIT_RECORD).write_text("no record")
    for name, told in (
        ("nowhere", "no committed checkpoint of this name"),
        ("ours", "load it with holdfast.load"),
        ("theirs", "load it with FileSystemReader"),
        ("damaged", "commit record"),
    ):
        with pytest.raises(CheckpointException) as caught:
            load(tmp_path / name, {"w": torch.ones(3)})
        first, _, last = str(cause(caught)).partition("; rank local metadata read failed: ")
        assert first.endswith(last)
        assert told in last
        assert name in last
        assert "rank_0" not in last


def test_a_rank_that_saved_nothing_for_itself_where_others_have_is_told_so(tmp_path):
    state = {"w": torch.ones(3)}
    writer = HoldfastWriter(tmp_path / "a")
    dcp.save(state, storage_writer=writer, use_collectives=False)
    assert load(tmp_path / "a", {"w": torch.zeros(3)})["w"].sum() == 3
    with pytest.raises(holdfast.CheckpointNotFoundError, match="rank_1"):
        HoldfastReader(tmp_path / "a").read_metadata(rank=1)
    save(tmp_path / "b", state)
    with pytest.raises(holdfast.CheckpointNotFoundError, match="rank_0"):
        HoldfastReader(tmp_path / "b").read_metadata(rank=0)


def test_keys_and_shapes_must_fit_as_dcp_says(tmp_path):
    save(tmp_path / "a", {"w": torch.ones(3, 4), "x": 5})
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: b"):
        load(tmp_path / "a", {"b": torch.ones(3)})
    partial = DefaultLoadPlanner(allow_partial_load=True)
    into = load(tmp_path / "a", {"w": torch.zeros(3, 4), "b": torch.zeros(3)}, partial)
    assert into["w"].sum() == 12
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(tmp_path / "a", {"w": torch.ones(4, 3)})
    with pytest.raises(CheckpointException, match="expected BytesStorageMetadata"):
        load(tmp_path / "a", {"w": 5})
    with pytest.raises(CheckpointException):
        load(tmp_path / "a", {"w": torch.ones(3)})


class WrongTensor(DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        return super().resolve_tensor(read_item)[:-1]


def test_a_planner_that_gives_a_tensor_of_another_shape_is_told(tmp_path):
    save(tmp_path / "a", {"w": torch.ones(3)})
    with pytest.raises(CheckpointException, match=r"'w': \(3,\) elements .* of shape \(2,\)"):
        load(tmp_path / "a", {"w": torch.ones(3)}, WrongTensor())


def test_a_name_is_overwritten_unless_that_is_forbidden(tmp_path):
    save(tmp_path / "a", {"x": 1, "w": torch.ones(2)})
    save(tmp_path / "a", {"x": 2, "w": torch.zeros(2)})
    with pytest.raises(CheckpointException) as caught:
        save(tmp_path / "a", {"x": 3, "w": torch.ones(2)}, overwrite=False)
    assert isinstance(cause(caught), holdfast.CheckpointExistsError)
    assert load(tmp_path / "a", {"x": 0})["x"] == 2
    assert len([*(tmp_path / "a").iterdir()]) == 2


@pytest.mark.parametrize("nth", range(1, 30))
def test_wherever_a_save_fails_the_old_checkpoint_is_there_or_the_new_one(nth):
    storage = MemoryStorage()
    dcp.save({"x": 1, "w": torch.ones(9)}, storage_writer=HoldfastWriter("a", storage=storage))
    old = Catalog(storage).info("a").ordinal
    faulty = FaultyStorage(storage, [Fault("any", nth, StorageError("the disk is gone"))])
    writer = HoldfastWriter("a", storage=faulty)
    failed = None
    try:
        dcp.save({"x": 2, "w": torch.zeros(9)}, storage_writer=writer)
    except CheckpointException as error:
        failed = error
    met = any(call.fault for call in faulty.calls)
    catalog = Catalog(storage)
    assert len(catalog.list()) == 1
    found = load("a", {"x": 0, "w": torch.full((9,), 5.0)}, storage=storage)
    is_new = found["x"] == 2
    assert found["w"].tolist() == [0.0 if is_new else 1.0] * 9
    assert is_new == (catalog.info("a").ordinal > old)
    if failed is None:
        assert is_new
    else:
        assert met
    del writer, failed
    assert catalog.verify("a").is_intact


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item):
            raise RuntimeError("no more")

    writer = HoldfastWriter(tmp_path / "a")
    with pytest.raises(CheckpointException, match="no more"):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=Failing())
    assert not [*tmp_path.glob("a/*")]
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert len([*(tmp_path / "a").iterdir()]) == 2


def test_a_save_that_another_rank_made_fail_is_removed_when_its_writer_is_no_more(tmp_path):
    """DCP does not tell a storage that there will be no commit."""
    writer = HoldfastWriter(tmp_path / "a")
    begin(writer, {"w": torch.ones(3)})
    left = HoldfastWriter(tmp_path / "b")
    begin(left, {"w": torch.ones(3)})
    assert len([*tmp_path.glob("a/*")]) == len([*tmp_path.glob("b/*")]) == 2
    assert Catalog(tmp_path).list() == []
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert {path.suffix for path in tmp_path.glob("a/*")} == {".json", ".safetensors"}
    assert len([*tmp_path.glob("a/*")]) == 2
    gone = weakref.ref(left)
    del left
    assert gone() is None
    until(lambda: not [*tmp_path.glob("b/*")])
    assert [info.prefix for info in Catalog(tmp_path).list()] == ["a"]


def until(is_so):
    """Waits for what is done aside."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_save_that_failed_is_removed_when_the_process_ends(tmp_path):
    code = """
import sys, warnings
warnings.simplefilter("ignore")
from test_dcp_storage import HoldfastWriter, begin, torch
writer = HoldfastWriter(sys.argv[1])
begin(writer, {"w": torch.ones(3)})
import os
print(len(os.listdir(sys.argv[1])))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a"],
        cwd=pathlib.Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "2"
    assert not [*tmp_path.glob("a/*")]


def test_the_names_that_are_there():
    assert holdfast.integrations.dcp.__all__ == ["HoldfastReader", "HoldfastWriter"]
    with pytest.raises(AttributeError, match="no attribute 'none'"):
        _ = holdfast.integrations.none


def begin(writer, what):
    """All that comes before the commit."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(what, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.write_data(planner.finish_plan(plan), planner).wait()


def test_a_writer_and_a_reader_go_on_to_other_checkpoints(tmp_path):
    writer, reader = HoldfastWriter(tmp_path / "0"), HoldfastReader(tmp_path / "0")
    ids = set()
    for step in range(3):
        where = tmp_path / f"epoch=1-step={step}"
        made = dcp.save({"x": step}, checkpoint_id=where, storage_writer=writer)
        into = {"x": None}
        dcp.load(into, checkpoint_id=str(where), storage_reader=reader)
        assert into == {"x": step}
        assert writer.checkpoint_id == where
        ids.add(made.storage_meta.save_id)
        assert reader.read_metadata().storage_meta.save_id == made.storage_meta.save_id
    assert len(ids) == 3
    assert [info.step for info in Catalog(tmp_path).list()] == [2, 1, 0]


@pytest.mark.parametrize(
    ("where", "is_possible"),
    [
        ("runs/a", True),
        ("s3://bucket/run/a", True),
        ("az://box/a/b", True),
        ("file:///runs/a", True),
        ("hdfs://host/a", False),
        ("memory://", False),
        ("", False),
        (7, False),
    ],
)
def test_what_a_checkpoint_id_may_be(where, is_possible):
    assert HoldfastWriter.validate_checkpoint_id(where) is is_possible
    assert HoldfastReader.validate_checkpoint_id(where) is is_possible


def test_what_cannot_be_a_writer_is_refused_at_once(tmp_path):
    for options in (
        {"step": -1},
        {"metrics": {"loss": "low"}},
        {"custom_metadata": {"dcp": 1}},
        {"compression_level": "much"},
    ):
        with pytest.raises(ValueError):
            HoldfastWriter(tmp_path / "a", **options)
    with pytest.raises(holdfast.SaveError):
        HoldfastWriter(tmp_path / "a", custom_metadata={"f": print})
    with pytest.raises(ValueError):
        HoldfastWriter("")


def test_writers_and_readers_can_be_pickled(tmp_path):
    writer = pickle.loads(pickle.dumps(HoldfastWriter(tmp_path / "a", step=4, overwrite=False)))
    dcp.save({"x": 1}, storage_writer=writer)
    writer = pickle.loads(pickle.dumps(writer))
    with pytest.raises(CheckpointException, match="already"):
        dcp.save({"x": 1}, storage_writer=writer)
    reader = HoldfastReader(tmp_path / "a")
    reader.read_metadata()
    into = {"x": 0}
    dcp.load(into, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert into == {"x": 1}
    assert Catalog(tmp_path).info("a").step == 4


@pytest.fixture
def no_cached_plans():
    caches = [name for name in vars(SavePlanner) if name.startswith("_cached_")]
    for name in caches:
        getattr(SavePlanner, name).clear()
    yield
    for name in caches:
        getattr(SavePlanner, name).clear()


@pytest.mark.usefixtures("no_cached_plans")
def test_plans_that_dcp_caches_are_used_again(tmp_path):
    for step in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(tmp_path / f"{step}", {"w": torch.full((4,), float(step)), "x": step}, planner)
    for step in range(3):
        found = load(tmp_path / f"{step}", {"w": torch.zeros(4), "x": None})
        assert found["w"].tolist() == [step] * 4
        assert found["x"] == step
    assert Catalog(tmp_path).gc().deleted == ()


@pytest.mark.parametrize("level", ["fast", "maximum"])
def test_a_checkpoint_may_be_compressed(tmp_path, level):
    save(tmp_path / "a", {"w": torch.zeros(500, 500), "x": 1}, compression_level=level)
    assert Catalog(tmp_path).info("a").size_bytes < 100_000
    found = load(tmp_path / "a", {"w": torch.ones(500, 500), "x": 0})
    assert not found["w"].any()


def test_a_save_by_threads_goes_on_while_the_state_changes(tmp_path):
    what = state()
    future = dcp.async_save(what, storage_writer=HoldfastWriter(tmp_path / "a"))
    what["model"]["weight"].zero_()
    metadata = future.result()
    assert metadata.storage_meta.checkpoint_id == tmp_path / "a"
    assert_same(load(tmp_path / "a", state(1)), state())


def test_the_record_says_no_more_than_is_needed(tmp_path):
    save(tmp_path / "a", {"model": {f"w{n}": torch.ones(2) for n in range(100)}, "step": 3})
    record = json.loads((tmp_path / "a" / "metadata.json").read_bytes())["record"]
    assert record["custom"]["dcp"].keys() == {"version", "save_id"}


def test_calls_out_of_order_are_refused(tmp_path):
    with pytest.raises(holdfast.SaveError, match="must come first"):
        HoldfastWriter(tmp_path / "a").prepare_global_plan([])
    with pytest.raises(holdfast.SaveError, match="must come first"):
        HoldfastWriter(tmp_path / "a").finish(None, [])
    with pytest.raises(holdfast.LoadError, match="must come first"):
        HoldfastReader(tmp_path / "a").read_data(None, None)
    save(tmp_path / "a", {"w": torch.ones(3)})
    reader = HoldfastReader(tmp_path / "a")
    reader.set_up_storage_reader(None, is_coordinator=True)
    assert reader.read_metadata().state_dict_metadata["w"].size == torch.Size([3])
    assert MetadataIndex("w", (0,)) in reader._open.listed.names
