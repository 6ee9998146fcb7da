"""What tests of ``save_async`` share: ways to hold a save at a known moment, trainings of many
kinds, and a comparison bit for bit."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from holdfast.coordination import SoloCoordinator
from holdfast.distributed import DistributedCheckpoint, LoadOptions
from holdfast.storage import LocalStorage
from holdfast.storage._wrapped import WrappedStorage

SOON_S = 60.0
MIB = 1024 * 1024


class Gate:
    """Holds whoever comes to it until it is opened, and lets the test wait for that."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        if not self._open.wait(SOON_S):
            raise TimeoutError("nobody opened the gate")

    def wait(self) -> None:
        assert self.reached.wait(SOON_S), "nobody came to the gate"

    def open(self) -> None:
        self._open.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


class Gates:
    """Gates by the name of an event, for the first time that it happens."""

    def __init__(self) -> None:
        self._gates: dict[str, Gate] = {}
        self._lock = threading.Lock()

    def at(self, event: str) -> Gate:
        gate = self._gates[event] = Gate()
        return gate

    def pass_by(self, event: str) -> None:
        with self._lock:
            gate = self._gates.pop(event, None)
        if gate is not None:
            gate()


class HeldStorage(WrappedStorage):
    """Events such as ``create intent``, ``write_at shard``, ``finish shard``, ``create record``."""

    def __init__(self, storage: Any, gates: Gates) -> None:
        super().__init__(storage)
        self._gates = gates

    def _through(self, method, key, call, /):
        self._gates.pass_by(f"{method} {_kind_of(key)}")
        return call()


def _kind_of(key: str | None) -> str:
    name = (key or "").rpartition("/")[2]
    for start, kind in (("intent-", "intent"), ("shard-", "shard"), ("model-", "shard")):
        if name.startswith(start):
            return kind
    return "record" if name == "metadata.json" else "other"


class HeldRanks:
    """One rank. The event ``save`` is before a save in the background looks at anything: all that
    is not copied by then is still live."""

    def __init__(self, gates: Gates) -> None:
        self._ranks = SoloCoordinator()
        self._gates = gates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    @contextlib.contextmanager
    def operation(self, name: str, timeout_s: float | None = None) -> Iterator[Any]:
        self._gates.pass_by(name)
        with self._ranks.operation(name, timeout_s) as operation:
            yield operation


@contextlib.contextmanager
def held(
    folder: Any, *, around: Callable[[Any], Any] = lambda storage: storage, **options: Any
) -> Iterator[tuple[DistributedCheckpoint, Gates]]:
    """A checkpointer and its gates. ``around`` wraps the storage further."""
    gates = Gates()
    storage = around(HeldStorage(LocalStorage(folder), gates))
    with DistributedCheckpoint(coordinator=HeldRanks(gates), storage=storage, **options) as ckpt:
        yield ckpt, gates


@dataclass(slots=True, kw_only=True)
class Training:
    """A model, its optimizers and what else there is, which is ``plain`` values only, or statefuls.
    ``also`` is done at the end of each step."""

    model: Any
    optimizer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    plain: bool = False
    also: Callable[[], object] = lambda: None
    forward: Callable[[], object] = lambda: None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        if self.optimizer is None:
            return []
        return [*self.optimizer.values()] if isinstance(self.optimizer, dict) else [self.optimizer]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.forward()
            for optimizer in self.optimizers():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = parameter.detach() * 0.5 + 0.1
                optimizer.step()
                optimizer.zero_grad()
            self.also()

    def content(self) -> Any:
        """A copy of everything that is saved, as it is now."""
        return copy.deepcopy(_plain([self.model, self.optimizer, self.extra]))

    def load(self, ckpt: DistributedCheckpoint, prefix: str) -> Any:
        """Load into this, and return what is then in it."""
        options = LoadOptions(checkpoint_prefix=prefix, load_rng_state=False)
        ckpt.load(self.model, self.optimizer, options, extra=self.extra or None)
        return self.content()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value


def require_same(found: Any, expected: Any, at: str = "state") -> None:
    """Bit for bit, and of the same types."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), at
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert torch.equal(_bits(found), _bits(expected)), at
    elif isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray), at
        native = expected.dtype.newbyteorder("=")
        assert (found.dtype, found.shape) == (native, expected.shape), at
        assert found.tobytes() == expected.astype(native).tobytes(), at
    elif isinstance(expected, Mapping):
        assert type(found) is type(expected) or isinstance(found, dict), at
        assert list(found) == list(expected), at
        for key, value in expected.items():
            require_same(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), at
        assert len(found) == len(expected), at
        for index, value in enumerate(expected):
            require_same(found[index], value, f"{at}.{index}")
    else:
        assert type(found) is type(expected), (at, found)
        assert found == expected or (found != found and expected != expected), at  # noqa: PLR0124


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def differs(found: Any, expected: Any) -> bool:
    try:
        require_same(found, expected)
    except AssertionError:
        return True
    return False


def net(seed: int = 1, width: int = 200) -> nn.Module:
    """Large enough that its weights are not copied at once."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(160, width), nn.ReLU(), nn.Linear(width, 160))


def adamw(seed: int = 1, **options: Any) -> Training:
    model = net(seed)
    return Training(model=model, optimizer=torch.optim.AdamW(model.parameters(), **options))
