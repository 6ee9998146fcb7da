"""A model that FSDP2 splits over the ranks: saved split, loaded split otherwise, or whole.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py [STORE]
    python examples/fsdp2.py [STORE]

Each goes on where the one before ended. The second has the whole model in one process, which is
what a machine for evaluation may want. No rank ever gathers the model to save it. At the end, the
weights are exported as a safetensors file that needs no holdfast.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast import CheckpointFormat, CheckpointOptions, DistributedCheckpoint, SaveOptions

STORE = sys.argv[1] if len(sys.argv) > 1 else "runs/fsdp2"  # a place that all ranks see
STEPS = 20
ROWS = 12

if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")  # "nccl" on GPUs
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)
# 250 and 3 need not be divisible by the number of ranks.
model = nn.Sequential(
    nn.Linear(16, 250), nn.GELU(), nn.Linear(250, 250), nn.GELU(), nn.Linear(250, 3)
)
if dist.is_initialized():
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # after fully_shard


def train(step: int) -> float:
    """One step on this rank's rows. Returns the loss of all rows."""
    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = (model(rows) - rows[:, :3].sin()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach() / ranks
    if dist.is_initialized():
        dist.all_reduce(whole)
    return float(whole)


with DistributedCheckpoint.create(options=CheckpointOptions(storage=STORE)) as checkpoint:
    resumed = checkpoint.resume(model, optimizer)
    if rank == 0:
        print(resumed or "from the beginning")
    done = (resumed.step or 0) if resumed else 0

    for step in range(done + 1, done + STEPS + 1):
        loss = train(step)
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}")
        if step % 10 == 0:
            # Every rank writes what it holds. Incremental: what has not changed since an earlier
            # checkpoint, as frozen layers, is referred to and not written again.
            saving = SaveOptions(
                checkpoint_prefix=f"step_{step}", step=step, incremental=True, overwrite=True
            )
            checkpoint.save_async(model, optimizer, saving)

# A store of its own: resume would take an export for the newest checkpoint.
with DistributedCheckpoint.create(options=CheckpointOptions(storage=f"{STORE}-export")) as export:
    name = f"step_{done + STEPS}"
    export.save_model_only(
        model,
        SaveOptions(checkpoint_prefix=name, format=CheckpointFormat.CONSOLIDATED, overwrite=True),
    )
    if rank == 0:
        print(f"exported to {STORE}-export/{name}")

if dist.is_initialized():
    dist.destroy_process_group()
