"""A training by Lightning is killed while it saves, and goes on to the last bit from what it had.

A process of its own trains, keeps its newest checkpoint only, and is killed with SIGKILL in the
middle of its third save; then this one goes on, and compares with a training that nobody has
disturbed. ``python examples/lightning_trainer.py``; needs "holdfast[lightning]".
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from holdfast.catalog import Catalog
from holdfast.distributed import Progress, SaveOptions
from holdfast.integrations.lightning import HoldfastCheckpointIO, RandomState

EPOCHS = 6


class Net(pl.LightningModule):  # type: ignore[misc]  # lightning is Any here
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Any:
        loss = (self.body(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(
    folder: Path, seed: int, *, ckpt_path: Path | None = None, options: SaveOptions | None = None
) -> Net:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # advice about workers and folders
    torch.manual_seed(seed)
    rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    net = Net()
    trainer = pl.Trainer(
        plugins=[HoldfastCheckpointIO(options=options)],
        callbacks=[ModelCheckpoint(folder, filename="{epoch}"), RandomState()],
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        net, torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True), ckpt_path=ckpt_path
    )
    return net


def train_until_killed(folder: Path) -> None:
    def in_the_third(progress: Progress) -> None:
        if progress.phase == "write" and (folder / "epoch=1.ckpt" / "metadata.json").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    train(folder, seed=1, options=SaveOptions(progress=in_the_third))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-example-") as name:
        folder = Path(name, "killed")
        child = subprocess.run([sys.executable, __file__, folder], check=False)
        (newest, *_) = Catalog(folder).list()
        print(f"killed while it saved (signal {-child.returncode}); {newest.prefix} is whole")
        resumed = train(folder, seed=2, ckpt_path=folder / newest.prefix)
        whole = train(Path(name, "whole"), seed=1)
        same = resumed.losses == whole.losses[-len(resumed.losses) :] and all(
            torch.equal(mine, other)
            for mine, other in zip(resumed.parameters(), whole.parameters(), strict=True)
        )
        print(f"gone on for {len(resumed.losses)} steps, the last loss is {resumed.losses[-1]:.6f}")
        print(f"undisturbed it is {whole.losses[-1]:.6f}; equal to the last bit: {same}")
        if child.returncode != -signal.SIGKILL or not same:
            raise SystemExit("this should not have happened")


if __name__ == "__main__":
    torch.set_num_threads(1)  # of so small a model, more would wait for each other
    if len(sys.argv) > 1:
        train_until_killed(Path(sys.argv[1]))
    else:
        main()
