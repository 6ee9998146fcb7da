"""Data parallel training (DDP) that goes on with any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py [STORE]
    torchrun --standalone --nproc-per-node 3 examples/ddp.py [STORE]
    python examples/ddp.py [STORE]

Each of these goes on where the one before ended, whatever their order: 12 rows a step, shared out
to as many ranks as there are. Told to end (SIGTERM, as by a cluster that wants its machines back),
all ranks stop at the same step and save once more.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from holdfast import CheckpointOptions, DistributedCheckpoint, Preemption, SaveOptions, keep_last

STORE = sys.argv[1] if len(sys.argv) > 1 else "runs/ddp"  # a place that all ranks see
STEPS = 20
ROWS = 12

if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")  # "nccl" on GPUs
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 1))
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def train(step: int) -> float:
    """One step on this rank's rows. Returns the loss of all rows."""
    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = (model(rows) - rows.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()  # DDP averages the gradients of the ranks here
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach() / ranks
    if dist.is_initialized():
        dist.all_reduce(whole)
    return float(whole)


# Every rank runs these lines: saving, resuming and asking whether to end are done together. The
# names of tensors are those of the bare model, so that DDP and one process load each other's.
options = CheckpointOptions(storage=STORE, retention=keep_last(3))
with (
    DistributedCheckpoint.create(options=options) as checkpoint,
    Preemption(checkpoint, deadline_s=30) as preemption,
):
    resumed = checkpoint.resume(model, optimizer)
    if rank == 0:
        print(resumed or "from the beginning")
    done = (resumed.step or 0) if resumed else 0

    for step in range(done + 1, done + STEPS + 1):
        loss = train(step)
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
        saving = SaveOptions(checkpoint_prefix=f"step_{step}", step=step, overwrite=True)
        if preemption.requested():
            preemption.save(model, optimizer, saving)
            break
        if step % 5 == 0:
            checkpoint.save_async(model, optimizer, saving)

if dist.is_initialized():
    dist.destroy_process_group()
