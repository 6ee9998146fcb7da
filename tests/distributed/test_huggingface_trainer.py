"""Runs of Hugging Face's Trainer that crash and go on: to the last bit as if nothing had been."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_training import (
    Rows,
    StopAt,
    Stopped,
    assert_same,
    did,
    new_model,
    new_trainer,
    resumed,
    train,
    undisturbed,
    until,
)
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, Trainer

import holdfast
from holdfast.catalog import Catalog
from holdfast.distributed import CheckpointOptions, SaveOptions, keep_every
from holdfast.errors import StorageError
from holdfast.integrations.huggingface import HoldfastCallback
from holdfast.precision import MixedPrecisionOptimizer, MixedPrecisionOptions
from holdfast.storage import MemoryStorage
from holdfast.testing import Fault, FaultyStorage

# Some tests start Python and torch a few times, which takes a loaded machine minutes.
pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("huggingface_job.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface_trainer.py"


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a small model wait for each other on a machine that has others to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def steps_in(folder):
    return [info.step for info in Catalog(folder / "store").list()]


@pytest.mark.parametrize(
    ("crash", "began", "options"),
    [
        pytest.param(7, 4, {}, id="inside an epoch"),
        pytest.param(15, 12, {}, id="inside the second epoch"),
        pytest.param(13, 10, {"save_steps": 5}, id="between epochs"),
        pytest.param(9, 8, {"gradient_accumulation_steps": 2, "rows": 44}, id="accumulating"),
        pytest.param(
            7, 4, {"accelerator_config": {"use_seedable_sampler": False}}, id="torch's own sampler"
        ),
        pytest.param(9, 8, {"logging_steps": 3}, id="between logs"),
        pytest.param(15, 10, {"save_strategy": "epoch"}, id="saved by epoch"),
    ],
)
def test_a_run_goes_on_to_the_last_bit(tmp_path, crash, began, options):
    until(tmp_path, crash, **options)
    found_began, found = resumed(tmp_path, **options)
    assert found_began == began
    assert_same(found, undisturbed(tmp_path / "whole", **options))


def test_it_crashes_and_goes_on_several_times(tmp_path):
    for crash in (3, 6, 11, 18):
        until(tmp_path, crash)
    began, found = resumed(tmp_path)
    assert began == 16
    assert_same(found, undisturbed(tmp_path / "whole"))


def test_killed_while_it_saves_it_goes_on_from_the_one_before():
    """The example does that, and saves the model for from_pretrained."""
    job = run(EXAMPLE)
    assert job.returncode == 0, job.stderr
    assert "killed while it saved (signal 9); step_10 is whole" in job.stdout
    assert "equal to the last bit: True" in job.stdout
    assert "from_pretrained opens it: GPT2LMHeadModel" in job.stdout


def test_the_trainer_writes_no_files_of_its_own(tmp_path):
    callback = HoldfastCallback(tmp_path / "store")
    trainer = new_trainer(tmp_path, callbacks=[callback])
    train(trainer, callback)
    assert not [*(tmp_path / "own").rglob("*checkpoint*")]
    assert steps_in(tmp_path) == [20, 16, 12, 8, 4]
    info = Catalog(tmp_path / "store").list()[0]
    assert info.metrics["loss"] == did(trainer).losses[20]
    assert all(Catalog(tmp_path / "store").verify(f"step_{step}").is_intact for step in (4, 20))


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    until(tmp_path, 11)
    (shard,) = (tmp_path / "store" / "step_8").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        began, found = resumed(tmp_path)
    assert began == 4
    assert "step_8" in caplog.text
    assert_same(found, undisturbed(tmp_path / "whole"))
    assert Catalog(tmp_path / "store").verify("step_8").is_intact  # saved anew on the way


class Scaled(Trainer):
    """Scales its loss as with FP16 on a GPU; the scale changes every few steps."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.accelerator.scaler = scaler


def test_the_scale_of_losses_goes_on(tmp_path):
    options = {"kind": Scaled, "max_grad_norm": 0.0}
    until(tmp_path, 7, **options)
    callback = HoldfastCallback(tmp_path / "store")
    trainer = new_trainer(tmp_path, callbacks=[callback], **options)
    scaler = trainer.accelerator.scaler
    assert train(trainer, callback) == 4
    assert scaler.get_scale() == 2.0 ** (10 + 20 // 3)
    assert_same(did(trainer), undisturbed(tmp_path / "whole", **options))


def mixed():
    """A model in BF16 and its optimizer. Some machines' kernels for BF16 are broken."""
    torch._C._set_mkldnn_enabled(False)
    model = new_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = MixedPrecisionOptimizer(inner, MixedPrecisionOptions.for_bf16(), model=model)
    return {"model": model, "more": {"optimizers": (optimizer, None)}, "max_grad_norm": 0.0}


def test_mixed_precision_goes_on(tmp_path):
    try:
        until(tmp_path, 7, **mixed())
        began, found = resumed(tmp_path, **mixed())
        assert began == 4
        wanted = undisturbed(tmp_path / "whole", **mixed())
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert wanted.weights["transformer.wte.weight"].dtype == torch.bfloat16
    assert_same(found, wanted)


def evaluating(**options):
    return {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that the last is not the best
        "more": {"eval_dataset": Rows(8)},
    } | options


def test_the_best_model_is_loaded_at_the_end_and_kept(tmp_path):
    callback = HoldfastCallback(tmp_path / "store")
    trainer = new_trainer(
        tmp_path,
        callbacks=[callback],
        **evaluating(save_total_limit=1, load_best_model_at_end=True),
    )
    train(trainer, callback)
    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    best = max(losses, key=losses.get)
    assert best != 20
    assert steps_in(tmp_path) == [20, best]
    stored = holdfast.load(tmp_path / "store" / f"step_{best}")["model"]
    for name, value in trainer.model.state_dict().items():
        if name in stored:
            assert torch.equal(value, stored[name]), name
    assert trainer.evaluate()["eval_loss"] == losses[best]


def test_only_the_best_are_saved_if_told_so(tmp_path):
    callback = HoldfastCallback(tmp_path / "store")
    train(new_trainer(tmp_path, callbacks=[callback], **evaluating(save_strategy="best")), callback)
    assert steps_in(tmp_path) == [4]


def test_callbacks_with_a_state_get_theirs_back(tmp_path):
    options = evaluating(restore_callback_states_from_checkpoint=True)

    def new(step=None):
        callback = HoldfastCallback(tmp_path / "store")
        patience = EarlyStoppingCallback(early_stopping_patience=100)
        stops = [] if step is None else [StopAt(step)]
        return callback, new_trainer(tmp_path, callbacks=[callback, patience, *stops], **options)

    def counted(trainer):
        (found,) = (
            each
            for each in trainer.callback_handler.callbacks
            if isinstance(each, EarlyStoppingCallback)
        )
        return found.early_stopping_patience_counter

    callback, trainer = new(18)
    with pytest.raises(Stopped):
        train(trainer, callback)
    callback._checkpoint.close()
    assert counted(trainer) > 0
    callback, again = new()
    assert train(again, callback) == 16
    assert counted(again) > counted(trainer)


def test_the_retention_of_the_options_counts(tmp_path):
    options = CheckpointOptions(storage=tmp_path / "store", retention=keep_every(8))
    callback = HoldfastCallback(options, SaveOptions(compression_level="fast"))
    train(new_trainer(tmp_path, callbacks=[callback], save_total_limit=1), callback)
    assert steps_in(tmp_path) == [20, 16, 8]


def test_a_run_that_the_trainer_saved_itself_goes_on_here(tmp_path):
    with pytest.raises(Stopped):
        new_trainer(tmp_path, callbacks=[StopAt(7)]).train()
    own = tmp_path / "own" / "checkpoint-4"
    callback = HoldfastCallback(tmp_path / "store")
    trainer = new_trainer(tmp_path, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer) or str(own))
    assert steps_in(tmp_path) == [20, 16, 12, 8]
    assert_same(did(trainer), undisturbed(tmp_path / "whole"))


def test_a_callback_adds_itself_to_its_trainer(tmp_path):
    callback = HoldfastCallback(tmp_path / "store")
    train(new_trainer(tmp_path, max_steps=4), callback)
    assert steps_in(tmp_path) == [4]


def test_a_save_that_fails_ends_the_training(tmp_path):
    """At the next save; what was saved before is intact."""
    faulty = FaultyStorage(MemoryStorage(), [Fault("open_writer", 2, StorageError("full"))])
    callback = HoldfastCallback(faulty)
    trainer = new_trainer(tmp_path, callbacks=[callback])
    with pytest.raises(StorageError, match="full"):
        train(trainer, callback)
    assert trainer.state.global_step == 12
    assert [info.step for info in Catalog(faulty).list()] == [4]


def test_a_save_that_fails_last_is_an_error_of_the_training(tmp_path):
    faulty = FaultyStorage(MemoryStorage(), [Fault("open_writer", 1, StorageError("full"))])
    callback = HoldfastCallback(faulty)
    with pytest.raises(StorageError, match="full"):
        train(new_trainer(tmp_path, callbacks=[callback], max_steps=4), callback)


def test_without_its_trainer_a_callback_refuses_to_train(tmp_path):
    trainer = new_trainer(tmp_path, callbacks=[HoldfastCallback(tmp_path / "store")])
    with pytest.raises(RuntimeError, match=r"resume_from_checkpoint=callback.resume\(trainer\)"):
        trainer.train()


def test_what_was_chosen_must_be_what_is_trained_on(tmp_path):
    until(tmp_path, 7)
    callback = HoldfastCallback(tmp_path / "store")
    trainer = new_trainer(tmp_path, callbacks=[callback])
    callback.resume(trainer)
    with pytest.raises(RuntimeError, match=r"step_4 was chosen .* begins at step 0"):
        trainer.train()


def test_another_model_is_refused_and_stays_as_it_is(tmp_path):
    until(tmp_path, 7)
    wide = new_model(n_embd=32)
    before = {name: each.clone() for name, each in wide.state_dict().items()}
    callback = HoldfastCallback(tmp_path / "store")
    trainer = new_trainer(tmp_path, callbacks=[callback], model=wide)
    with pytest.raises(
        holdfast.ValidationError, match=r"model\.transformer\.wte\.weight: \(61, 16\)"
    ):
        train(trainer, callback)
    for name, value in wide.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    holdfast.save({"model": new_model()}, tmp_path / "store" / "step_1")
    callback = HoldfastCallback(tmp_path / "store")
    with pytest.raises(holdfast.LoadError, match="lacks 'transformers'"):
        callback.resume(new_trainer(tmp_path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"save_only_model": True}, "save_only_model=True leaves out"),
        ({"push_to_hub": True, "hub_model_id": "a/b"}, "not pushed to the hub"),
    ],
)
def test_a_trainer_that_cannot_be_kept_is_refused(tmp_path, monkeypatch, options, reason):
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *_, **__: None)  # it would ask the hub
    callback = HoldfastCallback(tmp_path / "store")
    with pytest.raises(ValueError, match=reason):
        callback.resume(new_trainer(tmp_path, **options))
    with pytest.raises(ValueError, match=r"must be a transformers\.Trainer"):
        callback.resume(new_model())


@pytest.mark.parametrize(
    "options",
    [
        {"step": 0},
        {"checkpoint_prefix": "x"},
        {"metrics": {"a": 1.0}},
        {"include_optimizer": False},
    ],
)
def test_options_that_are_not_the_users_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        HoldfastCallback(tmp_path, SaveOptions(**options))


def test_without_transformers_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['transformers'] = None; import holdfast.integrations.huggingface"
    )
    job = run("-c", code)
    assert job.stderr.splitlines()[-1] == (
        "ImportError: holdfast.integrations.huggingface needs transformers, which is not "
        'installed: pip install "holdfast[huggingface]"'
    )


def test_two_ranks_go_on_to_the_last_bit_and_one_goes_on_from_theirs(tmp_path):
    """The job trains undisturbed, until a crash, and on from there, all on two ranks of DDP."""
    job = run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        SCRIPT,
        tmp_path,
        "ranks",
    )
    assert job.returncode == 0, job.stderr
    told = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert [each["began"] for each in told] == [4, 4]
    began, found = resumed(tmp_path, per_device_train_batch_size=8, max_steps=14)
    assert began == 12
    assert [*found.losses] == [*range(1, 15)]
    assert [*found.losses.values()][:12] == told[0]["losses"] == told[1]["losses"]
    shared = GPT2LMHeadModel.from_pretrained(tmp_path / "shared")
    for name, value in new_model().state_dict().items():
        assert torch.equal(shared.state_dict()[name], value), name
