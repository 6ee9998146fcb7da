"""Stops every torch optimizer before it steps, while snapshots are being taken.

There is one hook for the whole process, put in place with the first snapshot and never removed:
torch walks through its hooks without a lock, so that removing one from another thread could end
somebody's training. While there is no snapshot it does nothing.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from holdfast.distributed._snapshot import Kept, Snapshot
from holdfast.distributed._tensors import home
from holdfast.distributed._units import Span

_lock = threading.Lock()
_watched: tuple[Snapshot, ...] = ()
_is_in_place = False
_steps = 0


def watch(snapshot: Snapshot) -> None:
    """Have it frozen before any optimizer steps, from now on."""
    global _watched, _is_in_place  # noqa: PLW0603 -- torch's hooks are the process's, too
    with _lock:
        if not _is_in_place:
            register_optimizer_step_pre_hook(_before_step)
            os.register_at_fork(after_in_child=_forget)
            _is_in_place = True
        _watched = (*_watched, snapshot)


def start_copying(snapshot: Snapshot, needed: Mapping[Kept, Sequence[Span]] | None) -> None:
    """Copy in the background what optimizers may change, and then let them step as they like.
    ``needed`` are the bytes that are wanted, ``None`` being all."""
    if needed is not None:
        snapshot.needs(needed)

    def copy() -> None:
        snapshot.copy_all()
        if not snapshot.has_still:  # which an optimizer that was not given may be about to change
            unwatch(snapshot)

    threading.Thread(target=copy, name="holdfast-copy", daemon=True).start()


def unwatch(snapshot: Snapshot) -> None:
    """Let optimizers step as they like. Idempotent."""
    global _watched  # noqa: PLW0603
    with _lock:
        _watched = tuple(each for each in _watched if each is not snapshot)


def _forget() -> None:
    """In a process that was forked nobody saves, and nobody would ever copy what is left."""
    global _watched, _lock
    _watched, _lock = (), threading.Lock()


def steps_seen() -> int:
    """How many steps optimizers have taken, all of them together, since the first snapshot."""
    return _steps


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    global _steps  # noqa: PLW0603
    _steps += 1
    for snapshot in _watched:
        snapshot.freeze(map(home, _parameters(optimizer)) if snapshot.has_still else ())


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]
