"""What the numbers of a run depend on: the machine and the versions. Leaves out its name."""

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("holdfast", "torch", "safetensors", "numpy", "obstore", "orbax-checkpoint", "s3fs")


def machine_facts() -> dict[str, str]:
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "disk": _disk(Path.cwd()),
        "machine": f"{platform.system()} {_kernel()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _kernel() -> str:
    """Its version, without what a provider appends."""
    return platform.release().partition("-")[0]


def load() -> str:
    """How busy the machine is: processes that ran or waited for the disk in the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Of the sources that are measured. Changes of results are none of theirs."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "..", ":!results")
        return git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _disk(folder: Path) -> str:
    """The kind of file system that ``folder`` is on."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    found, length = "unknown", -1
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, where, kind, *_ = line.split(" ")
        if folder.is_relative_to(where) and len(where) > length:
            found, length = kind, len(where)
    return found
