"""A small training by Hugging Face's Trainer, the same in every process that makes it, and what it
did: with dropout, a shuffled order, AdamW and a schedule.

Nothing is downloaded: the hub is switched off before transformers is imported.
"""

import os
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.integrations.huggingface import HoldfastCallback

ROWS, BATCH = 40, 4
STEPS = 20  # two epochs


class Rows(torch.utils.data.Dataset):
    """Rows of tokens, each by its number."""

    def __init__(self, rows=ROWS):
        self._rows = rows

    def __len__(self):
        return self._rows

    def __getitem__(self, index):
        tokens = torch.randint(0, 61, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Stopped(Exception):  # noqa: N818 -- it is what a test asked for
    pass


class StopAt(TrainerCallback):
    """Ends the training after a step, before that is saved, as a crash does. ``how`` is called."""

    def __init__(self, step, how=None):
        self._step = step
        self._how = how

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self._step:
            if self._how is not None:
                self._how()
            raise Stopped


@dataclass(frozen=True, kw_only=True)
class Did:
    """What a training did: its logged losses by step, and the weights at its end."""

    losses: dict
    rates: dict
    weights: dict


def new_model(seed=1, **config):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**(sizes | ends | config)))


def new_trainer(folder, *, callbacks=(), model=None, kind=Trainer, rows=ROWS, more=None, **options):
    defaults = {
        "output_dir": str(folder / "own"),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return kind(
        new_model() if model is None else model,
        TrainingArguments(**(defaults | options)),
        train_dataset=Rows(rows),
        callbacks=[*callbacks],
        **(more or {}),
    )


def train(trainer, callback):
    """Go on from the newest checkpoint, or begin. Returns the step that it began from."""
    folder = callback.resume(trainer)
    began = callback._found.step if callback._found else 0
    trainer.train(resume_from_checkpoint=folder)
    return began


def did(trainer):
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Did(
        losses={entry["step"]: entry["loss"] for entry in entries},
        rates={entry["step"]: entry["learning_rate"] for entry in entries},
        weights={name: each.clone() for name, each in trainer.model.state_dict().items()},
    )


def undisturbed(folder, **options):
    """What the training does if nothing saves it and nothing happens."""
    trainer = new_trainer(folder, **(options | {"save_strategy": "no"}))
    trainer.train()
    return did(trainer)


def until(folder, step, **options):
    """The training up to a step, at which it crashes; what it saved is on the disk then."""
    callback = HoldfastCallback(folder / "store")
    trainer = new_trainer(folder, callbacks=[callback, StopAt(step)], **options)
    try:
        train(trainer, callback)
    except Stopped:
        callback._checkpoint.close()
    return trainer


def resumed(folder, **options):
    """The training in another process, so to say: whatever it draws before it resumes."""
    torch.manual_seed(99)
    callback = HoldfastCallback(folder / "store")
    trainer = new_trainer(folder, callbacks=[callback], **options)
    torch.rand(7)
    began = train(trainer, callback)
    return began, did(trainer)


def assert_same(found, wanted):
    """To the last bit."""
    assert found.losses == wanted.losses
    assert found.rates == wanted.rates
    assert found.weights.keys() == wanted.weights.keys() != set()
    for name, value in wanted.weights.items():
        assert torch.equal(found.weights[name], value), name
