"""How long ranks need for each other: a barrier, and noticing that one is gone.

A barrier is measured on 4 ranks over the store on loopback, beside ``torch.distributed``'s own
gloo barrier in the same run. Noticing is the time from the fault to the slowest survivor's error.
"""

import os
import signal
import time
from collections.abc import Callable

from _measure import FULL, Extent, Measurement, interleaved, median, spread
from holdfast.coordination import TorchCoordinator
from holdfast.errors import CheckpointError
from holdfast.testing import RankGang

RANKS = 4
LIVENESS_S = 2.0
BOUND_S = 1.0


def measure(extent: Extent = FULL) -> list[Measurement]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its stack traces of a killed store
    with RankGang(RANKS) as gang:
        per_rank = gang.run(barriers, extent.repeats(30))
    found = [_barrier(per_rank)]
    for name, fault, bound_s in (
        ("a rank raises", fail, BOUND_S),
        ("a rank is killed", be_killed, BOUND_S),
        ("a rank is stopped, beyond liveness_timeout_s", be_stopped, BOUND_S),
    ):
        waited = LIVENESS_S if fault is be_stopped else 0.0
        times = [
            noticed(victim, fault) - waited
            for _ in range(1 if fault is be_stopped else extent.repeats(3))
            for victim in range(extent.repeats(RANKS))
        ]
        found.append(
            Measurement(
                name=f"{name}: the slowest survivor knows",
                value=max(times),
                unit="s",
                target=f"<= {bound_s:g} s (worst of {len(times)}, each rank in turn)",
                met=max(times) <= bound_s,
                spread=spread(times),
            )
        )
    return found


def _barrier(per_rank: list[dict[str, list[float]]]) -> Measurement:
    ours = [seconds for rank in per_rank for seconds in rank["holdfast"]]
    gloo = [seconds for rank in per_rank for seconds in rank["gloo"]]
    return Measurement(
        name=f"barrier of {RANKS} ranks (gloo's own: {median(gloo) * 1e3:.2f} ms)",
        value=median(ours) * 1e3,
        unit="ms",
        target="<= 1.5 ms median",
        met=median(ours) <= 1.5e-3,
        spread=spread(ours, scale=1e3),
    )


def barriers(rank: int, repeats: int) -> dict[str, list[float]]:
    import torch.distributed as dist  # noqa: PLC0415 -- only in the ranks

    with TorchCoordinator(liveness_timeout_s=LIVENESS_S) as coordinator:
        coordinator.barrier()
        # Stretches, not single calls: a barrier's keys are tidied while the next one begins.
        return interleaved(
            {"holdfast": coordinator.barrier, "gloo": dist.barrier}, repeats=repeats, calls=20
        )


def noticed(victim: int, fault: Callable[[], None]) -> float:
    with RankGang(RANKS) as gang:
        gang.start(suffer, victim, fault)
        others = [rank for rank in range(RANKS) if rank != victim]
        return max(float(outcome.value) for outcome in gang.outcomes(60, ranks=others))


def suffer(rank: int, victim: int, fault: Callable[[], None]) -> float:
    with TorchCoordinator(liveness_timeout_s=LIVENESS_S) as coordinator:
        coordinator.barrier()
        harm_at = time.monotonic() + 0.3
        try:
            with coordinator.operation("save") as operation:
                if rank == victim:
                    time.sleep(max(0.0, harm_at - time.monotonic()))
                    fault()
                operation.barrier()
        except CheckpointError:
            return time.monotonic() - harm_at
    raise AssertionError("the operation should have failed")


def fail() -> None:
    raise ZeroDivisionError


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
