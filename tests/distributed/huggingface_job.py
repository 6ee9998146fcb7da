"""Trainings by Hugging Face's Trainer in processes of their own; started by
test_huggingface_trainer.py.

``huggingface_job.py FOLDER kill`` kills itself when its second save has begun to write.
``huggingface_job.py FOLDER ranks`` is for torchrun: it trains undisturbed, until a crash and on.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_training import assert_same, new_trainer, resumed, train, undisturbed, until

from holdfast.distributed import SaveOptions
from holdfast.integrations.huggingface import HoldfastCallback


def be_killed(folder):
    def in_the_second(progress):
        if progress.phase == "write" and (folder / "store" / "step_4" / "metadata.json").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    callback = HoldfastCallback(folder / "store", SaveOptions(progress=in_the_second))
    train(new_trainer(folder, callbacks=[callback]), callback)


def on_ranks(folder):
    torch.set_num_threads(1)
    until(folder, 7, max_steps=12)
    began, found = resumed(folder, max_steps=12)
    assert_same(found, undisturbed(folder / "whole", max_steps=12))
    told = {"began": began, "losses": [*found.losses.values()]}
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    {"kill": be_killed, "ranks": on_ranks}[sys.argv[2]](Path(sys.argv[1]))
