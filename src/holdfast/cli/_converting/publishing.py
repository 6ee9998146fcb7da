"""Puts a file or a folder on a disk under its name only when it is whole. Knows no format.

Until then it has a hidden name beside its own, ``.<name>.<digits>.part``, which is removed when
writing fails or is interrupted. Only a process that is killed leaves it.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from holdfast.cli._place import check_folder
from holdfast.errors import CheckpointExistsError, NoSpaceError, StorageError

_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def check_free(target: Path, *, overwrite: bool, folder: bool, known: tuple[str, ...] = ()) -> None:
    """Refuse a target that is taken, before anything is written. A folder is replaced only if all
    of its files end with something ``known``: what else is there is not ours to delete."""
    check_folder(target)
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise _exists(target)
    if target.is_dir() is not folder or not (folder or target.is_file()):
        raise StorageError(
            f"there is {_kind(target)} of this name, which is not replaced", path=str(target)
        )
    if folder:
        others = sorted(e.name for e in target.iterdir() if not e.name.endswith(known))
        if others:
            raise StorageError(
                f"this folder is not replaced, as it has {', '.join(others[:3])}, too; remove it "
                "or give another name",
                path=str(target),
            )


@contextlib.contextmanager
def new_file(target: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A file that is ``target`` once the block ends, durably, and nothing if it raises."""
    part = _part_of(target)
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            part.replace(target)
        else:
            _put(part, target)
    except BaseException as error:
        part.unlink(missing_ok=True)
        _tell_full(error, target)
        raise
    sync_folder(target.parent)


@contextlib.contextmanager
def new_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder that is ``target`` once the block ends. What is written in it must be durable. One
    that is replaced is moved aside for a moment, to a hidden name, and removed."""
    part = _part_of(target)
    aside = None
    try:
        part.mkdir()
        yield part
        sync_folder(part)
        if overwrite and target.exists():
            aside = target.rename(_part_of(target))
        elif os.path.lexists(target):
            raise _exists(target)  # noqa: TRY301 -- removes the part, as any error
        part.rename(target)
    except BaseException as error:
        if aside is not None and not target.exists():
            aside.rename(target)
        shutil.rmtree(part, ignore_errors=True)
        _tell_full(error, target)
        raise
    sync_folder(target.parent)
    if aside is not None:
        shutil.rmtree(aside)


def _tell_full(error: BaseException, target: Path) -> None:
    """Raise what a disk that is full means, if the error is that."""
    if isinstance(error, OSError) and error.errno in _FULL:
        raise NoSpaceError(
            f"there is no room for it ({error.strerror}); nothing of it was left", path=str(target)
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _put(part: Path, target: Path) -> None:
    """In one step, and only if nothing is there."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise _exists(target) from None
        part.rename(target)
    else:
        part.unlink()


def _kind(target: Path) -> str:
    if target.is_dir():
        return "a folder"
    if target.is_symlink():
        return "a link"
    return "a file" if target.is_file() else "a device"


def _part_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")


def _exists(target: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        "this is there already; nothing was written. Choose another name, or give --overwrite",
        path=str(target),
    )
