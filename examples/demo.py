"""What holdfast does today, in half a minute: checkpoints, real ranks, faults on purpose.

Run it with ``make demo``.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from holdfast.catalog import Catalog
from holdfast.coordination import TorchCoordinator
from holdfast.errors import CheckpointError, SaveError
from holdfast.resilience import (
    CheckpointRollbackManager,
    CircuitBreaker,
    FaultToleranceHandler,
    RetryPolicy,
)
from holdfast.storage import MemoryStorage
from holdfast.testing import RankGang
from telling import say, show

RANKS = 4
LIVENESS_S = 2.0
QUICK = RetryPolicy(initial_delay_s=0.05, max_delay_s=0.2)


def training_step(rank: int, victim: int, fault: Callable[[], None]) -> tuple[float, str]:
    """One rank's part of a save; the victim comes to harm in the middle of it.

    Returns how long after that this rank knew how the save had ended, and how it ended.
    """
    with TorchCoordinator(liveness_timeout_s=LIVENESS_S) as coordinator:
        coordinator.barrier()
        harm_at = time.monotonic() + 0.2
        try:
            with coordinator.operation("save") as save, save.phase("write shards"):
                if rank == victim:
                    time.sleep(harm_at - time.monotonic())
                    fault()
                save.barrier()
        except CheckpointError as error:
            return time.monotonic() - harm_at, str(error)
        return time.monotonic() - harm_at, "saved"


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ZeroDivisionError("the loss is NaN")


def be_late() -> None:
    time.sleep(LIVENESS_S * 1.5)


def main() -> None:
    # Its own account of a dead store, with C++ stack traces, would drown ours.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    say("holdfast demo: one process, then real ranks (gloo) on this machine\n")
    began = time.monotonic()
    show_retry()
    show_breaker()
    show_rollback()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        show_save(folder)
        show_kill_while_saving(folder)
        show_flipped_bit(folder)
    say("starting ranks ...")
    show_training()
    show_fault("rank 2 raises", 2, fail)
    show_fault("rank 3 is killed", 3, be_killed)
    show_fault("rank 0, which hosts the store, is killed", 0, be_killed)
    show_fault(f"rank 1 is stopped (liveness_timeout_s={LIVENESS_S:g})", 1, be_stopped)
    show_fault(f"rank 1 is late by {LIVENESS_S * 1.5:g} s, but alive", 1, be_late)
    say(f"\nDone in {time.monotonic() - began:.0f} s.")


def show_retry() -> None:
    attempts = 0

    def flaky_upload() -> str:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise ConnectionResetError("connection reset by peer")
        return "uploaded"

    result = FaultToleranceHandler(retry_policy=QUICK).execute_with_retry(flaky_upload)
    show("a connection that breaks twice", f"{result} at attempt {attempts}")


def show_breaker() -> None:
    calls = 0

    def dead_service() -> None:
        nonlocal calls
        calls += 1
        raise ConnectionRefusedError("connection refused")

    breaker = CircuitBreaker(failure_threshold=3)
    for _ in range(10):
        breaker.execute(dead_service, fallback=lambda: None)
    show("ten calls to a dead service", f"{calls} reached it, then the circuit was open")


def show_rollback() -> None:
    storage = MemoryStorage()
    handler = FaultToleranceHandler(storage, QUICK)
    saver = CheckpointRollbackManager(handler, storage)
    saver.save_with_rollback("last.ckpt", lambda: b"good weights")

    def crash() -> bytes:
        raise MemoryError("out of memory while serialising")

    try:
        saver.save_with_rollback("last.ckpt", crash)
    except SaveError:
        kept = storage.read("last.ckpt").decode()
        objects = [info.key for info in storage.list()]
        show("a save that fails half-way", f"{kept!r} is untouched, no debris ({objects[0]} only)")


def state(step: int) -> dict[str, object]:
    """32 MiB of what a training would save."""
    random = np.random.default_rng(step)
    weights = {f"layer{n}.weight": random.normal(size=(1024, 1024)) for n in range(4)}
    return {"model": weights, "step": step, "betas": (0.9, 0.999)}


def show_save(folder: str) -> None:
    catalog = Catalog(folder)
    began = time.monotonic()
    info = catalog.write("last", state(100), step=100)
    seconds = time.monotonic() - began
    saved = catalog.read("last")
    same = str(saved) == str(state(100))
    show(
        "a checkpoint, durable and verified",
        f"{info.size_bytes / 1e6:.0f} MB on disk in {seconds:.2f} s, read back "
        f"{'the same' if same else 'DIFFERENT'}",
    )


def die_half_way(folder: str) -> None:
    """Overwrite the checkpoint, and be killed when half of it is written."""
    written = 0

    def progress(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if written > 16e6:
            be_killed()

    Catalog(folder).write("last", state(200), step=200, overwrite=True, progress=progress)


def show_kill_while_saving(folder: str) -> None:
    child = multiprocessing.get_context("spawn").Process(target=die_half_way, args=(folder,))
    child.start()
    child.join()
    catalog = Catalog(folder, lease_s=1)
    (info,) = catalog.list()
    damage = len(catalog.verify("last").damage)
    show(
        "killed (SIGKILL) while overwriting it",
        f"exit code {child.exitcode}; step {info.step} is still there, {damage} damaged",
    )


def show_flipped_bit(folder: str) -> None:
    shard = max(Path(folder, "last").glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    with shard.open("r+b") as file:
        file.seek(20_000_000)
        byte = file.read(1)[0]
        file.seek(20_000_000)
        file.write(bytes([byte ^ 1]))
    (damage,) = Catalog(folder).verify("last").damage
    show("one bit of 268 million flipped on the disk", "found:")
    say(f"      {damage}")


def show_training() -> None:
    # Here and not above: every process of this demo imports what is above, and most need no FSDP.
    import train_and_resume  # noqa: PLC0415

    train_and_resume.main()


def show_fault(title: str, victim: int, fault: Callable[[], None]) -> None:
    others = [rank for rank in range(RANKS) if rank != victim]
    with RankGang(RANKS) as gang:
        gang.start(training_step, victim, fault)
        outcomes = gang.outcomes(60, ranks=others)
    ends = [outcome.value for outcome in outcomes if outcome.value is not None]
    slowest = max(seconds for seconds, _ in ends)
    show(title, f"{len(ends)} of {len(others)} others knew within {slowest:.2f} s:")
    for text in sorted({text for _, text in ends}):
        say(f"      {text}")


if __name__ == "__main__":
    main()
