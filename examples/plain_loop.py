"""An ordinary training loop that can be killed at any moment.

    python examples/plain_loop.py [STORE [STEPS]]

Run it again, and it goes on from the newest checkpoint: 20 more steps each time, with the losses
that one long run would have had, to the last bit. That holds after a kill -9, too.
"""

import sys

import torch
from torch import nn

from holdfast import CheckpointOptions, DistributedCheckpoint, SaveOptions, keep_last

STORE = sys.argv[1] if len(sys.argv) > 1 else "runs/plain_loop"  # or s3://bucket/run
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)

# What has to come back beside model and optimizer. The generators of random numbers, which the
# dropout draws from, are saved without being named.
extra: dict[str, object] = {"scheduler": scheduler}

# The three newest checkpoints stay, older ones are deleted as new ones are committed.
options = CheckpointOptions(storage=STORE, retention=keep_last(3))

# Leaving the block waits for the last save, and raises its error if it had one.
with DistributedCheckpoint.create(options=options) as checkpoint:
    resumed = checkpoint.resume(model, optimizer, extra=extra)  # None: there was nothing yet
    print(resumed or "from the beginning")
    done = (resumed.step or 0) if resumed else 0

    for step in range(done + 1, done + STEPS + 1):
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))  # a batch
        loss = (model(rows) - rows.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step}: loss {loss.item():.6f}")

        if step % 5 == 0:
            # Returns at once; the next steps run while the state of this one is written.
            # overwrite: if step_20 was damaged and resume went back to step_15, it is replaced.
            saving = SaveOptions(checkpoint_prefix=f"step_{step}", step=step, overwrite=True)
            checkpoint.save_async(model, optimizer, saving, extra=extra)
