"""One worker of a torchrun job in which one rank falls sick; started by test_torchrun.py.

``torchrun_job.py FOLDER FAULT:VICTIM...`` goes through the faults one after the other, each
with a coordinator of its own, and writes into the folder how each of them ended on this rank.
Seconds are those of ``time.monotonic()``, which all processes of a machine share.
"""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from holdfast.coordination import TorchCoordinator
from holdfast.errors import ErrorRecord, StorageError

LIVENESS_S = 5.0  # a busy machine keeps a rank that runs waiting for seconds, too
TIMEOUT_S = 60.0


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self():
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_foreign():
    raise ZeroDivisionError("the loss is NaN")


def raise_ours():
    raise StorageError("the disk is full", path="step_7/shard-1")


def come_late():
    time.sleep(LIVENESS_S * 1.5)


FAULTS = {
    fault.__name__: fault for fault in (kill_self, stop_self, raise_foreign, raise_ours, come_late)
}


def write(path, facts):
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(facts))
    part.rename(path)  # whoever sees the file sees all of it


def save_with_a_sick_rank(rank, folder, case):
    fault, _, victim = case.partition(":")
    with TorchCoordinator(liveness_timeout_s=LIVENESS_S, timeout_s=TIMEOUT_S) as coordinator:
        coordinator.barrier()
        record = None
        try:
            with coordinator.operation("save") as operation, operation.phase("write"):
                if rank == int(victim):
                    time.sleep(0.3)  # the others are in the block by now
                    write(folder / f"{case}.fault.json", {"at": time.monotonic()})
                    FAULTS[fault]()
                operation.barrier()
        except Exception as error:
            record = ErrorRecord.of(error, rank=rank)
        write(folder / f"{case}.{rank}.json", {"error": record, "at": time.monotonic()})


def main():
    import torch.distributed as dist  # here, because the test imports this file for its numbers

    folder, *cases = sys.argv[1:]
    # Once a worker has died, torchrun sends this to the others; they are to learn it from us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    facts = {"pid": os.getpid(), "agent_store": os.environ["TORCHELASTIC_USE_AGENT_STORE"]}
    write(Path(folder, f"worker.{rank}.json"), facts)
    for case in cases:
        save_with_a_sick_rank(rank, Path(folder), case)
    # The process group is not destroyed: that would wait for the sick rank.


if __name__ == "__main__":
    main()
