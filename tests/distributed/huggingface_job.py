"""One worker of a torchrun job, started by test_huggingface_trainer.py: ``huggingface_job.py
FOLDER`` trains with DDP until a crash, on from there, and undisturbed; then it saves a
model that the ranks share."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_training import assert_same, new_model, resumed, undisturbed, until
from torch.distributed.fsdp import fully_shard

from holdfast.integrations.huggingface import save_pretrained


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    until(folder, 7, max_steps=12)
    began, found = resumed(folder, max_steps=12)
    assert_same(found, undisturbed(folder / "whole", max_steps=12))
    told = {"began": began, "losses": [*found.losses.values()]}
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(told))
    model = new_model()
    fully_shard(model)
    save_pretrained(model, folder / "shared")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
