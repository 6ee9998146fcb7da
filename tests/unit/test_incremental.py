"""Incremental saves: what has not changed is referred to, and stays whatever happens to the
checkpoint that it is in."""

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from catalog_tools import Observed, aged, files_of, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.catalog import Catalog
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.errors import (
    CheckpointError,
    CorruptedError,
    NoSpaceError,
    SaveError,
    TornSnapshotError,
)
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage._wrapped import WrappedStorage

KIB = 1024
MIB = 1024 * 1024


@pytest.fixture
def storage():
    return MemoryStorage()


@pytest.fixture
def ckpt(storage):
    with DistributedCheckpoint(storage=storage) as made:
        yield made


def save(ckpt, prefix, state, *, incremental=True, **options):
    options.setdefault("include_rng_state", False)
    chosen = SaveOptions(checkpoint_prefix=prefix, incremental=incremental, **options)
    return ckpt.save(state, options=chosen)


def numbers(nbytes, seed=0):
    """Floats that do not compress to nothing, and are like no other seed's."""
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(seed))


def shard_bytes(storage, prefix):
    """The size of the files that are in a checkpoint's own folder."""
    return sum(info.size_bytes for info in storage.list(f"{prefix}/shard-"))


def borrowed(ckpt, prefix):
    """The folders of other checkpoints in which files of this one are."""
    files = ckpt.catalog.find(prefix).record.files
    return sorted({file.prefix for file in files if file.prefix is not None})


def require(ckpt, prefix, state):
    """It is intact, and bit for bit that state."""
    report = ckpt.catalog.verify(prefix)
    assert report.is_intact, report.damage
    found = ckpt.catalog.read(prefix)["model"]
    assert found.keys() == state.keys()
    for name, value in state.items():
        wanted = value.numpy() if isinstance(value, torch.Tensor) else value
        assert found[name].dtype == wanted.dtype, name
        assert found[name].tobytes() == wanted.tobytes(), name


def copied(state):
    return {name: value.clone() for name, value in state.items()}


# --- what is written


class Adapted(nn.Module):
    """A large part that is not trained, and a small one that is."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
        self.body.requires_grad_(False)
        self.down = nn.Linear(512, 16, bias=False)
        self.up = nn.Linear(16, 512, bias=False)

    def forward(self, x):
        return self.up(self.down(self.body(x)))


def train(model, optimizer, scheduler):
    optimizer.zero_grad()
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    scheduler.step()


def test_a_training_of_few_parameters_writes_little_more_than_these(storage, ckpt):
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    changed = 3 * sum(p.nbytes for p in trained)  # and two moments of each
    expected = {}
    for step in range(4):
        train(model, optimizer, scheduler)
        options = SaveOptions(checkpoint_prefix=f"s{step}", step=step, incremental=True)
        ckpt.save(model, optimizer, options, extra={"scheduler": scheduler})
        expected[step] = {name: each.clone() for name, each in model.state_dict().items()}
        written = shard_bytes(storage, f"s{step}")
        if step:
            assert borrowed(ckpt, f"s{step}") == ["s0"]
            assert written <= 1.05 * changed + 64 * KIB  # biases, random numbers, a header
        else:
            assert written > 12 * MIB
    for step, wanted in expected.items():
        into = Adapted(seed=1)
        other = torch.optim.AdamW([p for p in into.parameters() if p.requires_grad])
        schedule = torch.optim.lr_scheduler.StepLR(other, step_size=2)
        options = LoadOptions(checkpoint_prefix=f"s{step}")
        ckpt.load(into, other, options, extra={"scheduler": schedule})
        for name, value in into.state_dict().items():
            assert torch.equal(value, wanted[name]), name
        assert schedule.last_epoch == step + 1


def test_a_checkpoint_of_which_nothing_has_changed_has_no_file_of_its_own(storage, ckpt):
    state = {"a": numbers(64 * KIB), "b": numbers(8 * KIB, 1)}
    save(ckpt, "one", state)
    save(ckpt, "two", state)
    assert [info.key for info in storage.list("two/")] == ["two/metadata.json"]
    require(ckpt, "two", state)
    ckpt.catalog.delete("one")
    ckpt.catalog.gc()
    require(ckpt, "two", state)
    assert ckpt.catalog.info("two").size_bytes == shard_bytes(storage, "one")


def test_without_the_option_everything_is_written(storage, ckpt):
    state = {"a": numbers(64 * KIB)}
    save(ckpt, "one", state)
    save(ckpt, "two", state, incremental=False)
    assert borrowed(ckpt, "two") == []
    assert shard_bytes(storage, "two") == shard_bytes(storage, "one")


def test_what_is_smaller_than_4_kib_is_written(ckpt):
    state = {"least": numbers(4096), "small": numbers(4092), "none": torch.zeros(0, 3)}
    save(ckpt, "one", state)
    save(ckpt, "two", state)
    files = ckpt.catalog.find("two").record.files
    tensors = ckpt.catalog.find("two").record.tensors
    where = {name: files[tensor.placement.files[0][0]].prefix for name, tensor in tensors.items()}
    assert where == {"model.least": "one", "model.small": None, "model.none": None}
    require(ckpt, "two", state)


@pytest.mark.parametrize("at", [0, 1, 65_535, 65_536, 300_000, -1])
def test_one_element_that_changed_is_noticed_in_whatever_chunk_it_is(ckpt, at):
    state = {"long": numbers(MIB + 512 * KIB + 4), "same": numbers(MIB, 1)}
    save(ckpt, "one", state)
    before = copied(state)
    state["long"].view(torch.int32)[at] ^= 1
    save(ckpt, "two", state)
    where = ckpt.catalog.find("two").record
    assert where.files[where.tensors["model.long"].placement.files[0][0]].prefix is None
    assert where.files[where.tensors["model.same"].placement.files[0][0]].prefix == "one"
    require(ckpt, "one", before)
    require(ckpt, "two", state)


def test_a_float_that_became_another_zero_or_nan_has_changed(ckpt):
    state = {"a": torch.zeros(4096), "b": torch.full((4096,), torch.nan)}
    save(ckpt, "one", state)
    state["a"].neg_()
    save(ckpt, "two", state)
    assert np.signbit(ckpt.catalog.read("two")["model"]["a"]).all()
    require(ckpt, "two", state)
    assert borrowed(ckpt, "two") == ["one"]


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {"a": a.view(torch.int32)},
        lambda a: {"a": a.reshape(64, -1)},
        lambda a: {"renamed": a},
        lambda a: {"a": a[: len(a) // 2].clone()},
    ],
    ids=["dtype", "shape", "name", "part"],
)
def test_the_same_bytes_as_something_else_are_written_anew(ckpt, change):
    save(ckpt, "one", {"a": numbers(64 * KIB)})
    state = change(numbers(64 * KIB))
    save(ckpt, "two", state)
    assert borrowed(ckpt, "two") == []
    require(ckpt, "two", state)


def test_values_are_compared_not_strides_and_arrays_like_tensors(ckpt):
    square = numbers(64 * KIB).reshape(128, 128)
    array = np.arange(9000.0).reshape(90, 100)
    save(ckpt, "one", {"t": square.T.contiguous(), "n": np.ascontiguousarray(array.T)})
    state = {"t": square.T, "n": array.T}
    save(ckpt, "two", state)
    assert [file.prefix for file in ckpt.catalog.find("two").record.files] == ["one"]
    found = ckpt.catalog.read("two")["model"]
    assert np.array_equal(found["t"], square.T.numpy())
    assert np.array_equal(found["n"], array.T)


def test_leaves_come_and_go(ckpt):
    one = {"a": numbers(64 * KIB), "b": numbers(64 * KIB, 1)}
    two = {"b": one["b"], "c": numbers(64 * KIB, 2)}
    save(ckpt, "one", one)
    save(ckpt, "two", two)
    save(ckpt, "three", one | two)
    require(ckpt, "two", two)
    require(ckpt, "three", one | two)
    assert borrowed(ckpt, "three") == ["one", "two"]


@pytest.mark.parametrize("first", ["none", "fast", "maximum"])
@pytest.mark.parametrize("second", ["none", "balanced"])
def test_a_compressed_checkpoint_is_referred_to_like_any_other(ckpt, first, second):
    state = {"a": torch.arange(100_000), "b": numbers(64 * KIB)}
    save(ckpt, "one", state, compression_level=first)
    state["b"] += 1
    save(ckpt, "two", state, compression_level=second)
    assert borrowed(ckpt, "two") == ["one"]
    ckpt.catalog.delete("one")
    require(ckpt, "two", state)


def test_a_large_tensor_that_is_stored_in_several_files_is_referred_to_as_a_whole(storage, ckpt):
    large = torch.zeros(20, MIB, dtype=torch.float32)  # 80 MiB, in two boxes if compressed
    large[:, ::4096] = torch.rand(20, 256)
    state = {"large": large, "b": numbers(64 * KIB)}
    save(ckpt, "one", state, compression_level="fast")
    assert len(ckpt.catalog.find("one").record.files) == 2
    state["b"] += 1
    save(ckpt, "two", state, compression_level="fast")
    tensors = {each: ckpt.catalog.find(each).record.tensors for each in ("one", "two")}
    assert tensors["two"]["model.large"].placement.cuts is not None
    assert (
        tensors["two"]["model.large"].placement.cuts == tensors["one"]["model.large"].placement.cuts
    )
    assert shard_bytes(storage, "two") < MIB
    require(ckpt, "two", state)
    large[19, 0] = 7
    save(ckpt, "three", state, compression_level="fast")
    assert shard_bytes(storage, "three") > shard_bytes(storage, "one") / 2
    require(ckpt, "three", state)


def test_a_file_is_not_kept_for_a_small_part_of_it(ckpt):
    """Or else a chain of saves would keep every file for whatever did not change since."""
    state = {"large": numbers(MIB), "small": numbers(16 * KIB, 1), "some": numbers(64 * KIB, 2)}
    save(ckpt, "one", state)
    state["large"] += 1
    save(ckpt, "two", state)
    assert borrowed(ckpt, "two") == ["one"]  # for 80 KiB
    state["large"] += 1
    state["some"] += 1
    save(ckpt, "three", state)
    assert borrowed(ckpt, "three") == []  # not for 16
    require(ckpt, "three", state)


# --- what it refers to


def test_it_refers_to_what_was_last_saved_or_loaded_and_else_to_the_newest(storage):
    mine, other = {"a": numbers(64 * KIB)}, {"a": numbers(64 * KIB, 1)}
    with DistributedCheckpoint(storage=storage) as first:
        save(first, "mine", mine)
        with DistributedCheckpoint(storage=storage) as second:
            save(second, "others", other)
        save(first, "a", mine)
        assert borrowed(first, "a") == ["mine"]
    with DistributedCheckpoint(storage=storage) as again:
        again.load({"a": torch.zeros(16 * KIB)}, options=LoadOptions(checkpoint_prefix="others"))
        save(again, "b", other)
        assert borrowed(again, "b") == ["others"]
    with DistributedCheckpoint(storage=storage) as fresh:
        save(fresh, "c", other)  # the newest is "b"
        assert borrowed(fresh, "c") == ["others"]
        fresh.delete_checkpoint("c")
        save(fresh, "d", other)
        assert borrowed(fresh, "d") == ["others"]


def test_a_shortcut_refers_to_the_newest(tmp_path):
    state = {"a": numbers(64 * KIB)}
    holdfast.save(state, tmp_path / "one")
    holdfast.save(state, tmp_path / "two", incremental=True)
    (tmp_path / "one" / "metadata.json").unlink()
    assert not list((tmp_path / "two").glob("shard*"))
    assert torch.equal(holdfast.load(tmp_path / "two")["a"], state["a"])


def test_nothing_in_a_folder_that_is_a_store_of_its_own_is_referred_to(tmp_path, caplog):
    """Who cleans up there does not see the references of the store above."""
    state = {"a": numbers(64 * KIB)}
    holdfast.save(state, tmp_path / "run" / "one")
    holdfast.save(state, tmp_path / "two", incremental=True)  # the newest is the run's
    assert "run/one is in a folder that is a store of its own" in caplog.text
    Catalog(tmp_path / "run").delete("one")
    holdfast.save(state, tmp_path / "three", incremental=True)
    assert shard_bytes(LocalStorage(tmp_path), "three") == 0
    for prefix in ("two", "three"):
        assert torch.equal(holdfast.load(tmp_path / prefix)["a"], state["a"])


def test_a_checkpoint_may_replace_the_one_that_it_refers_to(storage, ckpt):
    state = {"a": numbers(64 * KIB), "b": numbers(64 * KIB, 1), "c": numbers(64 * KIB, 2)}
    save(ckpt, "latest", state)
    for name in ("b", "c", "b", "c"):
        state[name] += 1
        save(ckpt, "latest", state, overwrite=True)
        require(ckpt, "latest", state)
        assert borrowed(ckpt, "latest") == []  # its own folder has no name in its record
    files = ckpt.catalog.find("latest").record.files
    assert {info.key for info in storage.list()} == {
        "latest/metadata.json",
        *(f"latest/{file.name}" for file in files),
    }
    ckpt.catalog.delete("latest")
    assert files_of(storage) == {}


def test_a_name_that_is_saved_again_refers_to_its_own_folder_through_another(storage, ckpt):
    state = {"a": numbers(64 * KIB), "b": numbers(64 * KIB, 1)}
    save(ckpt, "one", state)
    state["b"] += 1
    save(ckpt, "two", state)
    save(ckpt, "one", state, overwrite=True)
    files = ckpt.catalog.find("one").record.files
    assert sorted(str(file.prefix) for file in files) == ["None", "two"]
    require(ckpt, "one", state)
    ckpt.catalog.delete("one")
    require(ckpt, "two", state)


def test_the_model_files_of_the_checkpoint_that_is_replaced_are_not_referred_to(tmp_path):
    """They have an index, and are for others to read; the new record is about no model."""
    model = nn.Module()
    model.model = nn.Linear(64, 64)
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path)) as ckpt:
        whole = SaveOptions(checkpoint_prefix="a", format="consolidated")
        ckpt.save_model_only(model, whole)
        ckpt.save_model_only(model.model, SaveOptions(checkpoint_prefix="b", incremental=True))
        assert borrowed(ckpt, "b") == ["a"]
        assert ckpt.catalog.find("b").record.files[-1].table is not None
        again = SaveOptions(checkpoint_prefix="a", incremental=True, overwrite=True)
        ckpt.catalog.delete("b")
        ckpt.load(model, options=LoadOptions(checkpoint_prefix="a"))
        ckpt.save_model_only(model.model, again)
        assert not list((tmp_path / "a").glob("model*"))
        assert ckpt.catalog.verify("a").is_intact
        weight = model.model.weight.detach().numpy()
        assert np.array_equal(ckpt.catalog.read("a")["model"]["weight"], weight)


@pytest.mark.parametrize("form", ["single_file", "consolidated"])
def test_files_that_are_handed_on_cannot_be_incremental(form):
    with pytest.raises(ValueError, match=f"incremental=True is refused with format '{form}'"):
        SaveOptions(incremental=True, format=form)
    with pytest.raises(ValueError, match="incremental"):
        SaveOptions(incremental="yes")


# --- deleting


def test_whatever_is_deleted_of_a_chain_the_rest_is_whole(storage, ckpt):
    state = {name: numbers(64 * KIB, seed) for seed, name in enumerate("abcde")}
    expected = {}
    for step in range(6):
        if step:
            state["abcde"[step - 1]] += 1
        save(ckpt, f"s{step}", state)
        expected[f"s{step}"] = copied(state)
    assert borrowed(ckpt, "s5") == [f"s{step}" for step in range(5) if step]
    assert borrowed(ckpt, "s4") == ["s0", "s1", "s2", "s3"]
    for gone in ("s2", "s0", "s3"):
        ckpt.catalog.delete(gone)
        ckpt.catalog.gc()
        del expected[gone]
        for prefix, wanted in expected.items():
            require(ckpt, prefix, wanted)
    save(ckpt, "s6", state)
    require(ckpt, "s6", state)
    for gone in ("s1", "s4", "s5"):
        ckpt.catalog.delete(gone)
    ckpt.catalog.gc()
    require(ckpt, "s6", state)
    named = {file.name for file in ckpt.catalog.find("s6").record.files}
    assert {info.key.rpartition("/")[2] for info in storage.list()} == named | {"metadata.json"}
    ckpt.catalog.delete("s6")
    ckpt.catalog.gc()
    assert files_of(storage) == {}


# --- a base that is not what it was


def damage_header(data):
    data[100] ^= 1


def damage_table(data):
    data[-3] ^= 1


def cut(data):
    del data[-5:]


@pytest.mark.parametrize("damage", [damage_header, damage_table, cut])
def test_a_file_that_is_damaged_is_not_referred_to(storage, ckpt, caplog, damage):
    state = {"a": numbers(64 * KIB), "b": numbers(64 * KIB, 1), "c": numbers(64 * KIB, 2)}
    save(ckpt, "one", state)
    state["b"] += 1
    save(ckpt, "two", state)
    (info,) = storage.list("one/shard-")
    data = bytearray(storage.read(info.key))
    damage(data)
    put(storage, info.key, bytes(data))
    with caplog.at_level(logging.WARNING):
        save(ckpt, "three", state)
    assert borrowed(ckpt, "three") == ["two"]  # "b", which is whole
    require(ckpt, "three", state)
    (warning,) = [each for each in caplog.records if each.name == "holdfast.distributed"]
    assert "written anew rather than referred to" in warning.getMessage()
    assert info.key in warning.getMessage()


def test_a_file_that_is_missing_is_not_referred_to(storage, ckpt, caplog):
    state = {"a": numbers(64 * KIB)}
    save(ckpt, "one", state)
    (info,) = storage.list("one/shard-")
    storage.delete(info.key)
    save(ckpt, "two", state)
    assert borrowed(ckpt, "two") == []
    require(ckpt, "two", state)
    assert "a file of the checkpoint is missing" in caplog.text


def test_a_record_that_is_damaged_is_not_referred_to(storage, ckpt, caplog):
    state = {"a": numbers(64 * KIB)}
    save(ckpt, "older", state)
    save(ckpt, "one", state, incremental=False)
    put(storage, "one/metadata.json", b'{"format":"holdfast","version":1,"dig')
    save(ckpt, "two", state)
    assert borrowed(ckpt, "two") == ["older"]
    require(ckpt, "two", state)
    assert "not referred to: the commit record is damaged" in caplog.text


def test_damage_in_a_tensor_of_the_base_is_found_where_it_is_referred_to(storage, ckpt):
    """Referring reads no data of the base: that is what ``verify`` and every load do."""
    state = {"a": numbers(64 * KIB), "b": numbers(64 * KIB, 1)}
    save(ckpt, "one", state)
    state["b"] += 1
    (info,) = storage.list("one/shard-")
    data = bytearray(storage.read(info.key))
    data[4096] ^= 1  # the first byte of "a"
    put(storage, info.key, bytes(data))
    save(ckpt, "two", state)
    (damage,) = ckpt.catalog.verify("two").damage
    assert (damage.tensor, damage.file) == ("model.a", info.key)
    into = {"a": torch.zeros(16 * KIB), "b": torch.zeros(16 * KIB)}
    with pytest.raises(CorruptedError, match=r"tensor 'model\.a' is damaged"):
        ckpt.load(into, options=LoadOptions(checkpoint_prefix="two"))
    assert not into["b"].any()


def test_damage_in_what_is_not_referred_to_is_no_damage(storage, ckpt):
    state = {"a": numbers(64 * KIB), "b": numbers(64 * KIB, 1)}
    save(ckpt, "one", state)
    state["a"] += 1
    save(ckpt, "two", state)
    (info,) = storage.list("one/shard-")
    data = bytearray(storage.read(info.key))
    data[4096] ^= 1  # in "a", of which "two" has its own
    put(storage, info.key, bytes(data))
    assert [each.tensor for each in ckpt.catalog.verify("one").damage] == ["model.a"]
    require(ckpt, "two", state)
    into = copied(state)
    ckpt.load(into, options=LoadOptions(checkpoint_prefix="two"))


# --- others at the same time


def delete(catalog):
    catalog.delete("base")


def delete_both_and_collect(catalog):
    catalog.delete("base")
    catalog.delete("root")
    catalog.gc()


def replace(catalog):
    catalog.write("base", {"n": 1}, overwrite=True)


def roll_back(catalog):
    catalog.rollback("base")
    catalog.rollback("root")


def collect_after_the_lease(catalog):
    catalog.delete("base")
    aged(catalog.storage, intent=10_000).gc()


ACTIONS = [delete, delete_both_and_collect, replace, roll_back, collect_after_the_lease]


class Interrupted(WrappedStorage):
    """Lets another host act just before the call of a number."""

    def __init__(self, storage, at, act):
        super().__init__(storage)
        self.calls = 0
        self._at = at
        self._act = act

    def _through(self, method, key, call, /):
        self.calls += 1
        if self.calls - 1 == self._at:
            with contextlib.suppress(CheckpointError):
                self._act(Catalog(self._inner))
        return call()


@pytest.mark.parametrize("act", ACTIONS)
def test_whenever_another_host_removes_what_is_referred_to_nothing_is_broken(act):
    at, ended = 0, False
    outcomes = []
    while not ended:
        storage = MemoryStorage()
        state = {"a": numbers(16 * KIB), "b": numbers(16 * KIB, 1), "c": numbers(16 * KIB, 2)}
        interrupted = Interrupted(storage, -1, act)
        with DistributedCheckpoint(storage=interrupted) as ckpt:
            save(ckpt, "root", state)
            state["b"] += 1
            save(ckpt, "base", state)
            state["c"] += 1
            interrupted.calls, interrupted._at = 0, at
            try:
                save(ckpt, "new", state)
            except SaveError:
                assert act is collect_after_the_lease  # it was taken for dead
                outcomes.append("failed")
            else:
                outcomes.append(tuple(borrowed(ckpt, "new")))
            ended = interrupted.calls <= at
        clean = Catalog(storage)
        listed = [info.prefix for info in clean.list()]
        assert ("new" in listed) is (outcomes[-1] != "failed")
        for _ in range(2):
            for prefix in listed:
                assert clean.verify(prefix).is_intact, (prefix, at)
            if "new" in listed:
                found = clean.read("new")["model"]
                assert all(np.array_equal(found[name], state[name]) for name in state)
            aged(storage, intent=10_000).gc()
        at += 1
    assert len(outcomes) > 20
    assert outcomes[0] in {(), ("root",)}  # "base" was gone before it could be referred to
    assert outcomes[-1] == ("base", "root")
    assert ("failed" in outcomes) is (act is collect_after_the_lease)


def test_a_deletion_by_another_process_during_the_save_takes_nothing_away(tmp_path):
    state = {"a": numbers(64 * KIB), "b": numbers(64 * KIB, 1)}
    script = (
        "import sys; from holdfast.catalog import Catalog; "
        "c = Catalog(sys.argv[1]); c.delete('one'); print(c.gc().deleted)"
    )
    said = []

    def before(method, key):
        if method == "open_writer" and "two/shard-" in key and not said:
            command = [sys.executable, "-c", script, str(tmp_path)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            said.append(done.stdout.strip())

    with DistributedCheckpoint(storage=Observed(LocalStorage(tmp_path), before)) as ckpt:
        save(ckpt, "one", state)
        state["b"] += 1
        save(ckpt, "two", state)
        assert said == ["()"]
        assert [info.prefix for info in ckpt.list_checkpoints()] == ["two"]
        assert borrowed(ckpt, "two") == ["one"]
        require(ckpt, "two", state)
        ckpt.catalog.gc()
        require(ckpt, "two", state)


def test_a_file_that_is_removed_by_hand_during_the_save_makes_it_fail(tmp_path):
    state = {"a": numbers(64 * KIB), "b": numbers(64 * KIB, 1)}

    def before(method, key):
        if method == "open_writer" and "two/shard-" in key:
            for file in Path(tmp_path).glob("one/shard-*"):
                file.unlink()

    with DistributedCheckpoint(storage=Observed(LocalStorage(tmp_path), before)) as ckpt:
        save(ckpt, "one", state)
        state["b"] += 1
        with pytest.raises(SaveError, match=r"is gone.*nothing was committed"):
            save(ckpt, "two", state)
        assert not list(Path(tmp_path).glob("two/*"))


# --- room, progress, moments


class Small(WrappedStorage):
    """Says that there is little room."""

    free = 0

    def free_bytes(self):
        return self.free


def test_the_room_that_is_needed_is_that_of_what_is_written():
    storage = Small(MemoryStorage())
    storage.free = 10 * MIB
    state = {"a": numbers(4 * MIB), "b": numbers(64 * KIB, 1)}
    with DistributedCheckpoint(storage=storage) as ckpt:
        save(ckpt, "one", state)
        storage.free = 100 * KIB
        state["b"] += 1
        with pytest.raises(NoSpaceError, match="needs 4,259,840 bytes"):
            save(ckpt, "full", state, incremental=False)
        save(ckpt, "two", state)
        require(ckpt, "two", state)
        state["a"] += 1
        with pytest.raises(NoSpaceError, match="needs 4,194,304 bytes"):
            save(ckpt, "three", state)
        assert not list(storage.list("three/"))


def test_comparing_is_a_phase_of_its_own(ckpt):
    state = {"a": numbers(MIB), "b": numbers(64 * KIB, 1)}
    told = []
    save(ckpt, "one", state, progress=told.append)
    assert "compare" not in {each.phase for each in told}
    told.clear()
    state["b"] += 1
    save(ckpt, "two", state, progress=told.append)
    phases = list(dict.fromkeys(each.phase for each in told))
    assert phases == ["capture", "agree", "begin", "compare", "write", "commit"]
    ends = {each.phase: (each.done_bytes, each.total_bytes) for each in told}
    assert ends["compare"] == (MIB + 64 * KIB, MIB + 64 * KIB)
    assert ends["write"] == (64 * KIB, 64 * KIB)


def test_what_a_callback_raises_while_comparing_ends_the_save(storage, ckpt):
    state = {"a": numbers(MIB)}
    save(ckpt, "one", state)

    def stop(progress):
        if progress.phase == "compare":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(ckpt, "two", state, progress=stop)
    assert not list(storage.list("two/"))
    save(ckpt, "two", state)
    require(ckpt, "two", state)


def test_a_tensor_that_changes_after_it_was_compared_is_noticed(storage, ckpt):
    state = {"a": numbers(MIB), "b": numbers(64 * KIB, 1)}
    save(ckpt, "one", state)
    state["b"] += 1

    def change(progress):
        if progress.phase == "write" and not progress.done_bytes:
            state["a"].add_(1)

    with pytest.raises(TornSnapshotError, match=r"model\.a changed while being saved"):
        save(ckpt, "two", state, progress=change)
    assert not list(storage.list("two/"))


# --- in the background


@pytest.mark.parametrize("staging_bytes", [None, 16 * MIB], ids=["large pool", "small pool"])
def test_a_save_in_the_background_compares_the_state_of_its_moment(tmp_path, staging_bytes):
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(768, 768) for name in ("still", "moving")})
    model["still"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["moving"].parameters())

    def step():
        optimizer.zero_grad()
        model["moving"](torch.randn(4, 768)).square().mean().backward()
        optimizer.step()

    records = []
    options = CheckpointOptions(
        storage=tmp_path, staging_bytes=staging_bytes, on_save=records.append
    )
    with DistributedCheckpoint.create(options=options) as ckpt:
        for number in range(3):
            step()
            wanted = {name: each.numpy().copy() for name, each in model.state_dict().items()}
            chosen = SaveOptions(checkpoint_prefix=f"s{number}", incremental=True)
            handle = ckpt.save_async(model, optimizer, chosen)
            step()
            handle.result()
            found = ckpt.catalog.read(f"s{number}")["model"]
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
            assert ckpt.catalog.verify(f"s{number}").is_intact
        assert borrowed(ckpt, "s2") == ["s0"]
    weight = 4 * 768 * 768
    first, second, third = records
    assert (first.referred_bytes, first.state_bytes > 4 * weight) == (0, True)
    for record in (second, third):
        assert record.referred_bytes >= weight
        assert 3 * weight < record.written_bytes < 3.01 * weight + 64 * KIB
        assert record.state_bytes == first.state_bytes


# --- any sequence of calls

LEAVES = {"large": MIB, "b": 16 * KIB, "c": 16 * KIB, "d": 8 * KIB, "tiny": 400}

calls = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(sorted(LEAVES))),
    st.tuples(st.just("save"), st.booleans()),
    st.tuples(st.sampled_from(["replace", "delete", "load"]), st.integers(0, 100)),
    st.tuples(st.sampled_from(["gc", "restart"]), st.none()),
)


class Story:
    """A checkpointer and what it was told to save. Each call of a story is a method."""

    def __init__(self):
        self.storage = MemoryStorage()
        self.ckpt = DistributedCheckpoint(storage=self.storage)
        self.state = {
            name: numbers(nbytes, seed) for seed, (name, nbytes) in enumerate(LEAVES.items())
        }
        self.expected = {}
        self.count = 0

    def change(self, name):
        self.state[name] += 1

    def save(self, incremental):
        self.count += 1
        save(self.ckpt, f"s{self.count}", self.state, incremental=incremental)
        self.expected[f"s{self.count}"] = copied(self.state)

    def replace(self, number):
        if (prefix := self._chosen(number)) is not None:
            save(self.ckpt, prefix, self.state, overwrite=True)
            self.expected[prefix] = copied(self.state)

    def delete(self, number):
        if (prefix := self._chosen(number)) is not None:
            self.ckpt.delete_checkpoint(prefix)
            del self.expected[prefix]

    def load(self, number):
        if (prefix := self._chosen(number)) is not None:
            self.ckpt.load(self.state, options=LoadOptions(checkpoint_prefix=prefix))

    def gc(self, _):
        self.ckpt.catalog.gc()

    def restart(self, _):
        self.ckpt.close()
        self.ckpt = DistributedCheckpoint(storage=self.storage)

    def check(self):
        assert {info.prefix for info in self.ckpt.list_checkpoints()} == self.expected.keys()
        for prefix, wanted in self.expected.items():
            require(self.ckpt, prefix, wanted)

    def _chosen(self, number):
        return sorted(self.expected)[number % len(self.expected)] if self.expected else None


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(sequence=st.lists(calls, min_size=3, max_size=30))
def test_after_any_sequence_of_calls_every_checkpoint_is_what_was_saved(sequence):
    story = Story()
    for call, argument in sequence:
        getattr(story, call)(argument)
    story.check()
    while story.expected:
        story.delete(1)
        story.check()
    story.gc(None)
    assert files_of(story.storage) == {}
    story.ckpt.close()
