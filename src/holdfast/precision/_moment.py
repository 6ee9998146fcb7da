"""Trees of tensors as they were at one moment, though training goes on. Knows memory, and no file.

Nothing large is copied at first: the tensors are those of the optimizer, which says so before it
changes them, and then they are copied; so they are before anybody else sees them. Who only reads
them on the way to a disk needs no copy, which would cost as much time as the disk takes.
"""

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import torch

from holdfast.distributed._tensors import Like, has_memory, identity, is_distributed, local_of, wrap
from holdfast.distributed._units import Seen
from holdfast.errors import SaveError, TornSnapshotError

_SMALL_BYTES: Final = 64 * 1024
"""Up to here a tensor is copied at once: to look after it would cost more."""

_NAMED: Final = 5


@final
class Moment:
    """Trees by name. Thread-safe, if the optimizer changes nothing while it is made.

    What something else than the optimizer changes before it is copied is noticed as far as can be
    seen in no time (``Seen``), and then nothing of the moment can be had any more.
    """

    def __init__(self, trees: Mapping[str, Any], *, copies: bool) -> None:
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self._live: dict[str, tuple[torch.Tensor, Seen]] = {}
        self._problem: SaveError | None = None
        self._trees = _Copies(None if copies else self._keep).of_all(trees)

    def tree(self, name: str) -> Any:
        """One of the trees, in memory of its own."""
        self.copy()
        return self._sound()[name]

    def copy(self) -> None:
        """Copy what is not yet: it is about to be changed. Idempotent. That it cannot be copied is
        told to whoever wants it, and not to the training."""
        with self._lock:
            self._look()
            if self._live and self._problem is None:
                try:
                    self._trees = _Copies(None).of_all(self._trees)
                except (MemoryError, RuntimeError) as error:
                    self._problem = SaveError(
                        f"there was no memory to copy the checkpoint into ({error}); save before "
                        "the next step, which needs no copy"
                    )
            self._live.clear()

    @contextlib.contextmanager
    def held(self) -> Iterator[Mapping[str, Any]]:
        """All trees, to be read only and by this thread only. Whoever is about to change them
        waits. On another thread than that of the training it would be the training that waits, so
        there they are copied first."""
        if threading.get_ident() != self._thread:
            self.copy()
            yield self._sound()
            return
        with self._lock:
            self._look()
            yield self._sound()

    def _keep(self, place: str, tensor: torch.Tensor) -> bool:
        local = local_of(tensor)
        if local.nbytes > _SMALL_BYTES:
            self._live[place] = local, Seen.of(local)
        return place in self._live

    def _look(self) -> None:
        torn = [
            place
            for place, (tensor, seen) in self._live.items()
            if not has_memory(tensor) or Seen.of(tensor) != seen
        ]
        if torn:
            more = f" and {len(torn) - _NAMED} more" if len(torn) > _NAMED else ""
            self._problem = TornSnapshotError(
                f"{', '.join(torn[:_NAMED])}{more} changed after create_checkpoint, by something "
                "else than a step, before it was copied: the checkpoint is of no one moment. Save "
                'first, or make it with create_checkpoint(..., snapshot="copy")'
            )

    def _sound(self) -> Mapping[str, Any]:
        if self._problem is not None:
            raise self._problem
        return self._trees


class _Copies:
    """Copies of values, one for each tensor however often it is met: a layer that stays in FP32
    is its own master. ``keep`` says what need not be copied yet."""

    def __init__(self, keep: Callable[[str, torch.Tensor], bool] | None) -> None:
        self._keep = keep
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def of_all(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of(tree, name) for name, tree in trees.items()}

    def of(self, value: Any, place: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value, place)
        if isinstance(value, OrderedDict):
            return OrderedDict((key, self.of(v, f"{place}.{key}")) for key, v in value.items())
        if isinstance(value, Mapping):
            return {key: self.of(item, f"{place}.{key}") for key, item in value.items()}
        if type(value) in {list, tuple}:
            return type(value)(self.of(item, f"{place}.{nth}") for nth, item in enumerate(value))
        return copy.deepcopy(value)

    def _of_tensor(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        key = identity(tensor)
        if key not in self._known:
            is_kept = self._keep is not None and self._keep(place, tensor)
            self._known[key] = tensor if is_kept else _copy(tensor)
        return self._known[key]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    if not is_distributed(tensor):
        return local.to("cpu", copy=True)
    return wrap(local.clone(), Like.of(tensor), tuple(tensor.shape))
