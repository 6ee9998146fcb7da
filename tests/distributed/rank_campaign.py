"""Random jobs of several ranks of which one comes to harm at a random moment, each given by its
seed. Knows coordinators; no storage is needed."""

import os
import random
import signal
import time

from holdfast.coordination import TorchCoordinator
from holdfast.testing import RankGang, seeded_rng

LIVENESS_S = 5.0  # a busy machine keeps a rank that runs waiting for seconds, too
FAULTS = ("raise", "kill", "stop", "exit", "late")


def job(rank, seed):
    """The same random sequence of collectives on every rank; one of them comes to harm."""
    rng = random.Random(seed)
    with TorchCoordinator(liveness_timeout_s=LIVENESS_S, timeout_s=60) as ranks:
        ranks.barrier()
        victim, fault = plan(seed, ranks.world_size)
        length = rng.randrange(1, 12)
        harm_at = rng.randrange(length)
        with ranks.operation("job") as operation:
            for step in range(length):
                call = rng.choice(["barrier", "gather", "all_gather", "broadcast"])
                root = rng.randrange(ranks.world_size)
                size = rng.choice([0, 1, 1000, 5_000_000])
                pause = rng.choice([0, 0, 0.02, 0.2])
                if rank == victim and step == harm_at:
                    time.sleep(pause)
                    harm(fault)
                if call == "barrier":
                    operation.barrier()
                elif call == "gather":
                    operation.gather(bytes(size), target=root)
                elif call == "all_gather":
                    got = operation.all_gather(bytes([rank]))
                    assert got == [bytes([other]) for other in range(ranks.world_size)]
                else:
                    data = operation.broadcast(bytes(size) if rank == root else None, source=root)
                    assert len(data) == size
        return "done"


def plan(seed, world_size):
    rng = random.Random(-seed - 1)
    return rng.randrange(world_size), rng.choice(FAULTS)


def harm(fault):
    if fault == "raise":
        raise ZeroDivisionError("on purpose")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        os._exit(3)
    time.sleep(LIVENESS_S * 1.5)


def require_named(seed):
    """Run the job of that seed: nobody hangs, and every rank that is left names the one that came
    to harm. Returns what that was."""
    world_size = seeded_rng(seed).randrange(2, 5)
    victim, fault = plan(seed, world_size)
    with RankGang(world_size) as gang:
        gang.start(job, seed)
        if fault == "late":
            assert [outcome.value for outcome in gang.outcomes()] == ["done"] * world_size
            return fault
        others = [rank for rank in range(world_size) if rank != victim]
        for outcome in gang.outcomes(30, ranks=others):
            error = outcome.failure()
            assert error is not None, (fault, outcome)
            assert error.rank == victim, (fault, str(error))
            wanted = "RankFailedError" if fault == "raise" else "RankLostError"
            assert type(error).__name__ == wanted, (fault, str(error))
    return fault
