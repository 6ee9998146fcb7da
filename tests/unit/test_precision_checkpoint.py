"""Mixed-precision checkpoints as values and as files: what is kept, what comes back, and what is
refused with nothing changed."""

import contextlib
import dataclasses
import datetime as dt
import os
import random
import socket
import subprocess
import sys
import time

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.distributed._capture import capture
from holdfast.distributed._tensors import home
from holdfast.errors import (
    CheckpointError,
    CorruptedError,
    ErrorKind,
    IncompatibleVersionError,
    LoadError,
    SaveError,
    StorageError,
    ValidationError,
)
from holdfast.precision import (
    MixedPrecisionCheckpoint,
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    _files,
    create_checkpoint,
    load_and_restore,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    take_over,
    validate_checkpoint,
)
from holdfast.precision._files import _KIND
from holdfast.precision._sealed_file import write_sealed
from holdfast.storage import LocalStorage

FP16 = MixedPrecisionOptions.for_fp16(growth_interval=3, hysteresis=2, initial_scale=256.0)
BF16 = MixedPrecisionOptions.for_bf16()


@pytest.fixture(scope="module", autouse=True)
def _no_onednn():
    """Whose 16-bit kernels end the process on some machines."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def made(options=FP16, seed=0, kind=torch.optim.AdamW, width=6, *, model=None):
    torch.manual_seed(seed)
    model = model or nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2))
    inner = kind(model.parameters(), lr=0.01)
    return MixedPrecisionOptimizer(inner, options, model=model)


def trained(optimizer, steps, *, overflow=()):
    make = torch.Generator().manual_seed(7)
    for number in range(steps):
        loss = optimizer.model(torch.randn(3, 4, generator=make)).float().square().mean()
        optimizer.scale_loss(loss).backward()
        if number in overflow:
            optimizer.training_weights["0.weight"].grad.mul_(torch.inf)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def leaves(value, place=()):
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*place, key))]
    if isinstance(value, list | tuple):
        return [leaf for nth, item in enumerate(value) for leaf in leaves(item, (*place, nth))]
    if isinstance(value, torch.Tensor):
        bits = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        value = (value.dtype, tuple(value.shape), bits)
    return [(place, value)]


def everything(optimizer):
    """All that a restore may change, as plain values."""
    model = {name: value.detach() for name, value in optimizer.model.state_dict().items()}
    return leaves({"model": model, "optimizer": optimizer.state_dict()})


def _tree(checkpoint):
    """As it stands in a file."""
    return _files._tree(checkpoint, checkpoint.tree())


def fields_of(checkpoint):
    names = [field.name for field in dataclasses.fields(checkpoint)]
    return leaves({name: getattr(checkpoint, name) for name in names})


@pytest.fixture(scope="module")
def trainee():
    return trained(made(), 8, overflow={5, 6, 7})


@pytest.fixture
def saved(trainee, tmp_path):
    path = tmp_path / "mp.safetensors"
    save_checkpoint(create_checkpoint(trainee, {"run": "a"}), path)
    return path


class TestCreating:
    def test_it_has_the_fields_of_the_seed(self, trainee):
        before = dt.datetime.now(dt.UTC)
        checkpoint = create_checkpoint(trainee, metadata={"run": "a", "size": 3})
        stats = trainee.get_stats()
        assert isinstance(checkpoint, MixedPrecisionCheckpoint)
        assert checkpoint.version == 1
        assert before <= checkpoint.timestamp <= dt.datetime.now(dt.UTC)
        assert checkpoint.master_weights.keys() == checkpoint.training_weights.keys()
        assert checkpoint.master_weights["0.weight"].dtype == torch.float32
        assert checkpoint.training_weights["0.weight"].dtype == torch.float16
        assert checkpoint.current_loss_scale == stats.loss_scaler.current_scale
        assert checkpoint.steps_since_last_overflow == 0
        assert checkpoint.consecutive_overflows == 3
        assert checkpoint.total_overflows == 3
        assert checkpoint.step_count == 8
        assert checkpoint.skipped_steps == 3
        assert checkpoint.has_fallback is False
        assert checkpoint.options == trainee.options
        assert checkpoint.base_optimizer_state["class"] == "AdamW"
        assert checkpoint.metadata == {"run": "a", "size": 3}

    def test_later_steps_do_not_alter_it(self):
        optimizer = trained(made(), 3)
        checkpoint = create_checkpoint(optimizer)
        before, live = fields_of(checkpoint), everything(optimizer)
        trained(optimizer, 4)
        assert everything(optimizer) != live
        assert fields_of(checkpoint) == before

    def test_nor_does_what_is_done_to_the_metadata(self):
        given = {"list": [1]}
        checkpoint = create_checkpoint(made(), given)
        given["list"].append(2)
        assert checkpoint.metadata == {"list": [1]}

    def test_metadata_that_no_file_could_hold_is_refused(self):
        with pytest.raises(SaveError, match="metadata"):
            create_checkpoint(made(), {"hook": print})
        with pytest.raises(ValueError, match="metadata must be"):
            create_checkpoint(made(), ["run"])

    def test_it_takes_a_mixed_precision_optimizer(self):
        with pytest.raises(ValueError, match="MixedPrecisionOptimizer"):
            create_checkpoint(torch.optim.SGD(nn.Linear(2, 2).parameters()))


class TestFiles:
    def test_all_of_it_comes_back(self, trainee, tmp_path):
        checkpoint = create_checkpoint(trainee, {"run": "größe", "sizes": (1, 2), "at": 0.5})
        save_checkpoint(checkpoint, tmp_path / "mp.safetensors")
        loaded = load_checkpoint(tmp_path / "mp.safetensors")
        assert fields_of(loaded) == fields_of(checkpoint)
        assert type(loaded.metadata["sizes"]) is tuple
        assert loaded.timestamp == checkpoint.timestamp

    @pytest.mark.parametrize("kept", [True, False], ids=["with weights", "without"])
    def test_restoring_is_exact_with_training_weights_or_without(self, trainee, tmp_path, kept):
        path = tmp_path / "mp.safetensors"
        save_checkpoint(create_checkpoint(trainee, training_weights=kept), path)
        other = trained(made(seed=1), 2)
        checkpoint = load_and_restore(other, path)
        assert bool(checkpoint.training_weights) is kept
        assert everything(other) == everything(trainee)

    def test_of_thousands_of_parameters(self, tmp_path):
        """Whose names and numbers are more than one chunk of a file."""
        parameters = [nn.Parameter(torch.full((2,), float(each))) for each in range(1500)]
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD(parameters, lr=0.1), BF16)
        metadata = {"long": "x" * 300_000}
        save_checkpoint(create_checkpoint(optimizer, metadata), tmp_path / "a")
        loaded = load_checkpoint(tmp_path / "a")
        assert loaded.metadata == metadata
        assert loaded.master_weights["group0.1499"].tolist() == [1499.0, 1499.0]

    def test_a_layer_that_stays_fp32_is_stored_once(self, saved):
        with safetensors.safe_open(saved, "pt") as file:
            names = set(file.keys())
        assert {"master_weights.1.weight", "training_weights.0.weight"} <= names
        assert "training_weights.1.weight" not in names

    def test_the_safetensors_library_reads_it(self, saved, trainee):
        found = load_file(saved)
        for name, master in trainee.master_weights.items():
            assert torch.equal(found[f"master_weights.{name}"], master)

    def test_it_is_never_larger_than_it_must_be(self, saved, trainee):
        tree = trainee.state_dict()
        tensors = [value for _, value in leaves(tree) if isinstance(value, tuple)]
        assert saved.stat().st_size < 4 * 4096 + 64 * len(tensors)

    def test_saving_again_replaces_it(self, saved):
        save_checkpoint(create_checkpoint(made(), {"run": "b"}), saved)
        assert load_checkpoint(saved).metadata == {"run": "b"}
        assert [path.name for path in saved.parent.glob("[!.]*")] == [saved.name]

    def test_what_cannot_be_saved_leaves_what_was_there(self, saved, trainee):
        before = saved.read_bytes()
        whole = create_checkpoint(trainee)
        sparse = torch.ones(2, 2).to_sparse_coo()
        state = {**whole.base_optimizer_state, "more": sparse}
        for bad in (
            dataclasses.replace(whole, base_optimizer_state=state),
            dataclasses.replace(whole, metadata={"hook": print}),
            dataclasses.replace(whole, master_weights={}),
        ):
            with pytest.raises(SaveError) as caught:
                save_checkpoint(bad, saved)
            assert caught.value.path == str(saved)
            assert saved.read_bytes() == before

    def test_paths_may_be_text_links_urls_and_in_folders_that_are_not_there_yet(
        self, saved, trainee, tmp_path, monkeypatch
    ):
        checkpoint = create_checkpoint(trainee)
        monkeypatch.chdir(tmp_path)
        link = tmp_path / "latest"
        link.symlink_to(saved)
        for path in ("a/b/mp.safetensors", "here.safetensors", (tmp_path / "c").as_uri(), link):
            save_checkpoint(checkpoint, path)
            assert fields_of(load_checkpoint(path)) == fields_of(checkpoint)
        assert link.is_symlink()
        assert load_checkpoint(saved).metadata == {}

    @pytest.mark.parametrize("path", ["", None, 3, "a\0b"])
    def test_what_is_no_path_is_refused(self, trainee, path):
        with pytest.raises(ValueError, match="path must be"):
            save_checkpoint(create_checkpoint(trainee), path)
        with pytest.raises(ValueError, match="path must be"):
            load_checkpoint(path)


class TestBadFiles:
    def assert_refused(self, path, error=CheckpointError, match=None):
        optimizer = made(seed=3)
        before = everything(optimizer)
        with pytest.raises(error, match=match) as caught:
            load_and_restore(optimizer, path)
        assert caught.value.path == str(path)
        assert everything(optimizer) == before

    def test_every_flipped_bit_is_seen(self, saved):
        """In the header, its padding, tensors, values, seal and table."""
        data = saved.read_bytes()
        choose = random.Random(1)
        places = {*range(48), *range(len(data) - 48, len(data)), *range(0, len(data), 41)}
        for place in sorted(places):
            flipped = bytearray(data)
            flipped[place] ^= 1 << choose.randrange(8)
            saved.write_bytes(flipped)
            with pytest.raises(CheckpointError) as caught:
                load_checkpoint(saved)
            assert caught.value.path == str(saved)
        saved.write_bytes(data)
        load_checkpoint(saved)

    def test_changes_that_leave_a_header_that_can_be_read_are_seen_too(self, saved):
        data = saved.read_bytes()
        for old, new in [
            (b'"master_weights.0.bias"', b'"master_weights.9.bias"'),
            (b'"dtype":"F16"', b'"dtype":"I16"'),
            (b'"shape":[6,4]', b'"shape":[4,6]'),
            (b'"holdfast.mixed_precision":"1"', b'"holdfast.mixed_precision":"2"'),
            (b'"holdfast.mixed_precision"', b'"holdfast.mixed_precisioo"'),
        ]:
            changed = data.replace(old, new, 1)
            assert changed != data
            saved.write_bytes(changed)
            self.assert_refused(saved, CorruptedError, "header")

    def test_every_truncation_is_seen(self, saved):
        data = saved.read_bytes()
        for size in [*range(12), *range(12, len(data), 97), len(data) - 1]:
            saved.write_bytes(data[:size])
            with pytest.raises(CorruptedError):
                load_checkpoint(saved)
        saved.write_bytes(data + b"\0")
        self.assert_refused(saved, CorruptedError)

    def test_a_plain_safetensors_file(self, tmp_path):
        save_file({"master_weights.0.weight": torch.ones(6, 4)}, tmp_path / "a.safetensors")
        self.assert_refused(tmp_path / "a.safetensors", LoadError, "another program")

    @pytest.mark.parametrize("old", [False, True], ids=["zip", "pickle"])
    def test_a_file_of_torch_save(self, tmp_path, old):
        state = {"weight": torch.ones(3)}
        torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
        match = "safetensors" if old else r"torch\.save"
        self.assert_refused(tmp_path / "a.pt", CheckpointError, match)

    def test_a_distributed_checkpoint_and_one_of_its_files(self, tmp_path):
        options = CheckpointOptions(storage=tmp_path)
        with DistributedCheckpoint.create(options=options) as checkpoint:
            checkpoint.save({"w": torch.ones(3)}, options=SaveOptions(checkpoint_prefix="a"))
        self.assert_refused(tmp_path / "a", LoadError, "DistributedCheckpoint")
        (shard,) = (tmp_path / "a").glob("*.safetensors")
        self.assert_refused(shard, LoadError, "files of a checkpoint")

    @pytest.mark.parametrize("data", [b"", b"text", b"\x10" + b"\0" * 7 + b"{}" + b" " * 14])
    def test_anything_else(self, tmp_path, data):
        (tmp_path / "a").write_bytes(data)
        self.assert_refused(tmp_path / "a", CheckpointError)

    def test_nothing_there(self, tmp_path):
        self.assert_refused(tmp_path / "a", StorageError)
        with pytest.raises(FileNotFoundError):
            load_checkpoint(tmp_path / "a")

    def test_a_newer_version(self, trainee, tmp_path):
        tree = {**_tree(create_checkpoint(trainee)), "something new": 1}
        storage = LocalStorage(tmp_path)
        write_sealed(storage, "a", tree, kind=_KIND, version=2)
        self.assert_refused(tmp_path / "a", IncompatibleVersionError, "version 2.*newer holdfast")

    @pytest.mark.parametrize("version", [0, -1, 10**12, "x"])
    def test_no_version_at_all(self, trainee, tmp_path, version):
        storage = LocalStorage(tmp_path)
        write_sealed(storage, "a", _tree(create_checkpoint(trainee)), kind=_KIND, version=version)
        self.assert_refused(tmp_path / "a", CorruptedError, "version")

    @pytest.mark.parametrize(
        "change",
        [
            {"options": {"precision": "fp17"}},
            {"scaler": {"scale": -1.0}},
            {"step_count": "three"},
            {"step_count": True},
            {"skipped_steps": -1},
            {"master_weights": {}},
            {"master_weights": {"0.weight": 3}},
            {"training_weights": {"0.weight": torch.ones(1)}},
            {"base_optimizer_state": {}},
            {"base_optimizer_state": {"class": "SGD", "state": {}, "groups": [{"params": ["x"]}]}},
            {"base_optimizer_state": {"class": "AdamW", "state": {}, "groups": [3]}},
            {"metadata": None},
            {"options": torch.ones(2)},
            {"timestamp": torch.ones(2)},
            {"more": 1},
        ],
        ids=str,
    )
    def test_whole_files_of_wrong_values(self, trainee, tmp_path, change):
        tree = {**_tree(create_checkpoint(trainee)), **change}
        write_sealed(LocalStorage(tmp_path), "a", tree, kind=_KIND, version=1)
        self.assert_refused(tmp_path / "a", CorruptedError)

    @pytest.mark.parametrize("held", [None, 3, [], torch.ones(1)], ids=str)
    def test_state_that_is_none(self, trainee, tmp_path, held):
        tree = _tree(create_checkpoint(trainee))
        tree["base_optimizer_state"]["state"]["0.weight"] = held
        write_sealed(LocalStorage(tmp_path), "a", tree, kind=_KIND, version=1)
        self.assert_refused(tmp_path / "a", CorruptedError, r"0\.weight")


class TestRestoring:
    def assert_refused(self, optimizer, checkpoint, *words, **how):
        before = everything(optimizer)
        with pytest.raises(ValidationError) as caught:
            restore_checkpoint(optimizer, checkpoint, **how)
        assert caught.value.kind is ErrorKind.VALIDATION_FAILED
        for word in words:
            assert word in str(caught.value)
        assert everything(optimizer) == before

    def test_weights_alone(self, trainee):
        other = trained(made(seed=1), 2)
        mine = other.state_dict()
        counts = [mine[name] for name in ("scaler", "step_count", "skipped_steps")]
        state = leaves(mine["inner"])
        restore_checkpoint(other, create_checkpoint(trainee), restore_state=False)
        for name, master in trainee.master_weights.items():
            assert torch.equal(other.master_weights[name], master)
            assert torch.equal(other.training_weights[name], trainee.training_weights[name])
        now = other.state_dict()
        assert [now[name] for name in ("scaler", "step_count", "skipped_steps")] == counts
        assert leaves(now["inner"]) == state

    def test_state_alone(self, trainee):
        other = trained(made(seed=1), 2)
        weights = leaves({n: w.detach() for n, w in other.training_weights.items()})
        masters = leaves({n: w.detach().clone() for n, w in other.master_weights.items()})
        restore_checkpoint(other, create_checkpoint(trainee), restore_weights=False)
        assert leaves({n: w.detach() for n, w in other.training_weights.items()}) == weights
        assert leaves({n: w.detach() for n, w in other.master_weights.items()}) == masters
        wanted, found = trainee.state_dict(), other.state_dict()
        for name in ("inner", "scaler", "step_count", "skipped_steps", "has_fallback"):
            assert leaves(found[name]) == leaves(wanted[name])

    def test_nothing_at_all(self, trainee):
        other = trained(made(seed=1), 2)
        before = everything(other)
        checkpoint = create_checkpoint(trainee)
        restore_checkpoint(other, checkpoint, restore_weights=False, restore_state=False)
        assert everything(other) == before

    def test_it_can_be_restored_again_and_is_not_altered(self, trainee):
        checkpoint = create_checkpoint(trainee)
        before = fields_of(checkpoint)
        other = made(seed=1)
        for _ in range(2):
            restore_checkpoint(other, checkpoint)
            assert everything(other) == everything(trainee)
            trained(other, 2)
            assert fields_of(checkpoint) == before

    def test_another_model_is_refused_with_the_whole_list(self, trainee):
        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2), nn.Linear(2, 2))
        checkpoint = create_checkpoint(trainee)
        other = made(model=model)
        words = ("'0.weight'", "'0.bias'", "'1.weight'", "'2.weight'", "'3.weight'", "'3.bias'")
        self.assert_refused(other, checkpoint, *words, "no master of '3.weight'")
        self.assert_refused(trainee, create_checkpoint(other), *words, "unknown here")

    def test_another_precision_is_refused(self, trainee):
        self.assert_refused(made(BF16), create_checkpoint(trainee), "fp16", "bf16")

    def test_another_optimizer_is_refused_unless_only_weights_are_restored(self, trainee):
        other, checkpoint = made(kind=torch.optim.SGD), create_checkpoint(trainee)
        self.assert_refused(other, checkpoint, "AdamW", "SGD")
        restore_checkpoint(other, checkpoint, restore_state=False)
        weight = trainee.master_weights["0.weight"]
        assert torch.equal(other.master_weights["0.weight"], weight)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_masters_that_are_not_finite_are_refused(self, trainee, value):
        checkpoint = create_checkpoint(trainee, training_weights=False)
        for name in ("0.bias", "2.weight"):
            checkpoint.master_weights[name].view(-1)[1] = value
        self.assert_refused(made(), checkpoint, "'0.bias'", "'2.weight'", "not finite")

    def test_weights_that_are_not_their_masters_are_refused_or_chosen_from(self, trainee):
        checkpoint = create_checkpoint(trainee)
        checkpoint.training_weights["0.weight"].add_(0.25)
        self.assert_refused(made(seed=1), checkpoint, "'0.weight'", "masters_from")
        other = made(seed=1)
        restore_checkpoint(other, checkpoint, masters_from="model")
        wanted = checkpoint.training_weights["0.weight"]
        assert torch.equal(other.training_weights["0.weight"], wanted)
        assert torch.equal(other.master_weights["0.weight"], wanted.float())
        chosen = dataclasses.replace(checkpoint, training_weights={})
        restore_checkpoint(other, chosen)
        assert torch.equal(other.master_weights["0.weight"], trainee.master_weights["0.weight"])

    def test_masters_made_of_the_model_as_it_is(self, trainee):
        checkpoint = create_checkpoint(trainee, training_weights=False)
        other = made(seed=1)
        weight = other.training_weights["0.weight"].detach().clone()
        restore_checkpoint(other, checkpoint, masters_from="model")
        assert torch.equal(other.training_weights["0.weight"], weight)
        assert torch.equal(other.master_weights["0.weight"], weight.float())
        assert other.step_count == trainee.step_count

    def test_an_unknown_choice_is_refused(self, trainee):
        with pytest.raises(ValueError, match="masters_from"):
            restore_checkpoint(trainee, create_checkpoint(trainee), masters_from="disk")
        with pytest.raises(ValueError, match="checkpoint must be"):
            restore_checkpoint(trainee, None)

    def test_the_state_dict_of_the_optimizer_says_the_same(self, trainee):
        other = made(seed=1)
        other.load_state_dict(trainee.state_dict())
        assert everything(other) == everything(trainee)


class TestValidating:
    @pytest.mark.parametrize("kept", [True, False])
    def test_a_whole_one_is_valid(self, trainee, kept):
        result = validate_checkpoint(create_checkpoint(trainee, training_weights=kept))
        assert result
        assert result.is_valid
        assert not result.has_warnings

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({"version": 0}, "version"),
            ({"version": 2}, "version"),
            ({"master_weights": {}}, "no master weights"),
            ({"master_weights": None}, "master_weights"),
            ({"options": None}, "options"),
            ({"scaler": None}, "scaler"),
            ({"step_count": -1}, "step_count"),
            ({"has_fallback": 1}, "has_fallback"),
            ({"training_weights": {"0.weight": torch.ones(6, 4).half()}}, "missing"),
            ({"base_optimizer_state": {}}, "base_optimizer_state"),
        ],
        ids=str,
    )
    def test_one_that_is_not_says_why(self, trainee, changes, word):
        result = validate_checkpoint(dataclasses.replace(create_checkpoint(trainee), **changes))
        assert not result
        assert word in result.summary()

    def test_it_looks_at_the_values(self, trainee):
        checkpoint = create_checkpoint(trainee)
        checkpoint.master_weights["0.bias"][0] = torch.nan
        checkpoint.training_weights["2.weight"].add_(1)
        text = validate_checkpoint(checkpoint).summary()
        assert "'0.bias' is not finite" in text
        assert "'2.weight' is not its master" in text

    @pytest.mark.parametrize("what", [None, {}, "mp.safetensors"])
    def test_what_is_no_checkpoint_is_not_valid(self, what):
        assert not validate_checkpoint(what)


class TestDistributedCheckpoint:
    """What the checkpoints of any other optimizer do, too."""

    def stepped(self, optimizer, steps):
        for _ in range(steps):
            for weight in optimizer.training_weights.values():
                weight.grad = torch.randn_like(weight)
            optimizer.step()
            optimizer.zero_grad()

    def large(self, seed, storage="fp32"):
        """Of tensors that are not copied at once when a save begins."""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        options = MixedPrecisionOptions.for_bf16(master_storage=storage)
        return MixedPrecisionOptimizer(inner, options, model=model)

    @pytest.mark.parametrize("storage", ["fp32", "remainder"])
    @pytest.mark.parametrize("snapshot", ["live", "copy"])
    def test_steps_do_not_reach_what_is_being_saved(self, tmp_path, storage, snapshot):
        optimizer = self.large(1, storage)
        self.stepped(optimizer, 2)
        with DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path)) as store:
            for number in range(2):
                options = SaveOptions(checkpoint_prefix=f"{number}", snapshot=snapshot)
                then = everything(optimizer)
                handle = store.save_async(optimizer.model, optimizer, options)
                self.stepped(optimizer, 2)
                handle.result()
                assert everything(optimizer) != then
                other = self.large(2, storage)
                store.load(other.model, other, LoadOptions(checkpoint_prefix=f"{number}"))
                assert everything(other) == then

    def test_the_weights_are_copied_in_the_background_as_the_masters_are(self):
        optimizer = self.large(1)
        self.stepped(optimizer, 1)
        captured = capture({"model": optimizer.model, "optimizer": optimizer})
        for tensors in (optimizer.training_weights, optimizer.master_weights):
            assert {home(tensor) for tensor in tensors.values()} <= captured.owned

    def test_a_fresh_one_resumes(self, trainee, tmp_path):
        with DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path)) as store:
            store.save(trainee.model, trainee, SaveOptions(checkpoint_prefix="a"))
            other = made(seed=1)
            assert store.resume(other.model, other).prefix == "a"
        assert everything(other) == everything(trainee)


class TestTakingOver:
    """A training begun with autocast, ``GradScaler`` and a plain optimizer."""

    def begun(self, steps=6):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        for number in range(steps):
            loss = model(torch.full((3, 4), number / 10)).square().mean()
            scaler.scale(loss).backward()
            if number == 2:
                model[0].weight.grad.mul_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model, optimizer, scaler

    @pytest.mark.parametrize("before", [True, False], ids=["loaded before", "given"])
    def test_scale_tracker_state_and_weights_go_on(self, before):
        model, theirs, scaler = self.begun()
        torch.manual_seed(9)
        ours = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
        ours.load_state_dict(model.state_dict())
        inner = torch.optim.AdamW(ours.parameters())
        if before:
            inner.load_state_dict(theirs.state_dict())
        optimizer = MixedPrecisionOptimizer(inner, MixedPrecisionOptions.for_fp16(), model=ours)
        take_over(optimizer, scaler.state_dict(), None if before else theirs.state_dict())
        state = optimizer.scaler.state
        assert state.scale == scaler.get_scale() == 512.0
        assert state.growth_tracker == scaler.state_dict()["_growth_tracker"] == 3
        assert state.growth_interval == 4
        for (name, master), parameter in zip(
            optimizer.master_weights.items(), model.parameters(), strict=True
        ):
            assert torch.equal(master, parameter), name
            for key, value in theirs.state[parameter].items():
                found = optimizer.state[master][key]
                assert torch.equal(found, value), (name, key)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.02, 0.1)
        optimizer.scale_loss(ours(torch.ones(2, 4)).float().sum()).backward()
        assert optimizer.step().applied
        assert optimizer.scaler.scale == 1024.0  # the fourth in a row

    def test_a_scale_outside_of_its_limits_is_brought_inside(self):
        optimizer = made(MixedPrecisionOptions.for_fp16(max_scale=2.0**18))
        state = torch.amp.GradScaler("cpu").state_dict()
        for scale, wanted in ((0.0, 1.0), (1e-30, 1.0), (2.0**20, 2.0**18)):
            take_over(optimizer, {**state, "scale": scale})
            assert optimizer.scaler.scale == wanted

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"scale": 2.0},
            None,
            {**torch.amp.GradScaler("cpu").state_dict(), "scale": float("nan")},
            {**torch.amp.GradScaler("cpu").state_dict(), "growth_interval": 0},
            {**torch.amp.GradScaler("cpu").state_dict(), "_growth_tracker": "x"},
        ],
        ids=str,
    )
    def test_what_no_scaler_has_is_refused(self, trainee, state):
        before = everything(trainee)
        with pytest.raises(ValidationError, match="grad_scaler_state"):
            take_over(trainee, state)
        assert everything(trainee) == before

    def test_the_state_of_another_optimizer_is_refused(self, trainee):
        before = everything(trainee)
        scaler = torch.amp.GradScaler("cpu").state_dict()
        small = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        for state in (small.state_dict(), {}, {"state": 3, "param_groups": []}):
            with pytest.raises(ValidationError, match="optimizer_state"):
                take_over(trainee, scaler, state)
        _, theirs, _ = self.begun()
        packed = theirs.state_dict()
        packed["state"][0]["exp_avg"] = torch.ones(3)
        with pytest.raises(ValidationError, match=r"0\.weight"):
            take_over(trainee, scaler, packed)
        assert everything(trainee) == before


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(StorageError, match="File name too long"):
        save_checkpoint(create_checkpoint(made()), tmp_path / ("n" * 300))
    with pytest.raises(StorageError, match="File name too long"):
        load_checkpoint(tmp_path / ("n" * 300))


@pytest.mark.parametrize("kind", ["pipe", "socket", "link"])
def test_what_is_no_file_stays_what_it_is(tmp_path, kind):
    path = tmp_path / "mp.safetensors"
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        else:
            path.symlink_to(path)
        before = path.lstat()
        checkpoint = create_checkpoint(made())
        for act in (lambda: save_checkpoint(checkpoint, path), lambda: load_checkpoint(path)):
            with pytest.raises(StorageError, match="no file") as caught:
                act()
            assert caught.value.path == str(path)
        assert path.lstat().st_ino == before.st_ino
        assert list(tmp_path.iterdir()) == [path]


_SAVES = """
import sys, torch
from torch import nn
from holdfast.precision import *
weight = nn.Parameter(torch.zeros(1000, 1000))
inner = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
optimizer = MixedPrecisionOptimizer(inner, MixedPrecisionOptions())
while True:
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    print("saving", flush=True)
    save_checkpoint(create_checkpoint(optimizer), sys.argv[1])
    print(optimizer.step_count, flush=True)
"""


def test_a_process_that_is_killed_while_it_saves_leaves_the_last_whole_file(tmp_path):
    """What it said was saved is there, or something newer."""
    path = tmp_path / "mp"
    command = [sys.executable, "-c", _SAVES, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saving:
        said = [saving.stdout.readline().strip() for _ in range(5)]
        assert said == ["saving", "1", "saving", "2", "saving"]
        time.sleep(0.003)
        saving.kill()
        rest = saving.stdout.read().split()
    told = max(int(word) for word in ["2", *rest] if word.isdigit())
    found = load_checkpoint(path)
    assert told <= found.step_count <= told + 1
    assert validate_checkpoint(found)
