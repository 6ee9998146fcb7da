"""A training step that has to fit into half of the memory it would take.

    python examples/activation_plan.py [STORE]

holdfast.plan measures the step, and finds out which activations to keep, which to drop and make
again, so that the step fits and takes as little longer as can be; gradients are the same bits. The
plan is saved with the training: run it again, and it goes on, without planning again.
"""

import sys

import torch
from torch import nn

import holdfast
from holdfast import ActivationPlan, CheckpointOptions, DistributedCheckpoint, SaveOptions
from holdfast.activation import measure_peak

STORE = sys.argv[1] if len(sys.argv) > 1 else "runs/activation_plan"
STEPS = 5

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=256, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, num_layers=4), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(step))


def peak_of_step(inputs: torch.Tensor) -> int:
    """The most memory of a forward and backward. Inputs are made outside of it: like parameters and
    gradients, they are no part of the budget."""

    def backward() -> None:
        model(inputs).square().mean().backward()

    backward()  # makes the gradients
    return measure_peak(backward).peak_bytes


def train(step: int) -> float:
    loss = model(batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


with DistributedCheckpoint.create(options=CheckpointOptions(storage=STORE)) as checkpoint:
    resumed = checkpoint.resume(model, optimizer)
    print(resumed or "from the beginning")
    done = (resumed.step or 0) if resumed else 0

    if resumed:
        plan = ActivationPlan.from_json(str(resumed.extra["plan"]))
    else:
        # The budget is beside parameters, gradients and optimizer state. "1.5GiB" would do as well.
        plan = holdfast.plan(model, batch(0), budget="50%", loss=lambda out: out.square().mean())
        print(plan.report())

    with plan.applied(model):  # plan.apply(model) does it for good
        for step in range(done + 1, done + STEPS + 1):
            print(f"step {step}: loss {train(step):.6f}")
        name = f"step_{done + STEPS}"
        checkpoint.save(
            model,
            optimizer,
            SaveOptions(checkpoint_prefix=name, step=done + STEPS, overwrite=True),
            extra={"plan": plan.to_json()},
        )
        fitted = peak_of_step(batch(0))  # only to see it, under the plan and without it
    whole = peak_of_step(batch(0))

if fitted > plan.budget_bytes:
    sys.exit(f"a step took {mebibytes(fitted)}, more than {mebibytes(plan.budget_bytes)}")
print(f"a step took {mebibytes(fitted)} of {mebibytes(plan.budget_bytes)}, ", end="")
print(f"and {mebibytes(whole)} without a plan")
