"""What ranks do in the tests of what attacks on ``save_async`` have found: one of them makes other
calls than the rest, or gives up when it is too late."""

import concurrent.futures
import time

import torch
import torch.distributed as dist
from checkpoint_jobs import mesh_of
from fault_jobs import ended_with
from save_async_jobs import SOON_S, saver, told
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.catalog import Catalog
from holdfast.distributed import SaveOptions
from holdfast.errors import CoordinationError, SaveError


def sharded_model():
    torch.manual_seed(1)
    model = nn.Linear(400, 400)
    fully_shard(model, mesh=mesh_of((dist.get_world_size(),)))
    return model


def skip_job(rank, folder):
    """Rank 1 leaves the first save out. The weights are one less after each step. Returns how the
    last save ended."""
    model = sharded_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    with saver(folder) as ckpt:
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            if rank == 0 or step > 0:
                try:
                    handle = ckpt.save_async(model, optimizer, SaveOptions(step=step, timeout_s=5))
                except SaveError as error:  # of the save before, which nobody has asked for
                    return ended_with(error)
        return told(handle)


def late_cancel_job(rank, folder, method):
    """Rank 1 gives up when its word is given and rank 0 has committed."""

    def progress(now):
        if rank == 1 and now.phase == "commit":
            deadline_s = time.monotonic() + SOON_S
            while not Catalog(folder).list():
                assert time.monotonic() < deadline_s, "nothing is committed"
                time.sleep(0.01)
            raise concurrent.futures.CancelledError("too late")

    model = sharded_model()
    options = SaveOptions(checkpoint_prefix="a", progress=progress)
    with saver(folder) as ckpt:
        try:
            if method == "save":
                return ckpt.save(model, None, options)
            return ckpt.save_async(model, None, options).result(SOON_S)
        except (SaveError, CoordinationError, concurrent.futures.CancelledError) as error:
            return " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])


def misusing_job(rank, folder):
    """A callback of rank 1 tries to save, which is refused. Returns what it was told, and how the
    next save of all ranks ends."""
    model, refused = sharded_model(), []

    def on_save(record):
        if rank == 1 and not refused:
            try:
                ckpt.save_async(model)
            except RuntimeError as error:
                refused.append(str(error))

    with saver(folder, on_save=on_save) as ckpt:
        ckpt.save_async(model).result(SOON_S)
        return refused, told(ckpt.save_async(model))
