"""How long steps and parts of them take. Knows the clock and that accelerators run behind it, not
what is timed."""

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from holdfast.activation._planning.sampling import Sample


def timed_step(model: Any, sample: Sample, device: Any) -> float:
    """The seconds of one step, without those of Python's garbage collector: one that happens to go
    through all there is would be taken for the cost of what was timed."""
    seconds: list[float] = []
    collects = gc.isenabled()
    gc.disable()
    try:
        with clocked(seconds, device):
            sample.step(model)
    finally:
        if collects:
            gc.enable()
    return seconds[0]


@contextlib.contextmanager
def clocked(seconds: list[float], device: Any) -> Iterator[None]:
    """Add the seconds that the block takes, until the device has done what it was told. Also of a
    block that raises: a replay is left that way once all is there."""
    _wait(device)
    began = time.perf_counter()
    try:
        yield
    finally:
        _wait(device)
        seconds.append(time.perf_counter() - began)


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
