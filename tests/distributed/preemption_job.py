"""A training that torchrun starts, and that ends with a last save when it is told to; used by
test_preemption_torchrun.py.

``preemption_job.py FOLDER`` trains for ever, and writes into the folder when it has begun and at
which step it has ended.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from holdfast import CheckpointOptions, DistributedCheckpoint, Preemption, SaveOptions

BEGUN = 3


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    options = CheckpointOptions(storage=folder / "store")
    with (
        DistributedCheckpoint.create(options=options) as ckpt,
        Preemption(ckpt, deadline_s=20) as preemption,
    ):
        step = 0
        while not preemption.requested():
            step += 1
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == BEGUN:
                (folder / f"begun.{rank}").write_text(str(os.getpid()))
        preemption.save(model, optimizer, SaveOptions(step=step), extra={"step": step})
        (folder / f"ended.{rank}").write_text(str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
