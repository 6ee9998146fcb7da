"""Checks before a load: those that every checkpoint must pass, and those that users add."""

import logging
import threading

import msgspec
import numpy as np
import pytest
from catalog_tools import Observed, files_of, grid_parts, memory_of, put, reread, write_parts

from holdfast.catalog import Catalog
from holdfast.distributed._validation import (
    CheckpointValidator,
    Finding,
    FullReadChecker,
    RequiredMetadata,
    SameWorldSize,
    ValidationResult,
)
from holdfast.errors import CheckpointNotFoundError, StorageError, TransientStorageError
from holdfast.format import encode_value
from holdfast.reshard import Grid
from holdfast.storage import LocalStorage, MemoryStorage

FILES = [f"a/shard-{rank}-00000000000000aa.safetensors" for rank in range(3)]


def made(storage=None):
    """A checkpoint that three ranks wrote, in a storage."""
    storage = storage or MemoryStorage()
    rows = Grid.of_cuts((30, 8), [[10, 20], []])
    array = np.arange(240, dtype=np.float32).reshape(30, 8)
    write_parts(storage, "a", {"w": (array, rows, grid_parts(rows, [0, 1, 2]))})
    return storage


def rerecord(storage, **changes):
    """Give the checkpoint another record."""
    put(storage, "a/metadata.json", reread(Catalog(storage).open("a")._found.record, **changes))


class Says:
    """A checker that finds what it was told to."""

    def __init__(self, name, *findings):
        self.name = name
        self.findings = findings

    def check(self, checkpoint, *_):
        yield from self.findings


def test_an_intact_checkpoint_is_valid():
    result = CheckpointValidator(made()).validate_checkpoint("a")
    assert result == ValidationResult()
    assert result.is_valid
    assert not result.has_warnings
    assert result.summary() == "valid"


def test_one_that_is_open_needs_no_storage():
    opened = Catalog(made()).open("a")
    assert CheckpointValidator().validate(opened, world_size=3).is_valid
    with pytest.raises(ValueError, match=r"without a storage to find 'a' in"):
        CheckpointValidator().validate_checkpoint("a")


def test_the_storage_may_be_a_path_or_a_catalog(tmp_path):
    made(LocalStorage(tmp_path))
    assert CheckpointValidator(tmp_path).validate_checkpoint("a").is_valid
    assert CheckpointValidator(str(tmp_path)).validate_checkpoint("a").is_valid
    assert CheckpointValidator(Catalog(tmp_path)).validate_checkpoint("a").is_valid
    with pytest.raises(ValueError, match="storage"):
        CheckpointValidator(5)


def test_every_file_that_is_gone_or_of_another_size_is_named(tmp_path):
    storage = made(LocalStorage(tmp_path))
    (tmp_path / FILES[0]).unlink()
    longer = tmp_path / FILES[2]
    longer.write_bytes(longer.read_bytes() + b"more")
    result = CheckpointValidator(storage).validate_checkpoint("a")
    assert not result.is_valid
    size = longer.stat().st_size
    assert result.errors == (
        f"{FILES[0]}: this file of the checkpoint is gone",
        f"{FILES[2]}: this file was written with {size - 4} bytes and now has {size}",
    )


def test_files_are_looked_at_side_by_side_and_not_read():
    meeting = threading.Barrier(3, timeout=30)
    opened = Catalog(observed := Observed(made())).open("a")
    observed.before = lambda method, key: meeting.wait() if method == "stat" else None
    observed.read_bytes.clear()
    assert CheckpointValidator().validate(opened, world_size=1).is_valid
    assert observed.read_bytes == {}


def test_a_file_of_another_checkpoint_is_looked_for_there():
    storage = made()
    record = Catalog(storage).open("a")._found.record
    borrowed = [msgspec.structs.replace(file, prefix="a") for file in record.files]
    write_parts(storage, "b", {}, borrowed=borrowed, more=record.tensors)
    validator = CheckpointValidator(storage)
    assert validator.validate_checkpoint("b").is_valid
    storage.delete(FILES[1])
    assert validator.validate_checkpoint("b").errors == (
        f"{FILES[1]}: this file of the checkpoint is gone",
    )


def test_a_table_beside_its_file_must_be_there_too():
    storage = made()
    files = Catalog(storage).open("a")._found.record.files
    table = files[1].name.replace(".safetensors", ".chunks")
    beside = msgspec.structs.replace(files[1], table=table)
    rerecord(storage, files=(files[0], beside, files[2]))
    validator = CheckpointValidator(storage)
    assert validator.validate_checkpoint("a").errors == (
        f"a/{table}: this file of the checkpoint is gone",
    )
    put(storage, f"a/{table}", b"of some size")
    assert validator.validate_checkpoint("a").is_valid


def failing_at(key, error):
    """The checkpoint, open; its storage fails to tell of that file."""
    opened = Catalog(observed := Observed(made())).open("a")

    def before(method, at):
        if (method, at) == ("stat", key):
            raise error

    observed.before = before
    return opened


def test_a_storage_that_does_not_answer_says_nothing_of_the_checkpoint():
    opened = failing_at(FILES[1], TransientStorageError("the network is down"))
    with pytest.raises(TransientStorageError, match="the network is down"):
        CheckpointValidator().validate(opened, world_size=1)


def test_a_file_that_must_not_be_looked_at_is_an_error():
    opened = failing_at(FILES[1], StorageError("no permission", path=FILES[1]))
    result = CheckpointValidator().validate(opened, world_size=1)
    assert result.errors == (f"{FILES[1]}: this file cannot be looked at: no permission",)


def test_a_record_that_cannot_be_read_is_an_error_that_names_it():
    files = files_of(made())
    files["a/metadata.json"] = files["a/metadata.json"].replace(b"holdfast test", b"holdfast tost")
    result = CheckpointValidator(memory_of(files)).validate_checkpoint("a")
    assert not result.is_valid
    assert "a/metadata.json" in result.errors[0]
    assert "damaged" in result.errors[0]


@pytest.mark.parametrize("field", ["tree", "custom"])
def test_a_value_that_cannot_be_read_is_an_error(field):
    storage = made()
    rerecord(storage, **{field: {"$": ["from the future", 1]}})
    result = CheckpointValidator(storage).validate_checkpoint("a")
    assert len(result.errors) == 1
    assert "a/metadata.json" in result.errors[0]


def test_there_must_be_a_checkpoint():
    with pytest.raises(CheckpointNotFoundError):
        CheckpointValidator(made()).validate_checkpoint("b")
    with pytest.raises(ValueError, match="world_size"):
        CheckpointValidator(made()).validate_checkpoint("a", world_size=0)


def test_findings_come_in_the_order_of_the_checkers():
    validator = CheckpointValidator(
        made(),
        [Says("one", Finding.warning("w1"), Finding.error("e1")), Says("quiet")],
        [Says("two", Finding.error("e2"), Finding.warning("w2"))],
    )
    result = validator.validate_checkpoint("a")
    assert (result.errors, result.warnings) == (("e1", "e2"), ("w1", "w2"))
    assert not result.is_valid
    assert result.has_warnings
    assert result.summary().splitlines() == [
        "not valid",
        "  error: e1",
        "  error: e2",
        "  warning: w1",
        "  warning: w2",
    ]


def test_warnings_do_not_make_a_checkpoint_invalid():
    validator = CheckpointValidator(made(), [Says("one", Finding.warning("old"))])
    result = validator.validate_checkpoint("a")
    assert result.is_valid
    assert result.summary() == "valid\n  warning: old"


def test_a_long_summary_is_cut():
    result = ValidationResult(errors=tuple(f"e{index}" for index in range(500)), warnings=("w",))
    lines = result.summary().splitlines()
    assert lines[20:] == ["  error: e19", "  ... and 480 more", "  warning: w"]


def test_a_checker_that_fails_is_an_error_and_the_others_still_run(caplog):
    class Fails:
        name = "my check"

        def check(self, checkpoint):
            yield Finding.warning("seen before")
            raise ZeroDivisionError("by zero")

    with caplog.at_level(logging.WARNING, "holdfast.distributed"):
        validator = CheckpointValidator(made(), [Fails(), Says("other", Finding.warning("after"))])
        result = validator.validate_checkpoint("a")
    assert result.errors == ("the check 'my check' failed: ZeroDivisionError: by zero",)
    assert result.warnings == ("seen before", "after")
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("answer", [None, ["a text"], [("message", True)]])
def test_a_checker_that_gives_something_else_is_an_error(answer):
    class Odd:
        name = "odd"

        def check(self, checkpoint):
            return answer

    result = CheckpointValidator(made(), [Odd()]).validate_checkpoint("a")
    assert len(result.errors) == 1
    assert result.errors[0].startswith("the check 'odd' failed: ")


def test_an_interrupt_is_not_a_finding():
    class Interrupted:
        name = "slow"

        def check(self, checkpoint):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CheckpointValidator(made(), [Interrupted()]).validate_checkpoint("a")


def test_a_compatibility_checker_is_told_the_size_of_the_job():
    class Even:
        name = "even"

        def check(self, checkpoint, world_size):
            if world_size % 2:
                yield Finding.error(f"{checkpoint.info.prefix}: {world_size} is odd")

    validator = CheckpointValidator(made(), (), [Even()])
    assert validator.validate_checkpoint("a", world_size=4).is_valid
    assert validator.validate_checkpoint("a", world_size=3).errors == ("a: 3 is odd",)
    assert validator.validate_checkpoint("a").errors == ("a: 1 is odd",)


def test_a_full_read_finds_the_bit_that_the_built_in_checks_cannot_see():
    storage = made()
    data = bytearray(storage.read(FILES[1]))
    data[4096 + 17] ^= 1
    put(storage, FILES[1], bytes(data))
    assert CheckpointValidator(storage).validate_checkpoint("a").is_valid
    result = CheckpointValidator(storage, [FullReadChecker()]).validate_checkpoint("a")
    assert len(result.errors) == 1
    assert FILES[1] in result.errors[0]
    assert "tensor 'w'" in result.errors[0]
    assert CheckpointValidator(made(), [FullReadChecker()]).validate_checkpoint("a").is_valid


@pytest.mark.parametrize(
    ("custom", "lacking"),
    [({"git": "abc", "data": 5}, []), ({"git": None}, ["data"]), (None, ["git", "data"])],
)
def test_required_metadata(custom, lacking):
    storage = made()
    rerecord(storage, custom=encode_value(custom))
    validator = CheckpointValidator(storage, [RequiredMetadata(["git", "data"])])
    assert validator.validate_checkpoint("a").errors == tuple(
        f"the custom metadata of a lacks {key!r}" for key in lacking
    )


@pytest.mark.parametrize("keys", ["git", [1]])
def test_required_metadata_is_named_by_texts(keys):
    with pytest.raises(ValueError, match="keys"):
        RequiredMetadata(keys)


def test_same_world_size():
    validator = CheckpointValidator(made(), (), [SameWorldSize()])
    assert validator.validate_checkpoint("a", world_size=3).is_valid
    assert validator.validate_checkpoint("a", world_size=2).errors == (
        "a was saved by 3 ranks, and this job has 2",
    )
