"""Two ranks that save in the background, destroy their process group and come to the end of their
programs at once; once with a store that is a file, and once with one that rank 0 hosts.

Run as a script: ``exit_ranks.py FOLDER``. It fails if a rank does.
"""

import datetime as dt
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.distributed import DistributedCheckpoint, SaveOptions
from holdfast.storage import LocalStorage
from holdfast.testing import Fault, FaultyStorage

WAIT = dt.timedelta(seconds=60)


def tcp_store(rank, pipe):
    """Rank 0 tells the other the port."""
    reading, writing = pipe
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, WAIT, wait_for_workers=False)
        os.write(writing, f"{store.port}".encode())
        return store
    return dist.TCPStore("127.0.0.1", int(os.read(reading, 10)), 2, False, WAIT)


def save_and_leave(rank, root, store, form):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = nn.Linear(300, 301)
    nn.init.constant_(model.weight, 3.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # Rank 1 is far behind, so that rank 0 waits for it when it has nothing else to do.
    slow = [Fault("finish", 1, delay_s=0.5 * rank)]
    storage = FaultyStorage(LocalStorage(root), slow)
    ckpt = DistributedCheckpoint(storage=storage)
    ckpt.save_async(model, optimizer, SaveOptions(checkpoint_prefix="a", format=form))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    dist.destroy_process_group()


def forked():
    """Which of four children this process is; the parent ends when they have."""
    children = []
    for number in range(4):
        pid = os.fork()
        if not pid:
            return number
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    os._exit(any(codes))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ends = os.pipe()
    kind, number = divmod(forked(), 2)
    torch.set_num_threads(1)
    if kind:
        save_and_leave(number, folder / "tcp", tcp_store(number, ends), "consolidated")
    else:
        store = dist.FileStore(f"{folder}/meet", 2)
        save_and_leave(number, folder / "file", store, "multi_shard")
