"""Saves and loads on ranks, one of which comes to harm at a moment that a test names.

Everything a rank does passes by a ``Trap`` as an event with a name: the calls of its storage, the
collectives of its operations, the methods of a stateful, the words of a progress callback, a
checker. The trap does its deed at one of them.
"""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.catalog import Catalog
from holdfast.coordination import SoloCoordinator, TorchCoordinator
from holdfast.distributed import (
    CheckpointValidator,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    per_rank,
)
from holdfast.errors import CheckpointError
from holdfast.resilience import FaultToleranceHandler, RetryPolicy
from holdfast.storage import LocalStorage, retrying
from holdfast.storage._wrapped import WrappedStorage
from holdfast.testing import Fault, FaultyStorage, seeded_rng

LIVENESS_S = 5.0  # a busy machine keeps a rank that runs waiting for seconds, too
TIMEOUT_S = 60.0
LATE_S = LIVENESS_S * 1.5
NAP_S = 0.5
EARLY_S = 4.0  # its time is over first, on a busy machine too
NOISE_BYTES = 4000
PARTS = 6
PART_ROWS = 999
PART_COLUMNS = 3000
# Not before it sleeps: it would then never be woken.
WAKER = """
until grep -qs '^State:.T' /proc/$1/status; do [ -d /proc/$1 ] || exit; sleep 0.02; done
sleep $2
kill -CONT $1
"""
NONE: Mapping[int, Sequence[Fault]] = {}
IN_NO_TIME = RetryPolicy(max_retries=8, initial_delay_s=0.01, max_delay_s=0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """What befalls one rank, and at which of its events. ``target``, if it is another rank than
    the one at whose event it happens. The moment is written to the file ``log``."""

    kind: str
    event: str
    rank: int
    log: Path
    nth: int = 1
    after_s: float = 0.0
    target: int | None = None


class Trap:
    """Does the harm at its event, once. Thread-safe."""

    def __init__(self, harm: Harm | None, pids: list[int]) -> None:
        self._harm = harm
        self._pids = pids
        self._lock = threading.Lock()
        self._seen = 0
        self.hanging = False

    def __call__(self, event: str) -> None:
        harm = self._harm
        if harm is None or event != harm.event:
            return
        with self._lock:
            self._seen += 1
            if self._seen != harm.nth:
                return
        if harm.after_s:
            threading.Timer(harm.after_s, self._act, (harm,)).start()
        else:
            self._act(harm)

    def _act(self, harm: Harm) -> None:
        harm.log.write_text(repr(time.monotonic()))
        self.hanging = harm.kind == "hang"
        act(harm.kind, self._pids[harm.rank if harm.target is None else harm.target])


def act(kind: str, pid: int) -> None:
    if kind == "raise":
        raise ZeroDivisionError("on purpose")
    if kind == "kill":
        os.kill(pid, signal.SIGKILL)
    if kind == "nap":
        subprocess.Popen(["/bin/sh", "-c", WAKER, "waker", str(pid), str(NAP_S)])
    if kind in ("stop", "wake", "nap"):
        os.kill(pid, signal.SIGSTOP)
    if kind == "slow":
        time.sleep(LATE_S)


class TrappedStorage(WrappedStorage):
    """Events such as ``create record before`` and ``finish shard after``. One that hangs answers
    no call any more."""

    def __init__(self, storage: Any, trap: Trap) -> None:
        super().__init__(storage)
        self._trap = trap

    def _through(self, method, key, call, /):
        kind = kind_of(key)
        self._trap(f"{method} {kind} before")
        if self._trap.hanging:
            time.sleep(TIMEOUT_S)
        result = call()
        self._trap(f"{method} {kind} after")
        return result


def kind_of(key: str | None) -> str:
    name = (key or "").rpartition("/")[2]
    for start, kind in (("intent-", "intent"), ("shard-", "shard"), ("model-", "shard")):
        if name.startswith(start):
            return kind
    return "record" if name == "metadata.json" else "other"


class TrappedOperation:
    """Events such as ``commit gather after``: the phase, the collective."""

    def __init__(self, operation: Any, name: str, trap: Callable[[str], None]) -> None:
        self._operation = operation
        self._phase = name
        self._trap = trap

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._operation, name)
        if name not in ("barrier", "broadcast", "gather", "all_gather"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            event = f"{self._phase} {name}"
            self._trap(f"{event} before")
            result = found(*args, **kwargs)
            self._trap(f"{event} after")
            return result

        return call

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._operation.phase(name):
            before, self._phase = self._phase, name
            try:
                yield
            finally:
                self._phase = before


def listen(coordinator: TorchCoordinator, trap: Callable[[str], None]) -> None:
    """Have the trap hear of every collective. The bulk transfer wants a real TorchCoordinator, so
    this one gets another ``operation`` instead of being wrapped."""
    real = coordinator.operation

    @contextlib.contextmanager
    def operation(name: str, timeout_s: float | None = None) -> Iterator[TrappedOperation]:
        with real(name, timeout_s) as found:
            yield TrappedOperation(found, name, trap)

    coordinator.operation = operation  # type: ignore[method-assign]


class Loader:
    """A stateful of the user's: events ``state_dict`` and ``load_state_dict``."""

    def __init__(self, seed: int, trap: Callable[[str], None]) -> None:
        self._at = seed
        self._order = torch.randperm(50, generator=torch.Generator().manual_seed(seed))
        self._trap = trap

    def state_dict(self) -> dict[str, Any]:
        self._trap("state_dict")
        return {"at": self._at, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]
        self._trap("load_state_dict")
        self._order = state["order"].clone()

    def content(self) -> dict[str, Any]:
        return {"at": self._at, "order": self._order}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a small training, a function of its seed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    extra: dict[str, Any]

    def digest(self) -> str:
        """Bit for bit all of it, but for what is each rank's own."""
        seen = hashlib.sha256()
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.extra["step"],
            "noise": self.extra["noise"],
            "loader": self.extra["loader"].content(),
        }
        feed(seen, content)
        return seen.hexdigest()

    def own(self) -> bytes:
        mine = self.extra["mine"]
        mine = getattr(mine, "value", mine)
        return mine.numpy().tobytes()


def feed(seen: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        seen.update(f"{value.dtype} {tuple(value.shape)}".encode())
        seen.update(value.detach().contiguous().view(-1).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            seen.update(repr(key).encode())
            feed(seen, item)
    elif isinstance(value, list | tuple):
        for item in value:
            feed(seen, item)
    else:
        seen.update(repr(value).encode())


def nothing(_event: str) -> None: ...


def state_of(
    seed: int,
    rank: int = 0,
    trap: Callable[[str], None] = nothing,
    *,
    saving: bool = True,
    noise_bytes: int = NOISE_BYTES,
) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 + seed)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()
    mine = torch.full((64,), (seed * 7 + rank) % 251, dtype=torch.uint8)
    extra = {
        "step": seed,
        "noise": torch.rand(noise_bytes // 4),
        "loader": Loader(seed, trap),
        "mine": per_rank(mine) if saving else mine,
    }
    return State(model=model, optimizer=optimizer, extra=extra)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a save or load ended on a rank, and when."""

    at_s: float
    value: Any = None
    error: str | None = None
    rank: int | None = None
    phase: str | None = None
    text: str = ""
    same: bool | None = None
    """Of a load: whether the state is bit for bit as before."""


def ended_with(error: BaseException, *, same: bool | None = None, value: Any = None) -> Ended:
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return Ended(
        at_s=time.monotonic(),
        value=value,
        error=type(error).__name__,
        rank=getattr(error, "rank", None),
        phase=getattr(error, "phase", None),
        text=text if isinstance(error, CheckpointError) else f"not ours: {error!r}",
        same=same,
    )


@contextlib.contextmanager
def checkpointer(
    folder: Path,
    harm: Harm | None,
    rank: int,
    *,
    faults: Mapping[int, Sequence[Fault]] | int = NONE,
    lease_s: float = 600.0,
) -> Iterator[tuple[DistributedCheckpoint, Trap]]:
    """A checkpointer on this rank and its trap. ``faults`` are those of the storages by rank, or
    the seed of a storage that fails now and then."""
    with TorchCoordinator(liveness_timeout_s=LIVENESS_S, timeout_s=TIMEOUT_S) as ranks:
        pids = [int(each) for each in ranks.all_gather(str(os.getpid()).encode())]
        trap = Trap(harm if harm is not None and harm.rank == rank else None, pids)
        listen(ranks, trap)
        storage: Any = TrappedStorage(LocalStorage(folder), trap)
        if isinstance(faults, int):
            storage = FaultyStorage(storage, rng=seeded_rng(faults + rank), error_rate=0.1)
        elif rank in faults:
            storage = FaultyStorage(storage, faults[rank])
        storage = retrying(storage, IN_NO_TIME)
        catalog = Catalog(storage, retry_policy=IN_NO_TIME, lease_s=lease_s)
        validator = CheckpointValidator(catalog, [TrappedChecker(trap)])
        handler = FaultToleranceHandler(catalog, IN_NO_TIME)
        with DistributedCheckpoint(
            coordinator=ranks, storage=catalog, validator=validator, fault_handler=handler
        ) as ckpt:
            yield ckpt, trap


class TrappedChecker:
    """The event ``checker``."""

    name = "the trap"

    def __init__(self, trap: Callable[[str], None]) -> None:
        self._trap = trap

    def check(self, checkpoint: Any) -> tuple[()]:
        self._trap("checker")
        return ()


def telling(trap: Callable[[str], None]) -> Callable[[Any], None]:
    """A progress callback: events ``progress agree``, at each phase's first word."""
    heard: set[str] = set()

    def tell(progress: Any) -> None:
        if progress.phase not in heard:
            heard.add(progress.phase)
            trap(f"progress {progress.phase}")

    return tell


def save_job(
    rank: int,
    folder: Path,
    harm: Harm | None = None,
    *,
    prefix: str = "next",
    seed: int = 2,
    faults: Mapping[int, Sequence[Fault]] | int = NONE,
    lease_s: float = 600.0,
    noise_bytes: int = NOISE_BYTES,
    early: int | None = None,
    **options: Any,
) -> Ended:
    """``early``: a rank that comes well before the others."""
    with checkpointer(folder, harm, rank, faults=faults, lease_s=lease_s) as (ckpt, trap):
        if early is not None and rank != early:
            time.sleep(EARLY_S)
        state = state_of(seed, rank, trap, noise_bytes=noise_bytes)
        chosen = SaveOptions(checkpoint_prefix=prefix, progress=telling(trap), **options)
        try:
            value = ckpt.save(state.model, state.optimizer, chosen, extra=state.extra)
        except BaseException as error:
            return ended_with(error)
        return Ended(at_s=time.monotonic(), value=value)


def load_job(
    rank: int,
    folder: Path,
    harm: Harm | None = None,
    *,
    prefix: str = "previous",
    seed: int = 1000,
    faults: Mapping[int, Sequence[Fault]] | int = NONE,
    noise_bytes: int = NOISE_BYTES,
    **options: Any,
) -> Ended:
    with checkpointer(folder, harm, rank, faults=faults) as (ckpt, trap):
        state = state_of(seed, rank, trap, saving=False, noise_bytes=noise_bytes)
        torch.manual_seed(rank)
        random.seed(rank)
        before = (state.digest(), state.own(), generators())
        chosen = LoadOptions(checkpoint_prefix=prefix, progress=telling(trap), **options)
        try:
            ckpt.load(state.model, state.optimizer, chosen, extra=state.extra)
        except BaseException as error:
            after = (state.digest(), state.own(), generators())
            return ended_with(error, same=after == before, value=state.digest())
        return Ended(at_s=time.monotonic(), value=state.digest())


def generators() -> tuple[bytes, Any]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def send_job(
    rank: int, folder: Path, harm: Harm | None = None, *, seed: int = 2, **options: Any
) -> Ended:
    """Save tensors that lie in parts on all ranks as whole ones, which rank 0 writes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {
        name: DTensor.from_local(torch.from_numpy(mine), mesh, [Shard(0)])
        for name, whole in parts_of(seed).items()
        for mine in [np.array_split(whole, mesh.size())[rank]]
    }
    with checkpointer(folder, harm, rank) as (ckpt, _):
        try:
            value = ckpt.save_model_only(model, SaveOptions(checkpoint_prefix="next", **options))
        except BaseException as error:
            return ended_with(error)
        return Ended(at_s=time.monotonic(), value=value)


def parts_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (PART_ROWS, PART_COLUMNS)
    return {f"part{n}": rng.random(shape, dtype=np.float32) for n in range(PARTS)}


def load_alone(folder: Path, prefix: str) -> State:
    """Load a checkpoint of several ranks in this process, as its rank 0."""
    state = state_of(555, saving=False)
    with DistributedCheckpoint(coordinator=SoloCoordinator(), storage=folder) as ckpt:
        options = LoadOptions(checkpoint_prefix=prefix, load_rng_state=False, remap=lambda *_: 0)
        ckpt.load(state.model, state.optimizer, options, extra=state.extra)
    return state
