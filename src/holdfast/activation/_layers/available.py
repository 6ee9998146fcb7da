"""How much memory a process can still have. Knows the system's files, not what memory is for."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import torch

_UNLIMITED_BYTES: Final = 1 << 60
"""The first version of cgroups says "no limit" with a number above this."""


def available_bytes(device: str) -> int | None:
    """What can still be allocated on ``device``, such as ``"cpu"`` or ``"cuda:0"``; ``None`` where
    nobody tells. What torch's CUDA allocator holds without using it counts as available."""
    if device == "cpu":
        return host_bytes()
    if not device.startswith("cuda"):
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)


def host_bytes(root: Path = Path("/")) -> int | None:
    """How much memory this process can still have without swapping, or without its container
    being stopped: the least that the machine and any control group around the process leave.
    ``root`` is where ``proc`` and ``sys`` are."""
    left = [*_machine(root), *_groups(root)]
    return max(0, min(left)) if left else None


def _machine(root: Path) -> Iterator[int]:
    kib = _table(root / "proc/meminfo").get("MemAvailable:")
    if kib is not None:
        yield kib * 1024


def _groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _left(root / "sys/fs/cgroup", group, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            yield from _left(mount, group, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _left(mount: Path, group: str, limit_file: str, used_file: str) -> Iterator[int]:
    # Inside a container the group's own folder is often not mounted: those around it still tell.
    name = PurePosixPath(group.lstrip("/"))
    for folder in (mount / name, *(mount / parent for parent in name.parents)):
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is None or used is None or limit >= _UNLIMITED_BYTES:
            continue
        yield limit - used + _given_back(_table(folder / "memory.stat"))


def _given_back(stat: dict[str, int]) -> int:
    """Cached files, which the system drops when memory is needed. Not shared memory."""
    # The first version of cgroups counts the groups inside only under this prefix.
    whole = "total_" if "total_active_file" in stat else ""
    return stat.get(f"{whole}active_file", 0) + stat.get(f"{whole}inactive_file", 0)


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """The lines of a file that are a name and a number."""
    words = (line.split() for line in _lines(path))
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
