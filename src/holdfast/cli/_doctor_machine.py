"""What this machine has: cores, memory, torch and what came with it, ranks. Imports no torch."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.cli._doctor_storage import Finding
from holdfast.cli._text import size

_RANKS: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GLOO: Final = "include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
_DRIVER: Final = Path("/proc/driver/nvidia/version")


def machine_findings() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    where = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return [
        Finding(what="machine", value=f"{cores} cores, {size(memory)} of memory, {where}"),
        _torch(),
        *_backends(),
        ranks(os.environ),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        advice = "checkpoints can be listed, verified and read as NumPy; saving models needs torch"
        return Finding(what="torch", value="not installed", verdict="warn", advice=advice)
    return Finding(what="torch", value=version)


def _backends() -> list[Finding]:
    """What ranks talk through: gloo, which is part of torch, and NCCL, which is a package."""
    if _version("torch") is None:
        return []
    folder = importlib.metadata.distribution("torch").locate_file("torch")
    gloo = Path(str(folder), _GLOO).exists()
    nccl = next((v for name in ("12", "13") if (v := _version(f"nvidia-nccl-cu{name}"))), None)
    found = [
        Finding(what="gloo", value="in torch")
        if gloo
        else Finding(
            what="gloo",
            value="not found",
            verdict="warn",
            advice="ranks on CPUs need a torch that was built with gloo",
        )
    ]
    driver = _DRIVER.exists()
    if not driver:
        return [*found, Finding(what="CUDA", value="no driver on this machine")]
    if nccl is None:
        advice = "there is a GPU, and this torch has no NCCL: install one built for CUDA"
        return [*found, Finding(what="CUDA", value="driver", verdict="warn", advice=advice)]
    return [*found, Finding(what="CUDA", value=f"driver, NCCL {nccl}")]


def ranks(environment: Mapping[str, str]) -> Finding:
    """Whether this process is a rank of a job, and whether the variables agree on it."""
    given = {name: environment[name] for name in _RANKS if name in environment}
    if not given:
        return Finding(what="ranks", value="not in a job")
    missing = [name for name in _RANKS if name not in given]
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    if missing:
        advice = f"{', '.join(missing)} is missing: start the job with torchrun"
        return Finding(what="ranks", value=told, verdict="bad", advice=advice)
    rank, world = given["RANK"], given["WORLD_SIZE"]
    if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
        advice = "RANK must be a number below WORLD_SIZE: start the job with torchrun"
        return Finding(what="ranks", value=told, verdict="bad", advice=advice)
    return Finding(what="ranks", value=told)
