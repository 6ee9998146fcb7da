"""One worker of a torchrun job, started by test_lightning_trainer.py: ``lightning_job.py FOLDER``
trains with DDP undisturbed, until a crash, and on from what it had saved."""

import sys
from pathlib import Path

import torch
from lightning_training import (
    ModelCheckpoint,
    StopAt,
    Stopped,
    assert_same,
    fit,
    new_net,
    new_trainer,
)


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    ranks = {"strategy": "ddp", "devices": 2}
    wanted = fit(new_trainer(folder / "whole", **ranks), new_net(dropout=0.0))
    saving = ModelCheckpoint(folder / "kept", filename="{epoch}")
    crashing = new_trainer(folder, callbacks=[saving, StopAt(7)], **ranks)
    try:
        fit(crashing, new_net(dropout=0.0))
    except Stopped:
        path = folder / "kept" / "epoch=1.ckpt"
    again = new_trainer(folder, **ranks)
    net = fit(again, new_net(9, dropout=0.0), ckpt_path=path)
    assert_same(net, wanted, of_last=6)
    (folder / f"rank_{again.global_rank}").touch()


if __name__ == "__main__":
    main()
