"""What goes wrong while a save is under way in the background: it is told, nothing torn is ever
committed, the training goes on, and what was saved before is intact."""

import asyncio
import concurrent.futures
import contextlib
import copy
import logging
import signal
import threading
import time

import numpy as np
import pytest
import torch
from async_tools import SOON_S, Training, adamw, held, net, require_same
from torch import nn

import holdfast
from holdfast.distributed import DistributedCheckpoint, SaveOptions, _aftermath
from holdfast.distributed._pool import LEAST_BYTES
from holdfast.errors import (
    CheckpointExistsError,
    ClosedError,
    NoSpaceError,
    OperationTimeoutError,
    SaveError,
    SaveInProgressError,
    StorageError,
    TornSnapshotError,
)
from holdfast.testing import Fault, FaultyStorage


@pytest.fixture(autouse=True)
def _what_failed_is_removed_however_long_it_takes(monkeypatch):
    monkeypatch.setattr(_aftermath, "_CLEAN_S", SOON_S)


class Odd(nn.Module):
    """One weight that lies in the order in which it is stored, and one that does not."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.plain = nn.Parameter(torch.rand(300, 200))
        self.turned = nn.Parameter(torch.rand(300, 200).t())


def odd(seed=1):
    model = Odd(seed)
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters()))


def in_place(tensor):
    with torch.no_grad():
        tensor.add_(1)


def by_data(tensor):
    tensor.data.mul_(2)


def through_numpy(tensor):
    tensor.detach().numpy()[:] += 1


def by_init(tensor):
    nn.init.zeros_(tensor)


def under_inference(tensor):
    with torch.inference_mode():
        tensor.add_(1)


def replaced(tensor):
    tensor.data = torch.rand_like(tensor)


def turned(tensor):
    tensor.data = tensor.data.t().contiguous()


def halved(tensor):
    tensor.data = tensor.data.half()


def given_back(tensor):
    tensor.untyped_storage().resize_(0)


def grown(tensor):
    tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes())


def by_another_optimizer(tensor):
    _stepped(torch.optim.SGD([tensor], lr=0.1), tensor)


def by_another_fused_optimizer(tensor):
    _stepped(torch.optim.AdamW([tensor], fused=True), tensor)


def _stepped(optimizer, tensor):
    tensor.grad = torch.ones_like(tensor)
    optimizer.step()


SEEN = [in_place, by_data, through_numpy, by_init, under_inference, given_back]
HARMLESS = [replaced, turned, halved, grown, by_another_optimizer, by_another_fused_optimizer]


def content_of(folder, name):
    return holdfast.load(folder / name)["model"]


@pytest.mark.parametrize("which", ["plain", "turned"])
@pytest.mark.parametrize("change", SEEN + HARMLESS)
def test_a_parameter_is_changed_before_it_is_copied(change, which, tmp_path):
    """The save fails or is right, and never anything else."""
    training = odd()
    training.step()
    with held(tmp_path) as (ckpt, gates):
        expected = copy.deepcopy(training.model.state_dict())
        with gates.at("save"):
            options = SaveOptions(checkpoint_prefix="a")
            handle = ckpt.save_async(training.model, training.optimizer, options)
            change(getattr(training.model, which))
        error = handle.exception(SOON_S)
        if change in HARMLESS:
            assert error is None
            require_same(content_of(tmp_path, "a"), expected)
        else:
            assert isinstance(error, TornSnapshotError)
            assert f"model.{which} changed while being saved" in error.message
            assert 'snapshot="copy"' in error.message
            assert ckpt.list_checkpoints() == []
            assert [*ckpt.catalog.storage.list()] == []


@pytest.mark.parametrize("change", [in_place, by_data, through_numpy, given_back])
@pytest.mark.parametrize("form", ["multi_shard", "single_file"])
def test_state_of_an_optimizer_is_changed_before_it_is_copied(change, form, tmp_path):
    training = odd()
    training.step()
    with held(tmp_path) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, training.optimizer, SaveOptions(format=form))
            change(training.optimizer.state[training.model.turned]["exp_avg"])
        with pytest.raises(TornSnapshotError, match=r"optimizer\.state\.turned\.exp_avg changed"):
            handle.result(SOON_S)
        assert ckpt.list_checkpoints() == []


@pytest.mark.parametrize("change", [replaced, turned, halved, grown])
def test_state_of_an_optimizer_gets_other_memory(change, tmp_path):
    """The tensor itself is another then; what was in it is what is saved."""
    training = odd()
    training.step()
    expected = training.content()
    with held(tmp_path) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, training.optimizer)
            change(training.optimizer.state[training.model.turned]["exp_avg"])
        require_same(odd(50).load(ckpt, handle.result(SOON_S)), expected)


@pytest.mark.parametrize("which", ["plain", "turned"])
@pytest.mark.parametrize("change", [in_place, by_data, through_numpy, given_back])
def test_a_tensor_is_changed_while_it_is_read_where_it_lives(change, which, tmp_path):
    """Something else has taken all room, so the writer reads it a little at a time."""
    training = odd()
    training.step()
    noise = torch.rand(LEAST_BYTES // 4)
    with held(tmp_path, staging_bytes=LEAST_BYTES) as (ckpt, gates):
        with gates.at("write_at shard") as gate:
            options = SaveOptions(format="single_file")
            handle = ckpt.save_async(
                training.model, training.optimizer, options, extra={"noise": noise}
            )
            gate.wait()
            change(getattr(training.model, which))
        with pytest.raises(TornSnapshotError, match=f"model.{which} changed"):
            handle.result(SOON_S)


@pytest.mark.parametrize("change", [in_place, by_data, through_numpy, given_back])
def test_a_frozen_weight_is_changed_while_it_is_written(change, tmp_path):
    """It is written from where it lives once it was seen not to change."""
    training = adamw()
    model = nn.ModuleDict({"trained": training.model, "frozen": net(2).requires_grad_(False)})
    frozen = model["frozen"][0].weight
    with held(tmp_path) as (ckpt, gates):
        ckpt.save_async(model, training.optimizer).result(SOON_S)
        training.step()
        with gates.at("save"):
            handle = ckpt.save_async(model, training.optimizer)
            change(frozen)
        with pytest.raises(TornSnapshotError, match=r"model\.frozen\.0\.weight changed"):
            handle.result(SOON_S)
        if change is given_back:
            return
        # From now on it is known to move, and is copied at once.
        for moves in (False, True):
            training.step()
            expected = copy.deepcopy(model.state_dict())
            with gates.at("save"):
                handle = ckpt.save_async(model, training.optimizer)
                if moves:
                    change(frozen)
            require_same(content_of(tmp_path, handle.result(SOON_S)), expected)


def test_an_embedding_that_changes_itself_when_it_is_used(tmp_path):
    """``max_norm`` does so in the forward pass, which nothing announces."""
    embedding = nn.Embedding(1000, 100, max_norm=1.0)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    words = torch.tensor([3, 4])
    with held(tmp_path) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(embedding, optimizer)
            embedding(words)
        assert isinstance(handle.exception(SOON_S), TornSnapshotError)
        embedding.weight.data.mul_(10)
        expected = copy.deepcopy(embedding.state_dict())
        with gates.at("save"):
            handle = ckpt.save_async(embedding, optimizer, SaveOptions(snapshot="copy"))
            embedding(words)
        require_same(content_of(tmp_path, handle.result(SOON_S)), expected)


def test_a_tensor_without_memory_is_refused(tmp_path):
    tensor = torch.rand(300, 300)
    tensor.untyped_storage().resize_(0)
    with DistributedCheckpoint(storage=tmp_path) as ckpt:
        for save in (ckpt.save, lambda tree: ckpt.save_async(tree).result(SOON_S)):
            with pytest.raises(SaveError, match=r"model\.x has no values: its memory was given"):
                save({"x": tensor})


def test_a_save_leaves_tensors_as_they_were(tmp_path):
    """Whoever resizes the memory of a tensor may do so afterwards."""
    training = odd()
    training.step()
    tensors = [
        *training.model.parameters(),
        training.optimizer.state[training.model.plain]["exp_avg"],
    ]
    with DistributedCheckpoint(storage=tmp_path) as ckpt:
        ckpt.save_async(training.model, training.optimizer).result(SOON_S)
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)


# What a state cannot be made of.


class Failing:
    def state_dict(self):
        raise ZeroDivisionError("on purpose")

    def load_state_dict(self, state):
        raise NotImplementedError


def test_what_fails_while_it_is_looked_at_is_raised_by_the_call(tmp_path, caplog):
    training = adamw()
    with held(tmp_path) as (ckpt, _):
        with pytest.raises(SaveError, match=r"state_dict\(\) of extra\.x, a Failing") as caught:
            ckpt.save_async(training.model, training.optimizer, extra={"x": Failing()})
        assert (caught.value.rank, caught.value.phase) == (0, "capture")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        ckpt.wait(SOON_S)  # it was raised, and is not raised again
        assert not hasattr(caught.value, "__notes__")
        assert ckpt.save_async(training.model).result(SOON_S)
    assert [each.levelname for each in caplog.records if each.name.startswith("holdfast")] == [
        "ERROR"
    ]


@pytest.mark.parametrize("value", [object(), torch.eye(3).to_sparse(), np.array([object()])])
def test_what_cannot_be_stored_is_told_by_the_handle(value, tmp_path):
    training = adamw()
    with held(tmp_path) as (ckpt, _):
        handle = ckpt.save_async(training.model, training.optimizer, extra={"deep": {"x": value}})
        with pytest.raises(SaveError, match=r"extra\.deep.*x"):
            handle.result(SOON_S)
        assert ckpt.save_async(training.model).result(SOON_S)


def test_what_cannot_be_meant_is_refused_at_once(tmp_path):
    training = adamw()
    with held(tmp_path) as (ckpt, _):
        with pytest.raises(ValueError, match="the model first"):
            ckpt.save_async(training.optimizer, training.model)
        with pytest.raises(ValueError, match="extra must be a dict"):
            ckpt.save_async(training.model, extra=[1])
        with pytest.raises(ValueError, match="options"):
            ckpt.save_async(training.model, None, {"step": 1})
        with pytest.raises(ValueError, match="timeout_s"):
            ckpt.wait(-1)
        ckpt.wait(0)
    for call in (ckpt.wait, lambda: ckpt.save_async(training.model)):
        with pytest.raises(ClosedError):
            call()


# A storage that fails.


def failing(error, method="write_at", nth=1):
    return lambda storage: FaultyStorage(storage, [Fault(method, nth, error)])


@pytest.mark.parametrize("ask", ["result", "exception", "await", "save", "async", "wait", "close"])
def test_an_error_is_raised_once_where_it_is_asked_for(ask, tmp_path):
    training = adamw()
    error = NoSpaceError("the disk is full", path="a")
    with contextlib.ExitStack() as stack:
        ckpt, _ = stack.enter_context(held(tmp_path, around=failing(error)))
        handle = ckpt.save_async(training.model, training.optimizer)
        training.step()
        assert handle.wait(SOON_S)
        calls = {
            "result": handle.result,
            "await": lambda: asyncio.run(_awaited(handle)),
            "save": lambda: ckpt.save(training.model),
            "async": lambda: ckpt.save_async(training.model),
            "wait": ckpt.wait,
            "close": ckpt.close,
        }
        if ask == "exception":
            assert isinstance(handle.exception(), NoSpaceError)
        else:
            with pytest.raises(NoSpaceError, match="the disk is full"):
                calls[ask]()
        if ask == "close":
            ckpt.close()
            return
        ckpt.wait(SOON_S)
        assert ckpt.save_async(training.model, training.optimizer).result(SOON_S)
        assert len(ckpt.list_checkpoints()) == 1


async def _awaited(handle):
    return await handle


def test_an_error_is_raised_by_the_end_of_a_block(tmp_path):
    training = adamw()
    with (
        pytest.raises(NoSpaceError),
        held(tmp_path, around=failing(NoSpaceError("full"))) as (c, _),
    ):
        c.save_async(training.model)


def test_a_block_that_fails_itself_tells_of_both(tmp_path):
    training = adamw()
    with (
        pytest.raises(ZeroDivisionError) as caught,
        held(tmp_path, around=failing(NoSpaceError("the disk is full"))) as (ckpt, _),
    ):
        ckpt.save_async(training.model)
        raise ZeroDivisionError("of the training")
    (note,) = caught.value.__notes__
    assert "a save in the background had failed: NoSpaceError: the disk is full" in note


def test_an_interrupt_is_not_hidden_by_a_save_that_failed(tmp_path):
    training = adamw()
    with (
        pytest.raises(KeyboardInterrupt),
        held(tmp_path, around=failing(NoSpaceError("the disk is full"))) as (ckpt, _),
    ):
        ckpt.save_async(training.model)
        raise KeyboardInterrupt


METHODS = ["create", "open_writer", "write_at", "finish", "free_bytes"]


@pytest.mark.parametrize("method", METHODS)
def test_a_storage_that_fails_leaves_what_there_was(method, tmp_path):
    training = adamw()
    with held(tmp_path) as (ckpt, _):
        ckpt.save(training.model, training.optimizer, SaveOptions(checkpoint_prefix="before"))
    before = sorted(path.name for path in (tmp_path / "before").iterdir())
    around = failing(StorageError("on purpose"), method)
    with held(tmp_path, around=around, staging_bytes=LEAST_BYTES) as (ckpt, _):
        handle = ckpt.save_async(training.model, training.optimizer)
        training.step(3)
        with pytest.raises(StorageError, match="on purpose") as caught:
            handle.result(SOON_S)
        assert caught.value.rank == 0
        assert [info.prefix for info in ckpt.list_checkpoints()] == ["before"]
        assert {key.key.partition("/")[0] for key in ckpt.catalog.storage.list()} == {"before"}
        assert sorted(path.name for path in (tmp_path / "before").iterdir()) == before
        assert ckpt.catalog.verify("before").is_intact


def test_a_name_that_is_taken(tmp_path):
    training = adamw()
    with held(tmp_path) as (ckpt, _):
        options = SaveOptions(checkpoint_prefix="a")
        ckpt.save_async(training.model, None, options).result(SOON_S)
        expected = copy.deepcopy(training.model.state_dict())
        training.step()
        with pytest.raises(CheckpointExistsError):
            ckpt.save_async(training.model, None, options).result(SOON_S)
        require_same(content_of(tmp_path, "a"), expected)


# Turns.


def test_a_second_save_waits_for_the_first(tmp_path):
    training = adamw()
    handles = []

    def again():
        handles.append(ckpt.save_async(training.model, None, SaveOptions(step=2)))

    with held(tmp_path) as (ckpt, gates):
        with gates.at("finish shard") as gate:
            first = ckpt.save_async(training.model, None, SaveOptions(step=1))
            gate.wait()
            with pytest.raises(OperationTimeoutError, match="it goes on"):
                ckpt.wait(0)
            caller = threading.Thread(target=again)
            caller.start()
            caller.join(0.05)
            assert caller.is_alive()
            assert not first.done()
        caller.join(SOON_S)
        assert first.done()
        assert handles[0].result(SOON_S) != first.result()
        assert [info.step for info in ckpt.list_checkpoints()] == [2, 1]


def test_a_second_save_is_refused(tmp_path):
    training = adamw()
    refusing = SaveOptions(when_busy="refuse")
    with held(tmp_path) as (ckpt, gates):
        with gates.at("finish shard") as gate:
            first = ckpt.save_async(training.model, None, refusing)
            gate.wait()
            with pytest.raises(SaveInProgressError, match=r"on rank 0.*that one goes on"):
                ckpt.save_async(training.model, None, refusing)
            training.step()
        first.result(SOON_S)
        ckpt.save_async(training.model, None, refusing).result(SOON_S)
        assert len(ckpt.list_checkpoints()) == 2


def test_a_load_waits_for_a_save(tmp_path):
    training, other = adamw(1), adamw(2)
    with held(tmp_path) as (ckpt, gates):
        expected = training.content()
        loading = threading.Thread(target=other.load, args=(ckpt, "a"))
        with gates.at("finish shard") as gate:
            options = SaveOptions(checkpoint_prefix="a")
            ckpt.save_async(training.model, training.optimizer, options)
            gate.wait()
            loading.start()
        loading.join(SOON_S)
        require_same(other.content(), expected)


def test_a_callback_of_a_save_cannot_wait_for_it(tmp_path):
    training, seen = adamw(), []

    def call_back(handle):
        with pytest.raises(RuntimeError, match="Leave it to the thread that trains"):
            ckpt.wait()
        seen.append(handle.done())

    with held(tmp_path) as (ckpt, gates):
        with gates.at("save"):
            ckpt.save_async(training.model).add_done_callback(call_back)
        ckpt.wait(SOON_S)
    assert seen == [True]


# Cancelling.

PHASES = ["save", "create intent", "open_writer shard", "write_at shard", "finish shard"]


@pytest.mark.parametrize("staging_bytes", [None, LEAST_BYTES])
@pytest.mark.parametrize("event", PHASES)
def test_a_save_is_cancelled(event, staging_bytes, tmp_path, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    training, records = adamw(), []
    with held(tmp_path, staging_bytes=staging_bytes, on_save=records.append) as (ckpt, gates):
        ckpt.save(training.model, None, SaveOptions(checkpoint_prefix="before"))
        with gates.at(event) as gate:
            handle = ckpt.save_async(training.model, training.optimizer)
            gate.wait()
            assert handle.cancel()
            assert not handle.cancelled()
            training.step()
        with pytest.raises(concurrent.futures.CancelledError, match="cancelled"):
            handle.result(SOON_S)
        assert handle.cancelled()
        assert handle.cancel()
        assert (handle.record, records[1].was_cancelled) == (records[1], True)
        assert [info.prefix for info in ckpt.list_checkpoints()] == ["before"]
        assert {key.key.partition("/")[0] for key in ckpt.catalog.storage.list()} == {"before"}
        ckpt.wait(SOON_S)  # somebody wanted it: no failure
        assert ckpt.save_async(training.model).result(SOON_S)
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
    assert "was cancelled" in caplog.text


def test_a_save_that_is_being_committed_is_not_cancelled(tmp_path):
    training = adamw()
    with held(tmp_path) as (ckpt, gates):
        with gates.at("create record") as gate:
            handle = ckpt.save_async(training.model)
            gate.wait()
            assert not handle.cancel()
        assert handle.result(SOON_S)
        assert not handle.cancel()
        assert not handle.cancelled()


# What a handle tells.


def test_a_handle_tells_how_far_it_is(tmp_path):
    training = adamw()
    training.step()
    with held(tmp_path) as (ckpt, gates):
        with gates.at("finish shard") as gate:
            options = SaveOptions(checkpoint_prefix="a", step=3)
            handle = ckpt.save_async(training.model, training.optimizer, options)
            gate.wait()
            now = handle.progress()
            assert (now.operation, now.phase, now.rank) == ("save", "write", 0)
            assert now.total_bytes > 3 * 160 * 200 * 4
            assert (handle.step, handle.prefix, handle.done(), handle.record) == (
                3,
                "a",
                False,
                None,
            )
            with pytest.raises(TimeoutError, match=r"step 3: writing.* The save goes on"):
                handle.result(0)
        handle.result(SOON_S)
        assert handle.progress().phase == "commit"
        assert repr(handle) == "SaveHandle(step 3: saved as a)"
        record = handle.record
    assert (record.prefix, record.step, record.rank, record.world_size) == ("a", 3, 0, 1)
    assert record.is_async
    assert record.written_bytes > record.state_bytes > now.total_bytes * 0.9
    assert 0 < record.stall_s <= record.total_s
    assert 0 < record.fsync_s <= record.write_s <= record.total_s
    assert record.copy_s > 0
    assert record.error is None


def test_it_can_be_awaited_while_a_loop_trains(tmp_path):
    training = adamw()
    expected = training.content()

    async def main():
        with gates.at("save"):
            handle = ckpt.save_async(training.model, training.optimizer)
            waiting = asyncio.create_task(_awaited(handle))
            await asyncio.sleep(0)
            training.step()
            assert not waiting.done()
        return await waiting

    with held(tmp_path) as (ckpt, gates):
        prefix = asyncio.run(main())
        require_same(adamw(50).load(ckpt, prefix), expected)


def test_callbacks_are_told(tmp_path):
    training, told = adamw(), []

    def on_save(record):
        told.append(("on_save", record.prefix))

    with held(tmp_path, on_save=on_save) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, None, SaveOptions(checkpoint_prefix="a"))
            handle.add_done_callback(lambda each: told.append(("done", each.result())))
        handle.result(SOON_S)
        ckpt.wait(SOON_S)
        ckpt.save(training.model, None, SaveOptions(checkpoint_prefix="b"))
    assert told == [("on_save", "a"), ("done", "a"), ("on_save", "b")]


def test_callbacks_that_fail_fail_nothing(tmp_path, caplog):
    training = adamw()

    def on_save(record):
        raise SystemExit(f"because of {record.prefix}")

    def call_back(handle):
        raise ZeroDivisionError("on purpose")

    with held(tmp_path, on_save=on_save) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, None, SaveOptions(checkpoint_prefix="a"))
            handle.add_done_callback(call_back)
        assert handle.result(SOON_S) == "a"
        ckpt.wait(SOON_S)
    assert "because of a" in caplog.text
    assert "on purpose" in caplog.text


def test_it_is_logged_and_nothing_is_printed(tmp_path, caplog, capfd):
    caplog.set_level(logging.INFO, "holdfast")
    training = adamw()
    around = failing(NoSpaceError("the disk is full"), "finish", nth=2)
    with held(tmp_path, around=around) as (ckpt, _):
        options = SaveOptions(checkpoint_prefix="a", step=1)
        ckpt.save_async(training.model, training.optimizer, options).result(SOON_S)
        options = SaveOptions(checkpoint_prefix="b", step=2)
        handle = ckpt.save_async(training.model, training.optimizer, options)
        training.step()
        assert isinstance(handle.exception(SOON_S), NoSpaceError)
    saved, failed = [each for each in caplog.records if each.name == "holdfast.distributed"]
    assert saved.levelname == "INFO"
    assert saved.getMessage().startswith("saved a (step 1): ")
    assert failed.levelname == "ERROR"
    assert failed.getMessage().startswith("the save of b (step 2) failed after ")
    assert "NoSpaceError: the disk is full" in failed.getMessage()
    assert capfd.readouterr() == ("", "")


# Steps.


def test_other_trainings_step_while_a_save_waits(tmp_path):
    """An optimizer that has nothing to do with the save copies what the save's own may change,
    and goes on."""
    training, other = adamw(1), adamw(2)
    expected = training.content()
    with held(tmp_path) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, training.optimizer)
            other.step(2)
            training.step()
        require_same(adamw(50).load(ckpt, handle.result(SOON_S)), expected)


def test_two_checkpointers_save_at_once(tmp_path):
    training, other = adamw(1), adamw(2)
    expected = [training.content(), other.content()]
    with held(tmp_path / "a") as (one, gates), held(tmp_path / "b") as (two, more):
        with gates.at("save"), more.at("save"):
            handles = [
                one.save_async(training.model, training.optimizer),
                two.save_async(other.model, other.optimizer),
            ]
            training.step()
            other.step()
        require_same(adamw(50).load(one, handles[0].result(SOON_S)), expected[0])
        require_same(adamw(50).load(two, handles[1].result(SOON_S)), expected[1])


def test_threads_step_at_once(tmp_path):
    """As with two models that are trained by a thread each."""
    trainings = [adamw(seed, fused=True) for seed in (1, 2, 3)]
    models = {str(n): each.model for n, each in enumerate(trainings)}
    optimizers = {str(n): each.optimizer for n, each in enumerate(trainings)}
    expected = {name: copy.deepcopy(each.state_dict()) for name, each in models.items()}
    with held(tmp_path) as (ckpt, gates):
        for prefix in ("a", "b"):
            with gates.at("save"):
                options = SaveOptions(checkpoint_prefix=prefix)
                expected = {name: copy.deepcopy(each.state_dict()) for name, each in models.items()}
                handle = ckpt.save_async(models, optimizers, options)
                threads = [threading.Thread(target=each.step, args=(5,)) for each in trainings]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(SOON_S)
            handle.result(SOON_S)
            require_same(content_of(tmp_path, prefix), expected)


def test_a_step_that_waits_can_be_interrupted(tmp_path):
    """The step is given up, the save is not."""
    training = adamw()
    training.model.append(nn.Linear(LEAST_BYTES // 400, 100))
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    expected = training.content()
    main = threading.main_thread().ident

    def interrupt():
        while ckpt._saves._snapshots._pool.room_bytes():  # until the step takes what there is
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    with held(tmp_path, staging_bytes=LEAST_BYTES) as (ckpt, gates):
        with gates.at("save"):
            handle = ckpt.save_async(training.model, training.optimizer)
            with pytest.raises(KeyboardInterrupt):
                threading.Thread(target=interrupt).start()
                training.step()
        training.step()
        found = content_of(tmp_path, handle.result(SOON_S))
        require_same(found, expected[0])


def test_a_save_is_begun_by_a_hook_of_the_optimizer(tmp_path):
    """After a step, which is where some frameworks save."""
    training = adamw()
    handles = []

    def save(optimizer, args, kwargs):
        expected.append(training.content())
        handles.append(ckpt.save_async(training.model, optimizer))

    expected = []
    training.optimizer.register_step_post_hook(save)
    with held(tmp_path) as (ckpt, _):
        training.step(3)
        for handle, wanted in zip(handles, expected, strict=True):
            require_same(adamw(50).load(ckpt, handle.result(SOON_S)), wanted)


def test_a_step_of_a_model_that_torch_compiles(tmp_path):
    """torch.compile changes torch's optimizers; the hook must be called all the same."""
    model = net()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with held(tmp_path) as (ckpt, gates):
        expected = copy.deepcopy(model.state_dict())
        with gates.at("save"):
            handle = ckpt.save_async(compiled, optimizer)
            compiled(torch.rand(2, 160)).sum().backward()
            optimizer.step()
        require_same(content_of(tmp_path, handle.result(SOON_S)), expected)
