"""The peak of a training step by meter, by profiler and by kernel, in a process of its own.

Run with the name of a case; prints JSON. The allocator must give memory back as soon as it is freed
(``MALLOC_MMAP_THRESHOLD_`` and ``MALLOC_TRIM_THRESHOLD_``), else the kernel's number means nothing.
"""

import ctypes
import json
import pathlib
import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from holdfast.activation._measuring.meter import measure_peak

BLOCKS, BATCH, WIDTH = 6, 2048, 256


def made():
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh()
        )
        for _ in range(BLOCKS)
    )
    return blocks, torch.randn(BATCH, WIDTH)


def step_of(blocks, x, *, checkpointed):
    def step():
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False) if checkpointed else block(h)
        h.square().mean().backward()

    return step


def by_profiler(step):
    """Sums over the allocations and frees of torch's CPU allocator, from any call and kernel."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    found = (e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]")
    level = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def status(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def by_kernel(step):
    """How far the resident memory of the process rose. ``None`` where it cannot be told."""
    try:
        trim = ctypes.CDLL("libc.so.6").malloc_trim
        trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        start = status("VmHWM")
        if start - status("VmRSS") > BATCH * WIDTH * 4:
            return None  # the mark is still that of the steps before
        step()
        return status("VmHWM") - start
    except (OSError, AttributeError, ValueError):
        return None


def main(case):
    torch.set_num_threads(1)
    blocks, x = made()
    step = step_of(blocks, x, checkpointed=case == "checkpointed")

    def fresh():
        for parameter in blocks.parameters():
            parameter.grad = None

    found = {}
    step()
    for name, measure in (
        ("kernel", by_kernel),
        ("meter", lambda step: measure_peak(step).peak_bytes),
        ("profiler", by_profiler),
    ):
        fresh()
        found[name] = measure(step)
    print(json.dumps(found))  # noqa: T201 -- to the test


if __name__ == "__main__":
    main(sys.argv[1])
