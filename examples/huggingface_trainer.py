"""A run of Hugging Face's Trainer is killed, and goes on to the last bit as if nothing had been.

A process of its own trains a small GPT-2 and is killed with SIGKILL in the middle of its third
save, inside an epoch; then this one goes on, and compares with a run that nobody has disturbed.
Nothing is downloaded. ``python examples/huggingface_trainer.py``; needs "holdfast[huggingface]".
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from holdfast.catalog import Catalog
from holdfast.distributed import Progress, SaveOptions
from holdfast.integrations.huggingface import HoldfastCallback, save_pretrained

STEPS, EVERY = 24, 5


def new_trainer(folder: Path, save: str = "steps") -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    rows = torch.randint(0, 64, (60, 32), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder / "own"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy=save,
        save_steps=EVERY,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset)
    trainer.remove_callback(PrinterCallback)
    return trainer


def losses(trainer: Any) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}


def train(folder: Path, options: SaveOptions | None = None) -> Any:
    """The whole job, from wherever it was."""
    callback = HoldfastCallback(folder / "checkpoints", options)
    trainer = new_trainer(folder)
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    return trainer


def train_until_killed(folder: Path) -> None:
    def in_the_third(progress: Progress) -> None:
        second = folder / "checkpoints" / f"step_{2 * EVERY}" / "metadata.json"
        if progress.phase == "write" and second.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    train(folder, SaveOptions(progress=in_the_third))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-example-") as name:
        folder = Path(name)
        child = subprocess.run([sys.executable, __file__, name], check=False, capture_output=True)
        (newest, *_) = Catalog(folder / "checkpoints").list()
        print(f"killed while it saved (signal {-child.returncode}); {newest.prefix} is whole")
        trainer = train(folder)
        whole = new_trainer(folder, save="no")
        whole.train()
        same = losses(trainer) == losses(whole) and all(
            torch.equal(mine, other)
            for mine, other in zip(
                trainer.model.parameters(), whole.model.parameters(), strict=True
            )
        )
        print(f"gone on to step {trainer.state.global_step}, loss {losses(trainer)[STEPS]:.6f}")
        print(f"undisturbed: loss {losses(whole)[STEPS]:.6f}; equal to the last bit: {same}")
        save_pretrained(trainer, folder / "final")
        opened = AutoModelForCausalLM.from_pretrained(folder / "final")
        print(f"from_pretrained opens it: {type(opened).__name__}")
        if child.returncode != -signal.SIGKILL or not same:
            raise SystemExit("this should not have happened")


if __name__ == "__main__":
    torch.set_num_threads(1)  # of so small a model, more would wait for each other
    if len(sys.argv) > 1:
        train_until_killed(Path(sys.argv[1]))
    else:
        main()
