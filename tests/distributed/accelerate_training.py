"""A loop of one's own with Accelerate that is cut off and goes on. torchrun runs it as a job."""

import sys
from collections import Counter
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

from holdfast.integrations.huggingface import AcceleratorCheckpoint

ROWS, BATCH = 24, 2


class Seen(Counter):
    """An object of the user's own, registered with Accelerate."""

    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.clear()
        self.update(state)


def prepared(*, seedable, seed):
    set_seed(seed)
    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=2)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    judge = torch.nn.Linear(1, 1)
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    sgd = torch.optim.SGD(judge.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    rows = torch.arange(4.0 * ROWS).reshape(ROWS, 4) / ROWS
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)
    return accelerator, accelerator.prepare(net, judge, adam, sgd, schedule, loader)


def train(store, upto, *, seedable, seed=0, every=4):
    """Losses by step, all weights, what was resumed, and the user's object."""
    accelerator, (net, judge, adam, sgd, schedule, loader) = prepared(seedable=seedable, seed=seed)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    losses = {}
    with AcceleratorCheckpoint(accelerator, store) as checkpoint:
        resumed = checkpoint.resume()
        step = resumed.step if resumed else 0
        while step < upto:
            for batch in checkpoint.batches(loader):
                with accelerator.accumulate(net, judge):
                    loss = judge(net(batch)).square().mean()
                    accelerator.backward(loss)
                    for each in (adam, sgd, schedule):
                        each.step()
                    adam.zero_grad()
                    sgd.zero_grad()
                step += 1
                seen["batches"] += 1
                losses[step] = loss.item()
                if step % every == 0:
                    checkpoint.save(step, metrics={"loss": loss.item()})
                if step == upto:
                    break
    weights = [each.detach().clone() for part in (net, judge) for each in part.parameters()]
    return losses, weights, resumed, seen


def compared(folder, cut_at, *, seedable):
    """A run that is cut off and started again, and one that is not, have the same losses."""
    first, _, nothing, _ = train(folder / "a", cut_at, seedable=seedable)
    then, weights, resumed, seen = train(folder / "a", 20, seedable=seedable, seed=5)
    whole, expected, _, _ = train(folder / "b", 20, seedable=seedable)
    assert nothing is None
    assert resumed.step == cut_at // 4 * 4
    assert min(then) == resumed.step + 1
    assert {step: whole[step] for step in first} == first
    assert {step: whole[step] for step in then} == then
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    assert seen["batches"] == 20


if __name__ == "__main__":
    torch.set_num_threads(1)
    compared(Path(sys.argv[1]), int(sys.argv[2]), seedable=False)
    print("the same")  # noqa: T201
