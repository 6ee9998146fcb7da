"""What the disk under a folder can do: its filesystem, direct I/O, syncs, bandwidth, room."""

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.cli._doctor_storage import Finding, bandwidth, promises
from holdfast.cli._scratch import nearest_folder, scratch
from holdfast.cli._text import size
from holdfast.errors import CheckpointError
from holdfast.storage._system import System

_GIB: Final = 1024**3
MEMORY: Final = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK: Final = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "beegfs", "gpfs"}
_SYNCS: Final = 20
_TOO_FAST_S: Final = 30e-6
_SLOW_S: Final = 0.05


def disk_findings(folder: Path, nbytes: int) -> list[Finding]:
    """Try things out in a new folder inside of ``folder``, or of the nearest one above it that is
    there."""
    nearest = nearest_folder(folder)
    try:
        room = shutil.disk_usage(nearest).free
        kind = filesystem(nearest, Path("/proc/self/mountinfo"))
        findings = [_told_filesystem(kind), _told_room(room)]
        if room < 2 * nbytes:
            return findings
        with scratch(str(nearest), "doctor") as own:
            inside = own.folder or nearest
            findings += [_direct(inside), _syncs(inside, in_memory=kind in MEMORY)]
            findings += promises(own.storage)
            findings += bandwidth(own.storage, nbytes, slow=200e6)
    except (OSError, CheckpointError) as error:
        advice = "give a folder that this user may write to"
        return [Finding(what="disk", value=str(error), verdict="bad", advice=advice)]
    return findings


def filesystem(path: Path, mounts: Path) -> str:
    """The type of the filesystem a path is on, by the kernel's list of mounts."""
    if not mounts.exists():
        return "unknown"
    best, kind = Path(), "unknown"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) < 5 or not after:  # noqa: PLR2004 -- the mount point is the fifth
            continue
        point = Path(words[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, after.split()[0]
    return kind


def _told_filesystem(kind: str) -> Finding:
    if kind in MEMORY:
        advice = "this is memory: what is saved here is gone after a restart"
    elif kind == "overlay":
        advice = "a container's own layer: what is saved here goes with it; mount a volume"
    elif kind in _NETWORK or kind.startswith("fuse"):
        advice = "a network disk: what a sync promises is up to its server"
    else:
        return Finding(what="filesystem", value=kind)
    return Finding(what="filesystem", value=kind, verdict="warn", advice=advice)


def _told_room(free: int) -> Finding:
    verdict, advice = "ok", ""
    if free < 10 * _GIB:
        advice = "make room, or prune: a save needs room for one checkpoint more than stay"
        verdict = "warn" if free > _GIB else "bad"
    return Finding(what="free space", value=size(free), verdict=verdict, advice=advice)  # type: ignore[arg-type]


def _direct(folder: Path) -> Finding:
    """Whether files can be opened past the page cache, as large ones are."""
    system = System()
    at = system.open_root(str(folder))
    try:
        fd, direct = system.create_file("direct", at, direct=True)
        system.close(fd)
        system.unlink("direct", at)
    finally:
        system.close(at)
    if direct:
        return Finding(what="direct I/O", value="yes")
    advice = "saves go through the page cache: they work, and take memory and some speed"
    return Finding(what="direct I/O", value="no", verdict="warn", advice=advice)


def _syncs(folder: Path, *, in_memory: bool) -> Finding:
    """How long a small durable write takes. One that is faster than a disk can be is not."""
    seconds = statistics.median(_synced(folder))
    value = f"{seconds * 1e3:.3f} ms"
    if seconds < _TOO_FAST_S and not in_memory:
        advice = "faster than disks are: a power cut may lose what was synced; ask about its cache"
        return Finding(what="fsync", value=value, verdict="warn", advice=advice)
    if seconds > _SLOW_S:
        advice = "slow: many small files will be, too; save less often or to another disk"
        return Finding(what="fsync", value=value, verdict="warn", advice=advice)
    return Finding(what="fsync", value=value)


def _synced(folder: Path) -> Iterator[float]:
    fd = os.open(folder / "sync", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for nth in range(_SYNCS):
            os.pwrite(fd, os.urandom(4096), nth * 4096)
            begun = time.monotonic()
            os.fsync(fd)
            yield time.monotonic() - begun
    finally:
        os.close(fd)
