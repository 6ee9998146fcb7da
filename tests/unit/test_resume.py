"""Which checkpoint a training goes on from, in one process: damage, deletions, refusals."""

import gc
import logging
import os
import re
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from holdfast.catalog import Catalog
from holdfast.coordination import SoloCoordinator
from holdfast.distributed import (
    CheckpointOptions,
    DistributedCheckpoint,
    Finding,
    FullReadChecker,
    LoadOptions,
    RequiredMetadata,
    SameWorldSize,
    SaveOptions,
)
from holdfast.distributed._staging import Staging
from holdfast.errors import (
    ClosedError,
    CorruptedError,
    LoadError,
    StorageError,
    TransientStorageError,
    ValidationError,
)
from holdfast.format import decode_record, encode_record
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage._wrapped import WrappedStorage

STEPS = (10, 20, 30)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


def opened(storage, **options):
    return DistributedCheckpoint.create(
        SoloCoordinator(), CheckpointOptions(storage=storage, **options)
    )


def net_of(step):
    """A net whose every value says which step it is of."""
    net = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 4))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(step)
    return net


def step_in(net):
    """The step that all of a net is of."""
    values = [value for each in net.parameters() for value in each.detach().flatten().tolist()]
    (step,) = set(values)
    return int(step)


def save(storage, *steps, **options):
    with opened(storage) as ckpt:
        for step in steps:
            name = SaveOptions(checkpoint_prefix=f"step_{step}", step=step, **options)
            ckpt.save(net_of(step), None, name, extra={"epoch": step // 10})


def resume(storage, options=None, **made):
    """A resume into a fresh net: its result, and which step the net is of then."""
    net, extra = net_of(0), {"epoch": 0}
    with opened(storage, **made) as ckpt:
        result = ckpt.resume(net, None, options, extra=extra)
    assert extra["epoch"] == step_in(net) // 10
    return result, step_in(net)


def shard_of(folder, step):
    (shard,) = Path(folder, f"step_{step}").glob("shard-*.safetensors")
    return shard


def record_of(folder, step):
    return Path(folder, f"step_{step}", "metadata.json")


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Meddled(WrappedStorage):
    """A storage in which something happens before a call."""

    def __init__(self, storage, meddle):
        super().__init__(storage)
        self._meddle = meddle

    def _through(self, method, key, call):
        self._meddle(method, key)
        return call()


# ------------------------------------------------------------------ the newest


def test_an_empty_storage_has_nothing_to_resume_from(folder):
    assert resume(folder) == (None, 0)
    assert resume(MemoryStorage()) == (None, 0)


def test_saves_that_never_ended_are_nothing_to_resume_from(folder):
    save(folder, 10)
    record_of(folder, 10).unlink()  # as if killed before the commit
    Path(folder, "step_20").mkdir()
    Path(folder, "step_20", "intent-0123456789abcdef.json").write_bytes(b"{}")
    assert resume(folder) == (None, 0)


def test_it_resumes_from_the_newest(folder):
    save(folder, *STEPS, metrics={"loss": 0.5}, custom_metadata={"git": "abc"})
    result, step = resume(folder)
    assert (step, result.prefix, result.step) == (30, "step_30", 30)
    assert result.extra == {"epoch": 3}
    assert result.passed_over == ()
    assert result.metadata.custom_metadata == {"git": "abc"}
    assert result.loaded.metadata is result.metadata
    assert str(result) == "resumed from step_30, step 30, saved by 1 rank and loaded by 1 rank"


def test_the_newest_is_what_was_saved_last_whatever_its_name_and_step(folder):
    save(folder, 30, 10)
    assert resume(folder)[1] == 10


def test_a_checkpoint_without_a_step_has_none(folder):
    with opened(folder) as ckpt:
        ckpt.save(net_of(1), options=SaveOptions(checkpoint_prefix="a"))
        result = ckpt.resume(net_of(0))
    assert (result.prefix, result.step) == ("a", None)
    assert str(result) == "resumed from a, saved by 1 rank and loaded by 1 rank"


def test_an_optimizer_and_options_are_passed_on(folder):
    net = net_of(1)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    with opened(folder) as ckpt:
        ckpt.save(net, optimizer, SaveOptions(checkpoint_prefix="a"))
        for load_optimizer in (True, False):
            other = net_of(0)
            into = torch.optim.Adam(other.parameters())
            told = []
            options = LoadOptions(load_optimizer=load_optimizer, progress=told.append)
            result = ckpt.resume(other, into, options)
            assert bool(into.state) == load_optimizer
            assert (result.loaded.optimizer_state is not None) == load_optimizer
            assert told[0].operation == "load"


# ------------------------------------------------------------------ damage


def a_byte_is_flipped(folder, step):
    flip(shard_of(folder, step), at=5000)


def a_file_is_cut(folder, step):
    os.truncate(shard_of(folder, step), 4200)


def a_file_is_empty(folder, step):
    os.truncate(shard_of(folder, step), 0)


def a_file_is_gone(folder, step):
    shard_of(folder, step).unlink()


def a_record_is_damaged(folder, step):
    flip(record_of(folder, step), at=-20)


def a_record_is_empty(folder, step):
    os.truncate(record_of(folder, step), 0)


def a_record_is_zero(folder, step):
    path = record_of(folder, step)
    path.write_bytes(bytes(path.stat().st_size))


def a_record_is_of_a_later_version(folder, step):
    path = record_of(folder, step)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2', 1))


def a_record_names_a_file_that_cannot_be(folder, step):
    path = record_of(folder, step)
    record = decode_record(path.read_bytes(), path=path)
    files = [msgspec.structs.replace(file, prefix=".holdfast-x") for file in record.files]
    path.write_bytes(encode_record(msgspec.structs.replace(record, files=tuple(files))))


DAMAGE = {
    a_byte_is_flipped: r"tensor 'model\..*' is damaged",
    a_file_is_cut: "bytes",
    a_file_is_empty: "bytes",
    a_file_is_gone: "gone|missing",
    a_record_is_damaged: "damaged|not the bytes|digest",
    a_record_is_empty: "",
    a_record_is_zero: "",
    a_record_is_of_a_later_version: "of format 2",
    a_record_names_a_file_that_cannot_be: "can be no such file|file that cannot be",
}


@pytest.mark.parametrize("skip_validation", [False, True], ids=["validated", "not-validated"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda each: each.__name__)
def test_a_damaged_one_is_passed_over_with_the_reason(folder, damage, skip_validation, caplog):
    save(folder, *STEPS)
    damage(folder, 30)
    caplog.set_level(logging.WARNING, "holdfast")
    result, step = resume(folder, LoadOptions(skip_validation=skip_validation))
    assert (step, result.prefix) == (20, "step_20")
    (passed,) = result.passed_over
    assert passed.prefix == "step_30"
    assert passed.step == (None if "record_is" in damage.__name__ else 30)
    assert re.search(DAMAGE[damage], passed.reason), passed.reason
    assert "step_30" in passed.reason
    (warning,) = caplog.messages
    assert warning == f"resume passes over {passed}"
    assert str(result).splitlines() == [
        "resumed from step_20, step 20, saved by 1 rank and loaded by 1 rank",
        "passed over:",
        *f"  {passed}".splitlines(),
    ]


@pytest.mark.parametrize("in_place", [False, True])
def test_it_goes_back_as_far_as_it_must(folder, in_place):
    save(folder, *STEPS)
    a_byte_is_flipped(folder, 30)
    a_file_is_gone(folder, 20)
    result, step = resume(folder, LoadOptions(in_place=in_place))
    assert step == 10
    assert [(each.prefix, each.step) for each in result.passed_over] == [
        ("step_30", 30),
        ("step_20", 20),
    ]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda each: each.__name__)
def test_if_none_is_whole_it_raises_all_reasons_and_changes_nothing(folder, damage):
    save(folder, *STEPS)
    for step in STEPS:
        damage(folder, step)
    net = net_of(0)
    with (
        opened(folder) as ckpt,
        pytest.raises(LoadError, match="none of them can be loaded") as raised,
    ):
        ckpt.resume(net)
    assert type(raised.value) is LoadError
    assert str(folder) in raised.value.path
    for step in STEPS:
        assert f"step_{step}" in raised.value.message
    assert step_in(net) == 0


def test_a_record_that_is_older_for_sure_is_not_spoken_of(folder):
    save(folder, *STEPS)
    a_record_is_damaged(folder, 10)
    a_record_is_damaged(folder, 20)
    os.utime(record_of(folder, 10), (1, 1))
    assert [each.prefix for each in resume(folder)[0].passed_over] == ["step_20"]


def test_what_a_failed_load_has_read_is_gone_before_the_next(folder):
    save(folder, *STEPS)
    a_byte_is_flipped(folder, 30)
    a_byte_is_flipped(folder, 20)
    alive = []

    def count(progress):
        if progress.phase == "read" and progress.done_bytes == 0:
            alive.append(sum(type(each) is Staging for each in gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        resume(folder, LoadOptions(progress=count))
    finally:
        gc.enable()
    assert alive == [1, 1, 1]


def test_damage_of_a_file_that_another_refers_to_is_damage_of_both(folder):
    frozen = torch.full((3000,), 7.5)
    with opened(folder) as ckpt:
        for step in STEPS:
            options = SaveOptions(checkpoint_prefix=f"step_{step}", incremental=step == 30)
            ckpt.save(net_of(step), None, options, extra={"frozen": frozen})
    at = shard_of(folder, 20).read_bytes().find(frozen[:100].numpy().tobytes())
    assert at > 0
    assert frozen[:100].numpy().tobytes() not in shard_of(folder, 30).read_bytes()
    flip(shard_of(folder, 20), at)

    net, extra = net_of(0), {"frozen": torch.zeros(3000)}
    with opened(folder) as ckpt:
        result = ckpt.resume(net, extra=extra)
    assert [each.prefix for each in result.passed_over] == ["step_30", "step_20"]
    assert all("extra.frozen" in each.reason for each in result.passed_over)
    assert (step_in(net), result.prefix) == (10, "step_10")
    assert torch.equal(extra["frozen"], frozen)


# ------------------------------------------------------------------ not the checkpoint's fault


def test_a_model_that_does_not_fit_is_an_error_though_an_older_one_would(folder):
    with opened(folder) as ckpt:
        ckpt.save(net_of(10), options=SaveOptions(checkpoint_prefix="fits"))
        ckpt.save(nn.Linear(3, 3), options=SaveOptions(checkpoint_prefix="does-not"))
        net = net_of(0)
        with pytest.raises(ValidationError, match="does not fit") as raised:
            ckpt.resume(net)
        assert "does-not" in raised.value.path
        assert step_in(net) == 0


def test_a_state_that_refuses_what_is_loaded_is_an_error(folder):
    class Fussy:
        def state_dict(self):
            return {"width": 16}

        def load_state_dict(self, state):
            raise RuntimeError("not this width")

    with opened(folder) as ckpt:
        for step in STEPS:
            options = SaveOptions(checkpoint_prefix=f"step_{step}")
            ckpt.save(net_of(step), None, options, extra={"fussy": Fussy()})
        net = net_of(0)
        with pytest.raises(LoadError, match="not this width") as raised:
            ckpt.resume(net, extra={"fussy": Fussy()})
        assert "step_30" in raised.value.path
        assert step_in(net) == 0


def test_a_storage_that_does_not_answer_is_an_error(folder):
    save(folder, *STEPS)
    shard = f"step_30/{shard_of(folder, 30).name}"
    for where in ("step_30/metadata.json", shard):

        def meddle(method, key, where=where):
            if key == where and method in {"read", "read_into"}:
                raise TransientStorageError("it is busy", path=key)

        with pytest.raises(TransientStorageError, match="it is busy"):
            resume(Meddled(LocalStorage(folder), meddle))


def test_a_storage_that_cannot_be_listed_is_an_error(folder):
    def meddle(method, key):
        if method == "list":
            raise StorageError("permission denied")

    with pytest.raises(StorageError, match="permission denied"):
        resume(Meddled(LocalStorage(folder), meddle))


@pytest.mark.parametrize("what", ["record", "shard"])
def test_one_object_that_a_storage_never_gives_is_damage(folder, what):
    save(folder, *STEPS)
    path = record_of(folder, 30) if what == "record" else shard_of(folder, 30)

    def meddle(method, key):
        if key == f"step_30/{path.name}" and method in {"read", "read_into"}:
            raise StorageError("Input/output error", path=key)

    result, step = resume(Meddled(LocalStorage(folder), meddle))
    assert step == 20
    assert "Input/output error" in result.passed_over[0].reason


def test_a_storage_that_gives_nothing_at_all_is_an_error(folder):
    """It lists what is there, and lets nobody read it: that is no reason to begin anew."""
    save(folder, *STEPS)

    def meddle(method, key):
        if method in {"read", "read_into"}:
            raise StorageError("permission denied", path=key)

    with pytest.raises(LoadError, match="none of them can be loaded") as raised:
        resume(Meddled(LocalStorage(folder), meddle))
    assert raised.value.message.count("permission denied") == 3


def test_an_interrupt_ends_it_and_nothing_older_is_loaded(folder):
    save(folder, *STEPS)
    net, asked = net_of(0), []

    def interrupt(progress):
        asked.append(progress)
        raise KeyboardInterrupt

    with opened(folder) as ckpt, pytest.raises(KeyboardInterrupt):
        ckpt.resume(net, options=LoadOptions(progress=interrupt))
    assert len(asked) == 1
    assert step_in(net) == 0


# ------------------------------------------------------------------ checks


class Refusing:
    """Refuses checkpoints by their names."""

    name = "refusing"

    def __init__(self, *prefixes):
        self._prefixes = prefixes

    def check(self, checkpoint, world_size=None):
        if checkpoint.info.prefix in self._prefixes:
            yield Finding.error(f"{checkpoint.info.prefix} is not to my liking")


@pytest.mark.parametrize("kind", ["integrity_checkers", "compatibility_checkers"])
def test_what_a_check_refuses_is_passed_over(folder, kind):
    save(folder, *STEPS)
    checkers = {kind: [Refusing("step_30")]}
    result, step = resume(folder, **checkers)
    assert step == 20
    assert "step_30 is not to my liking" in result.passed_over[0].reason
    assert resume(folder, LoadOptions(skip_validation=True), **checkers)[1] == 30


def test_if_a_check_refuses_all_it_raises(folder):
    save(folder, *STEPS)
    checkers = [RequiredMetadata(["git"])]
    with pytest.raises(LoadError, match="lacks 'git'"):
        resume(folder, integrity_checkers=checkers)
    assert resume(folder, compatibility_checkers=[SameWorldSize()])[1] == 30


def test_a_check_that_reads_everything_passes_over_damage(folder):
    save(folder, *STEPS)
    a_byte_is_flipped(folder, 30)
    result, step = resume(folder, integrity_checkers=[FullReadChecker()])
    assert step == 20
    assert "are not what was written" in result.passed_over[0].reason


def test_a_check_that_the_storage_does_not_answer_refuses_nothing(folder):
    class Busy:
        name = "busy"

        def check(self, checkpoint):
            raise TransientStorageError("it is busy", path="somewhere")

    save(folder, *STEPS)
    with pytest.raises(TransientStorageError, match="it is busy"):
        resume(folder, integrity_checkers=[Busy()])


# ------------------------------------------------------------------ others at work meanwhile


def once_at(key_starts, act, *, method=None):
    """Meddles once: before the first call for a key that begins so, after the first listing."""
    listed, acted = [], []

    def meddle(called, key):
        if called == "list":
            listed.append(called)
        elif listed and key.startswith(key_starts) and method in {None, called} and not acted:
            acted.append(key)
            act()

    return meddle, acted


@pytest.mark.parametrize("where", ["metadata.json", "shard-"])
@pytest.mark.parametrize("skip_validation", [False, True], ids=["validated", "not-validated"])
def test_one_that_is_deleted_meanwhile_is_not_damaged(folder, where, skip_validation, caplog):
    save(folder, *STEPS)
    # The listing has read it already, so that the load is the next to ask for anything of it.
    with opened(folder) as ckpt:
        ckpt.catalog.list()

        def prune():
            Catalog(folder).delete("step_30")

        meddle, acted = once_at(f"step_30/{where}", prune)
        with opened(Meddled(LocalStorage(folder), meddle)) as meddled:
            net = net_of(0)
            result = meddled.resume(net, options=LoadOptions(skip_validation=skip_validation))
    assert acted
    assert (result.prefix, step_in(net), result.passed_over) == ("step_20", 20, ())
    assert not [each for each in caplog.messages if "passes over" in each]


def test_one_that_is_replaced_meanwhile_is_loaded_as_it_is_then(folder):
    with opened(folder) as ckpt:
        ckpt.save(net_of(10), options=SaveOptions(checkpoint_prefix="latest"))

        def overwrite():
            ckpt.save(net_of(20), options=SaveOptions(checkpoint_prefix="latest", overwrite=True))

        meddle, acted = once_at("latest/shard-", overwrite)
        net = net_of(0)
        with opened(Meddled(LocalStorage(folder), meddle)) as meddled:
            result = meddled.resume(net)
    assert acted
    assert (step_in(net), result.passed_over) == (20, ())


def test_a_newer_one_that_comes_while_a_damaged_one_is_tried_is_taken(folder):
    save(folder, 10, 20)
    a_byte_is_flipped(folder, 20)
    meddle, acted = once_at("step_20/shard-", lambda: save(folder, 30), method="read_into")
    net = net_of(0)
    with opened(Meddled(LocalStorage(folder), meddle)) as meddled:
        result = meddled.resume(net)
    assert acted
    assert (step_in(net), result.passed_over) == (30, ())


def test_if_all_are_deleted_meanwhile_there_is_nothing_to_resume_from(folder):
    save(folder, *STEPS)

    def clear():
        for step in STEPS:
            Catalog(folder).delete(f"step_{step}")

    meddle, acted = once_at("step_30/shard-", clear)
    assert resume(Meddled(LocalStorage(folder), meddle)) == (None, 0)
    assert acted


# ------------------------------------------------------------------ refused


def test_options_that_make_no_sense_are_refused(folder):
    save(folder, 10)
    with opened(folder) as ckpt:
        with pytest.raises(ValueError, match="use load for checkpoint_prefix 'step_10'"):
            ckpt.resume(net_of(0), options=LoadOptions(checkpoint_prefix="step_10"))
        with pytest.raises(ValueError, match="in_place needs strict=True"):
            ckpt.resume(net_of(0), options=LoadOptions(in_place=True, strict=False))
        with pytest.raises(ValueError, match="options"):
            ckpt.resume(net_of(0), options=SaveOptions())
    with pytest.raises(ClosedError):
        ckpt.resume(net_of(0))


# ------------------------------------------------------------------ the catalog's part


def test_a_scan_has_what_a_list_leaves_out(folder, caplog):
    save(folder, *STEPS)
    a_record_is_damaged(folder, 20)
    catalog = Catalog(folder)
    scan = catalog.scan()
    assert [info.prefix for info in scan.infos] == ["step_30", "step_10"]
    (unreadable,) = scan.unreadable
    assert unreadable.prefix == "step_20"
    assert isinstance(unreadable.error, CorruptedError)
    assert scan.written_s["step_30"] >= scan.written_s["step_10"]
    assert caplog.messages == []
    assert catalog.list() == [*scan.infos]
    assert len(caplog.messages) == 1
