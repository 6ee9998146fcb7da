"""Training with 16-bit weights that goes on bit for bit after a restart.

    python examples/mixed_precision.py [STORE [STEPS]]

MixedPrecisionOptimizer takes over an ordinary optimizer: the model becomes FP16, FP32 masters are
kept beside it, the loss is scaled, gradients are clipped, and steps that overflow are skipped. All
of that is its state, and is saved with it. Run it again, and it goes on.
"""

import sys

import torch
from torch import nn

from holdfast import CheckpointOptions, DistributedCheckpoint, SaveOptions
from holdfast.precision import MixedPrecisionOptimizer, MixedPrecisionOptions

STORE = sys.argv[1] if len(sys.argv) > 1 else "runs/mixed_precision"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 1))

# for_bf16() where BF16 is fast: it needs no loss scale. This one begins far too high on purpose, so
# that the first steps overflow, are skipped, and the scale is halved until they do not.
options = MixedPrecisionOptions.for_fp16(max_grad_norm=1.0, initial_scale=2.0**20)
inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
optimizer = MixedPrecisionOptimizer(inner, options, model=model)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
extra: dict[str, object] = {"scheduler": scheduler}

with DistributedCheckpoint.create(options=CheckpointOptions(storage=STORE)) as checkpoint:
    resumed = checkpoint.resume(model, optimizer, extra=extra)
    print(resumed or "from the beginning")
    done = (resumed.step or 0) if resumed else 0

    for step in range(done + 1, done + STEPS + 1):
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        output = model(rows).float()  # the model casts its input; the loss is taken in FP32
        loss = (output - rows.sin().sum(1, keepdim=True)).square().mean()
        optimizer.scale_loss(loss).backward()
        result = optimizer.step()
        optimizer.zero_grad()
        if result:  # a skipped step must not move the schedule
            scheduler.step()
        told = "" if result else ", skipped: it overflowed"
        print(f"step {step}: loss {loss.item():.6f}, scale {result.scale:.0f}{told}")

        if step % 5 == 0:
            saving = SaveOptions(checkpoint_prefix=f"step_{step}", step=step, overwrite=True)
            checkpoint.save_async(model, optimizer, saving, extra=extra)

stats = optimizer.get_stats()
weight = model[0].weight
print(f"{stats.step_count} steps, {stats.skipped_steps} skipped; weights are {weight.dtype}")
