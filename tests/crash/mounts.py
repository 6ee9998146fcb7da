"""Small filesystems of our own, mounted for a test and gone after it. Needs root."""

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHUTDOWN = 0x8004587D
_WITHOUT_LOG_FLUSH = 2


@contextlib.contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    """``mount`` with these options, or skip with the reason why not."""
    if os.geteuid() != 0:
        pytest.skip("mounts a small filesystem, which only root may: run the tests as root")
    if shutil.which("mount") is None:
        pytest.skip("mounts a small filesystem, and there is no mount program here: install it")
    where.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *options, str(where)], capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode != 0:
        pytest.skip(
            "mounts a small filesystem, which is not allowed here, as in most containers "
            f"(mount says: {done.stderr.strip()})"
        )
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], timeout=30, check=True)


@contextlib.contextmanager
def small_memory(where: Path, size: str, *more: str) -> Iterator[Path]:
    options = ",".join([f"size={size}", "mode=700", *more])
    with mounted(where, "-t", "tmpfs", "-o", options, "tmpfs") as path:
        yield path


class Ext4:
    """An ext4 filesystem in a file, on a loop device while it is mounted."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("makes an ext4 filesystem, and mkfs.ext4 is missing: install e2fsprogs")
        self._image = folder / "ext4.img"
        self._where = folder / "ext4"
        with self._image.open("wb") as file:
            file.truncate(size_bytes)
        subprocess.run(
            ["mkfs.ext4", "-q", "-F", str(self._image)],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip

    @contextlib.contextmanager
    def mounted(self, options: str = "loop") -> Iterator[Path]:
        with mounted(self._where, "-t", "ext4", "-o", options, str(self._image)) as path:
            yield path


def cut_power(path: Path) -> None:
    """Stop the filesystem at once, and lose what it holds in memory, its journal's tail too.

    On an ext4 that is mounted this is as near to pulling the plug as software comes.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
    finally:
        os.close(fd)
