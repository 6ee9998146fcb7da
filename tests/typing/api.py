"""What users write, for mypy to read. Never run."""

from collections.abc import Iterator
from typing import Any, assert_type

import torch

import holdfast
from holdfast import CheckpointError, ErrorKind, RankTimeoutError
from holdfast.activation import (
    AppliedPlan,
    CheckpointConfig,
    CheckpointedLayers,
    CheckpointManager,
    CheckpointStrategy,
    Fallback,
    MemoryStats,
    PeakReport,
    RecomputationEngine,
    RecomputationStats,
    measure_peak,
)
from holdfast.contracts import (
    Clock,
    Collectives,
    Coordinator,
    ObjectInfo,
    ObjectWriter,
    Operation,
    ReadRange,
    Storage,
)
from holdfast.coordination import SoloCoordinator, TimeoutHandler, TorchCoordinator
from holdfast.errors import ErrorRecord
from holdfast.resilience import (
    CheckpointRollbackManager,
    CircuitBreaker,
    CircuitState,
    FaultToleranceHandler,
    RetryBudget,
    RetryPolicy,
    SystemClock,
)
from holdfast.storage import MemoryStorage
from holdfast.testing import FakeClock, RankGang, RankOutcome, seeded_rng


def errors(error: CheckpointError, late: RankTimeoutError) -> None:
    assert_type(error.message, str)
    assert_type(error.path, str | None)
    assert_type(error.rank, int | None)
    assert_type(error.phase, str | None)
    assert_type(error.kind, ErrorKind)
    assert_type(error.transient, bool)
    assert_type(late.ranks, tuple[int, ...] | None)
    assert_type(late.timeout_s, float | None)
    timeout: TimeoutError = late
    record = ErrorRecord.of(timeout, rank=0, phase="write")
    assert_type(record.rebuild(), CheckpointError)
    missing: FileNotFoundError = holdfast.ObjectNotFoundError("none", path="a/b")
    unknown: KeyError = holdfast.CheckpointNotFoundError("none")
    raise missing from unknown


def storage(store: Storage) -> None:
    assert_type(store.url, str)
    assert_type(store.create("a", b"1"), ObjectInfo)
    assert_type(store.replace("a", memoryview(b"2"), expected="v1"), ObjectInfo)
    assert_type(store.read("a"), bytes)
    assert_type(store.stat("a").size_bytes, int)
    assert_type(store.list("step_100/"), Iterator[ObjectInfo])
    assert_type(store.free_bytes(), int | None)
    store.read_into("a", [ReadRange(start=0, into=memoryview(bytearray(4)))])
    store.delete("a")
    with store.open_writer("b") as writer:
        assert_type(writer, ObjectWriter)
        writer.write_at(0, b"1")
        assert_type(writer.finish(), ObjectInfo)


def ranks(coordinator: Coordinator) -> None:
    everyone: Collectives = coordinator
    everyone.barrier(timeout_s=5)
    assert_type(coordinator.gather(b"1", target=0), list[bytes] | None)
    assert_type(coordinator.all_gather(b"1"), list[bytes])
    assert_type(coordinator.broadcast(None, source=1), bytes)
    with coordinator.operation("save") as operation:
        assert_type(operation, Operation)
        with operation.phase("write"):
            operation.barrier()
    coordinator.close()


def coordinators() -> None:
    ranks(SoloCoordinator())
    ranks(TorchCoordinator())
    handler = TimeoutHandler(SoloCoordinator(), default_timeout_s=30)
    handler.barrier()
    handler.wait_for_rank(0, timeout_s=1.5)


def answer() -> int:
    return 42


async def answer_later() -> int:
    return 42


def make_bytes() -> bytes:
    return b""


async def make_bytes_later() -> bytes:
    return b""


def resilience(store: Storage, clock: Clock) -> None:
    policy = RetryPolicy(max_retries=5, deadline_s=60, retryable=(OSError, KeyError))
    assert_type(policy.is_retryable(OSError()), bool)
    handler = FaultToleranceHandler(store, policy, retry_budget=RetryBudget(), clock=clock)
    assert_type(handler.execute_with_retry(answer), int)
    assert_type(handler.execute_with_retry(lambda: store.read("a")), bytes)
    assert_type(handler.execute_with_timeout(answer, 5), int)
    handler.rollback("step_100")

    breaker = CircuitBreaker(failure_threshold=3, recovery_timeout_s=10, clock=SystemClock())
    assert_type(breaker.execute(answer, fallback=lambda: 0), int)
    assert_type(breaker.state, CircuitState)

    manager = CheckpointRollbackManager(FaultToleranceHandler(), store)
    assert_type(manager.save_with_rollback("model.bin", make_bytes), str)


async def resilience_async(store: Storage) -> None:
    handler = FaultToleranceHandler(store)
    assert_type(await handler.execute_with_retry_async(answer_later), int)
    assert_type(await handler.execute_with_timeout_async(answer_later, 5), int)
    await handler.rollback_async("step_100")
    assert_type(await CircuitBreaker().execute_async(answer_later), int)
    manager = CheckpointRollbackManager(handler, store)
    assert_type(await manager.save_with_rollback_async("model.bin", make_bytes_later), str)


def double(rank: int, base: int) -> str:
    return str(2 * base + rank)


def testing() -> None:
    resilience(MemoryStorage(), FakeClock())
    FaultToleranceHandler(clock=FakeClock(), rng=seeded_rng(7))
    storage(MemoryStorage())
    with RankGang(2) as gang:
        assert_type(gang.run(double, base=1), list[str])
        gang.start(double, 1)
        gang.kill(1)
        assert_type(gang.outcomes(timeout_s=5), list[RankOutcome])
        gang.run(double, "1")  # type: ignore[arg-type]


def mistakes(handler: FaultToleranceHandler) -> None:
    RetryPolicy(3)  # type: ignore[call-arg]
    handler.execute_with_retry(answer())  # type: ignore[arg-type]
    CheckpointError(path="a")  # type: ignore[call-arg]


def saved(handle: holdfast.SaveHandle) -> None:
    assert_type(handle.record, holdfast.SaveRecord | None)
    assert_type(handle.prefix, str | None)
    if handle.record is not None:
        assert_type(handle.record.stall_s, float)
        assert_type(handle.record.bytes_per_s, float)


async def awaited(handle: holdfast.SaveHandle) -> None:
    assert_type(await handle, str)


def checkpoints(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert_type(holdfast.save({"model": model, "step": 3}, "runs/a/step_3", overwrite=True), str)
    state: dict[str, object] = {"model": model, "step": 0}
    holdfast.load("runs/a/step_3", into=state)
    options = holdfast.CheckpointOptions(storage="runs/a")
    with holdfast.DistributedCheckpoint.create(options=options) as ckpt:
        how = holdfast.SaveOptions(
            checkpoint_prefix="step_3",
            format=holdfast.CheckpointFormat.CONSOLIDATED,
            compression_level=holdfast.CompressionLevel.NONE,
        )
        prefix = ckpt.save(model, optimizer, how, extra={"mine": holdfast.per_rank(3)})
        assert_type(prefix, str)
        handle = ckpt.save_async(model, optimizer, how, extra={"step": 3})
        assert_type(handle, holdfast.SaveHandle)
        handle.add_done_callback(saved)
        assert_type(handle.result(timeout=60), str)
        assert_type(handle.exception(), BaseException | None)
        assert_type(handle.progress(), holdfast.distributed.Progress | None)
        which = holdfast.LoadOptions(checkpoint_prefix=prefix)
        result = ckpt.load(model, optimizer, which, extra=state)
        assert_type(result, holdfast.CheckpointLoadResult)
        assert_type(result.was_resharded, bool)
        resumed = ckpt.resume(model, optimizer, extra=state)
        assert_type(resumed, holdfast.ResumeResult | None)
        if resumed is not None:
            assert_type(resumed.step, int | None)
            assert_type(resumed.passed_over, tuple[holdfast.distributed.PassedOver, ...])
            assert_type(resumed.loaded, holdfast.CheckpointLoadResult)
        assert_type(ckpt.list_checkpoints(), list[holdfast.CheckpointInfo])
        kept = holdfast.keep_last(3) | holdfast.keep_best("loss", 2, mode="max")
        assert_type(kept, holdfast.catalog.Retention)
        holdfast.CheckpointOptions(retention=kept | holdfast.keep_within(24))
        assert_type(ckpt.catalog.prune(kept, dry_run=True), holdfast.catalog.PruneReport)
        with holdfast.Preemption(ckpt, deadline_s=20, also=lambda: 30.0, every=10) as preemption:
            assert_type(preemption.requested(), bool)
            assert_type(preemption.remaining_s, float | None)
            assert_type(preemption.save(model, optimizer, how, extra={"step": 3}), str)
        ckpt.delete_checkpoint(prefix)


def activations(model: Any, x: Any) -> None:
    config = CheckpointConfig(strategy=CheckpointStrategy.INTERVAL, interval=2)
    with holdfast.checkpoint_layers(model, config) as layers:
        assert_type(layers, CheckpointedLayers)
        assert_type(layers.layers, tuple[str, ...])
        assert_type(layers.report(), str)
    with CheckpointManager(tier="disk") as manager, RecomputationEngine() as engine:
        holdfast.checkpoint(model, x, manager=manager, keep=lambda tensor: tensor.ndim > 1)
        assert_type(manager.get_memory_stats(), MemoryStats)
        engine.register_recompute_function("a", lambda: x, depends_on=("b",))
        assert_type(engine.get_stats(), RecomputationStats)
    report = measure_peak(model, x)
    assert_type(report, PeakReport)
    assert_type(report.peak_bytes, int)


def plans(model: Any, x: Any) -> None:
    plan = holdfast.plan(model, x, budget="1.5GiB", loss=lambda output: output.sum())
    assert_type(plan, holdfast.ActivationPlan)
    assert_type(plan.budget_bytes, int)
    assert_type(plan.report(width=80), str)
    plan.save_html("plan.html")
    with holdfast.ActivationPlan.from_json(plan.to_json()).applied(model) as applied:
        assert_type(applied, AppliedPlan)
        assert_type(applied.fallbacks, tuple[Fallback, ...])
    moving = holdfast.plan(model, (x,), 0.4, stages=["blocks.*"], tier="disk", folder="scratch")
    moving.apply(model).undo()
