"""Rollback and saving with rollback, on a storage that really fails where told to."""

import asyncio
import concurrent.futures
import io
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.catalog import Attempt, Catalog
from holdfast.errors import (
    CheckpointError,
    NoSpaceError,
    SaveError,
    StorageError,
    TransientStorageError,
)
from holdfast.resilience import CheckpointRollbackManager, FaultToleranceHandler, RetryPolicy
from holdfast.storage import MemoryStorage
from holdfast.testing import FakeClock, Fault, FaultyStorage


class FailingStorage:
    """A MemoryStorage whose calls fail with the errors queued for ``(verb, key)``.

    A queued error stays queued if ``forever``. ``calls`` lists every verb and key.
    """

    def __init__(self):
        self.inner = MemoryStorage()
        self.calls = []
        self.faults = {}

    def fail(self, verb, key, *errors, forever=False):
        self.faults[verb, key] = (list(errors), forever)

    def meet(self, verb, key):
        self.calls.append((verb, key))
        queued, forever = self.faults.get((verb, key), ([], False))
        if queued:
            raise queued[0] if forever else queued.pop(0)

    def put(self, *keys):
        for key in keys:
            self.inner.create(key, b"old")

    def keys(self):
        return [info.key for info in self.inner.list()]

    @property
    def url(self):
        return self.inner.url

    def delete(self, key, *, expected=None):
        self.meet("delete", key)
        self.inner.delete(key, expected=expected)

    def list(self, prefix=""):
        for info in self.inner.list(prefix):
            yield info
            self.meet("list", info.key)

    def open_writer(self, key):
        self.meet("open", key)
        return FailingWriter(self, key)


class FailingWriter:
    def __init__(self, storage, key):
        self.storage = storage
        self.key = key
        self.inner = storage.inner.open_writer(key)

    def write_at(self, offset, data):
        self.inner.write_at(offset, data[: len(data) // 2])
        self.storage.meet("write", self.key)
        self.inner.write_at(offset + len(data) // 2, data[len(data) // 2 :])

    def finish(self):
        self.storage.meet("finish", self.key)
        return self.inner.finish()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.storage.calls.append(("leave", self.key))
        self.inner.abort()


@pytest.fixture
def storage():
    return FailingStorage()


@pytest.fixture
def handler(storage):
    return FaultToleranceHandler(storage, clock=FakeClock())


def roll_back_plain(handler, name):
    handler.rollback(name)


def roll_back_async(handler, name):
    asyncio.run(handler.rollback_async(name))


both = pytest.mark.parametrize("roll_back", [roll_back_plain, roll_back_async])

SHARDS = [f"step_100/shard-{n}.safetensors" for n in range(150)]
RECORD = "step_100/metadata.json"
OTHERS = ["step_10/metadata.json", "step_1000/metadata.json", "step_1000/shard-0.safetensors"]


@both
@pytest.mark.parametrize("name", ["step_100", RECORD])
def test_all_of_a_checkpoint_goes_and_nothing_of_its_neighbours(roll_back, handler, storage, name):
    storage.put(*SHARDS, RECORD, "step_100/deep/extra.bin", *OTHERS)
    roll_back(handler, name)
    assert storage.keys() == sorted(OTHERS)
    deleted = [key for verb, key in storage.calls if verb == "delete"]
    assert deleted[0] == RECORD


def test_checkpoints_inside_a_checkpoint_are_not_taken_along(handler, storage):
    keys = ["run/metadata.json", "run/shard-0", "run/best/metadata.json", "run/best/shard-0"]
    storage.put(*keys)
    with pytest.raises(StorageError, match=r"has other checkpoints in it, run/best for one"):
        handler.rollback("run")
    assert storage.keys() == sorted(keys)
    handler.rollback("run/best")
    handler.rollback("run")
    assert storage.keys() == []


@both
def test_a_single_object_goes_alone(roll_back, handler, storage):
    storage.put("best.ckpt", "best.ckpt.old", "best.ckp")
    roll_back(handler, "best.ckpt")
    assert storage.keys() == ["best.ckp", "best.ckpt.old"]


def test_a_checkpoint_never_committed_goes_too(handler, storage):
    storage.put(*SHARDS[:3])
    handler.rollback("step_100")
    assert storage.keys() == []


def test_a_checkpoint_in_a_folder_goes(handler, storage):
    storage.put("runs/a/step_1/metadata.json", "runs/a/step_1/s", "runs/a/step_2/s")
    handler.rollback("runs/a/step_1/metadata.json")
    assert storage.keys() == ["runs/a/step_2/s"]


def test_nothing_to_delete_is_fine_and_twice_is_once(handler, storage):
    handler.rollback("step_100")
    storage.put(RECORD, *SHARDS[:2])
    handler.rollback("step_100")
    handler.rollback("step_100")
    assert storage.keys() == []


def test_failures_that_pass_are_retried(handler, storage):
    storage.put(RECORD, *SHARDS[:2])
    storage.fail("delete", RECORD, TransientStorageError("a"), TransientStorageError("b"))
    storage.fail("list", SHARDS[0], ConnectionError())
    storage.fail("delete", SHARDS[1], ConnectionError())
    handler.rollback("step_100")
    assert storage.keys() == []


@both
def test_if_the_commit_record_stays_nothing_else_is_touched(roll_back, handler, storage):
    storage.put(RECORD, *SHARDS[:3])
    refused = PermissionError("read-only")
    storage.fail("delete", RECORD, refused, forever=True)
    with pytest.raises(StorageError, match="nothing else was touched") as caught:
        roll_back(handler, "step_100")
    assert caught.value.__cause__ is refused
    assert caught.value.path == RECORD
    assert storage.keys() == sorted([RECORD, *SHARDS[:3]])
    assert [key for verb, key in storage.calls if verb == "delete"] == [RECORD]


def test_if_it_cannot_be_listed_nothing_is_touched(handler, storage):
    storage.put(RECORD, *SHARDS[:3])
    storage.fail("list", SHARDS[1], PermissionError(), forever=True)
    with pytest.raises(StorageError, match="could not be listed; nothing was touched"):
        handler.rollback("step_100")
    assert storage.keys() == sorted([RECORD, *SHARDS[:3]])


@both
def test_all_deletes_are_tried_then_one_error_names_what_is_left(roll_back, handler, storage):
    storage.put(RECORD, *SHARDS[:4])
    refused = [PermissionError("one"), NoSpaceError("two")]
    storage.fail("delete", SHARDS[0], refused[0], forever=True)
    storage.fail("delete", SHARDS[2], refused[1], forever=True)
    with pytest.raises(StorageError) as caught:
        roll_back(handler, "step_100")
    assert f"{SHARDS[0]}, {SHARDS[2]};" in str(caught.value)
    assert SHARDS[1] not in str(caught.value)
    assert caught.value.path == "step_100"
    assert caught.value.__cause__.exceptions == tuple(refused)
    assert storage.keys() == [SHARDS[0], SHARDS[2]]
    storage.faults.clear()
    roll_back(handler, "step_100")
    assert storage.keys() == []


def test_the_error_stays_readable_when_much_is_left(handler, storage):
    storage.put(*SHARDS)
    for shard in SHARDS:
        storage.fail("delete", shard, PermissionError(), forever=True)
    with pytest.raises(StorageError, match=r"and 130 more") as caught:
        handler.rollback("step_100")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("stop", [KeyboardInterrupt, concurrent.futures.CancelledError])
def test_cancellation_stops_the_deleting_at_once(handler, storage, stop):
    storage.put(RECORD, *SHARDS[:3])
    storage.fail("delete", RECORD, stop())
    storage.fail("list", SHARDS[0], stop())
    storage.fail("delete", SHARDS[1], stop())
    for left in ([RECORD, *SHARDS[:3]], [RECORD, *SHARDS[:3]], SHARDS[1:3]):
        with pytest.raises(stop):
            handler.rollback("step_100")
        assert storage.keys() == left
    handler.rollback("step_100")
    assert storage.keys() == []


BAD_NAMES = ["", "/", "/step_1", "step_1/", "a//b", ".", "..", "../x", "a/../b", None, 5, b"x"]


@both
@pytest.mark.parametrize("name", [*BAD_NAMES, "metadata.json"])
def test_names_that_are_not_inside_the_storage_are_refused(roll_back, handler, storage, name):
    storage.put("a", "b/metadata.json", "metadata.json")
    with pytest.raises(ValueError, match="checkpoint must") as caught:
        roll_back(handler, name)
    assert repr(name) in str(caught.value)
    assert storage.calls == []


@both
def test_without_a_storage_it_says_to_pass_one(roll_back):
    with pytest.raises(ValueError, match=r"storage=\.\.\."):
        roll_back(FaultToleranceHandler(), "step_100")


@given(
    keys=st.sets(
        st.lists(st.sampled_from(["a", "ab", "b", "metadata.json"]), min_size=1, max_size=3).map(
            "/".join
        )
    ),
    prefix=st.sampled_from(["a", "ab", "a/b", "b"]),
)
def test_exactly_the_keys_below_the_prefix_go(keys, prefix):
    storage = MemoryStorage()
    for key in keys:
        storage.create(key, b"")
    below = {key for key in keys if key.startswith(f"{prefix}/")}
    inner = {key for key in below if key.endswith("/metadata.json")} - {f"{prefix}/metadata.json"}
    handler = FaultToleranceHandler(storage)
    if inner:
        with pytest.raises(StorageError, match="other checkpoints"):
            handler.rollback(prefix)
        below = set()
    else:
        handler.rollback(prefix)
        below |= {prefix}
    assert {info.key for info in storage.list()} == keys - below


# --- save with rollback --------------------------------------------------------------------


@pytest.fixture
def manager(handler, storage):
    return CheckpointRollbackManager(handler, storage)


def save_plain(manager, path, operation):
    return manager.save_with_rollback(path, operation)


def save_async(manager, path, operation):
    async def as_coroutine():
        return operation()

    return asyncio.run(manager.save_with_rollback_async(path, as_coroutine))


both_saves = pytest.mark.parametrize("save", [save_plain, save_async])


def new():
    return b"new bytes"


@both_saves
@pytest.mark.parametrize("data", [b"new bytes", b""])
def test_the_bytes_are_stored_and_the_path_returned(save, manager, storage, data):
    assert save(manager, "run/best.ckpt", lambda: data) == "run/best.ckpt"
    assert storage.inner.read("run/best.ckpt") == data
    assert storage.keys() == ["run/best.ckpt"]


@both_saves
def test_an_existing_checkpoint_is_replaced(save, manager, storage):
    storage.put("best.ckpt")
    save(manager, "best.ckpt", new)
    assert storage.inner.read("best.ckpt") == b"new bytes"


@both_saves
@pytest.mark.parametrize("verb", ["open", "write", "finish"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_leaves_no_trace_and_the_old_checkpoint(save, manager, storage, verb, existing):
    if existing:
        storage.put("best.ckpt")
    before = list(storage.inner.list())
    original = PermissionError("read-only")
    storage.fail(verb, "best.ckpt", original, forever=True)
    with pytest.raises(SaveError, match=r"PermissionError: read-only.*untouched") as caught:
        save(manager, "best.ckpt", new)
    assert caught.value.__cause__ is original
    assert caught.value.path == "best.ckpt"
    assert list(storage.inner.list()) == before
    if verb != "open":
        assert storage.calls[-1] == ("leave", "best.ckpt")


@both_saves
@pytest.mark.parametrize("verb", ["open", "write", "finish"])
def test_storage_failures_that_pass_are_retried(save, manager, storage, verb):
    storage.fail(verb, "best.ckpt", TransientStorageError("a"), ConnectionError())
    save(manager, "best.ckpt", new)
    assert storage.inner.read("best.ckpt") == b"new bytes"


@both_saves
def test_making_the_bytes_is_retried_too(save, manager, storage):
    failures = [ConnectionError(), ConnectionError()]

    def operation():
        if failures:
            raise failures.pop()
        return b"third time"

    save(manager, "best.ckpt", operation)
    assert storage.inner.read("best.ckpt") == b"third time"


@both_saves
def test_when_making_the_bytes_fails_the_storage_is_not_even_opened(save, manager, storage):
    def operation():
        raise ZeroDivisionError("nan loss")

    with pytest.raises(SaveError, match="ZeroDivisionError: nan loss"):
        save(manager, "best.ckpt", operation)
    assert storage.calls == []


@both_saves
def test_errors_of_ours_pass_as_themselves(save, manager, storage):
    full = NoSpaceError("full", path="best.ckpt")
    storage.fail("finish", "best.ckpt", full, forever=True)
    with pytest.raises(NoSpaceError) as caught:
        save(manager, "best.ckpt", new)
    assert caught.value is full


@both_saves
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), concurrent.futures.CancelledError()])
def test_cancellation_passes_as_itself_and_leaves_no_trace(save, manager, storage, stop):
    storage.put("best.ckpt")

    def stopped():
        raise stop

    with pytest.raises(type(stop)):
        save(manager, "best.ckpt", stopped)
    assert storage.inner.read("best.ckpt") == b"old"


def test_ctrl_c_while_writing_leaves_no_trace(manager, storage):
    storage.put("best.ckpt")
    storage.fail("write", "best.ckpt", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        manager.save_with_rollback("best.ckpt", new)
    assert storage.inner.read("best.ckpt") == b"old"
    assert storage.calls[-1] == ("leave", "best.ckpt")


def test_a_cancelled_task_publishes_nothing_later(handler):
    writing, go_on, left = threading.Event(), threading.Event(), threading.Event()

    class SlowStorage(FailingStorage):
        def meet(self, verb, key):
            if verb == "write":
                writing.set()
                go_on.wait(20)
            super().meet(verb, key)

        def open_writer(self, key):
            writer = super().open_writer(key)
            leave = writer.inner.abort

            def abort():
                leave()
                left.set()

            writer.inner.abort = abort
            return writer

    storage = SlowStorage()
    storage.put("best.ckpt")

    async def data():
        return b"new bytes"

    async def main():
        manager = CheckpointRollbackManager(handler, storage)
        task = asyncio.create_task(manager.save_with_rollback_async("best.ckpt", data))
        await asyncio.to_thread(writing.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(main())
    assert left.wait(20)
    assert storage.inner.read("best.ckpt") == b"old"
    assert ("finish", "best.ckpt") not in storage.calls


@both_saves
@pytest.mark.parametrize("wrong", [None, "text", 5, io.BytesIO(b"x"), [b"x"]])
def test_anything_but_bytes_is_refused(save, manager, storage, wrong):
    with pytest.raises(TypeError, match=f"must return bytes, not {type(wrong).__name__}"):
        save(manager, "best.ckpt", lambda: wrong)
    assert storage.calls == []


@both_saves
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_every_kind_are_saved(save, manager, storage, kind):
    save(manager, "best.ckpt", lambda: kind(b"weights"))
    assert storage.inner.read("best.ckpt") == b"weights"


@both_saves
@pytest.mark.parametrize("path", BAD_NAMES)
def test_paths_that_are_not_inside_the_storage_are_refused(save, manager, storage, path):
    ran = []
    with pytest.raises(ValueError, match="checkpoint_path must"):
        save(manager, path, lambda: ran.append(1))
    assert ran == []
    assert storage.calls == []


def test_the_wrong_kind_of_operation_is_refused(manager, storage):
    async def data():
        return b"x"

    with pytest.raises(TypeError, match="is async"):
        manager.save_with_rollback("best.ckpt", data)
    with pytest.raises(TypeError, match="nothing to await"):
        asyncio.run(manager.save_with_rollback_async("best.ckpt", new))
    with pytest.raises(TypeError, match="save_operation must be a callable"):
        manager.save_with_rollback("best.ckpt", b"bytes already")
    assert storage.calls == []


def test_the_policy_of_the_handler_rules(storage):
    never = FaultToleranceHandler(retry_policy=RetryPolicy(max_retries=0), clock=FakeClock())
    storage.fail("finish", "best.ckpt", TransientStorageError("once"))
    with pytest.raises(CheckpointError, match="once"):
        CheckpointRollbackManager(never, storage).save_with_rollback("best.ckpt", new)
    assert storage.keys() == []


def test_a_catalog_decides_itself_what_a_rollback_removes():
    storage = MemoryStorage()
    catalog = Catalog(storage)
    catalog.write("step_1", {"w": np.ones(3)})
    handler = FaultToleranceHandler(catalog)
    handler.rollback("step_1/metadata.json")
    assert catalog.list() == []
    assert [*storage.list()] == []
    handler.rollback("step_1")

    with Attempt.begin(storage, "step_2"), pytest.raises(StorageError, match="under way"):
        handler.rollback("step_2")


def test_a_rollback_by_a_catalog_is_retried():
    storage = FaultyStorage(MemoryStorage())
    Catalog(storage).write("step_1", {"w": np.ones(3)})
    faults = [Fault("list", 1, TransientStorageError("slow down"))]
    faulty = FaultyStorage(storage, faults)
    FaultToleranceHandler(Catalog(faulty), clock=FakeClock()).rollback("step_1")
    assert faulty.unfired == ()
    assert [*storage.list()] == []
