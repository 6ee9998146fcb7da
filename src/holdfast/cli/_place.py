"""What a path or URL on the command line means: a store, or a checkpoint in one.

A path with a commit record in it is a checkpoint, any other a store. Where a checkpoint's store
begins matters to those that refer to others' files, and cannot be seen from a URL. On a disk the
lock file of the root says it. Elsewhere it is the folder above the checkpoint, or, if files that
the record names are not there, one further up; ``store//name`` says it outright.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from holdfast.catalog import Catalog, OpenCheckpoint
from holdfast.catalog._committed import Foreign, Found, look
from holdfast.catalog._names import is_own_name
from holdfast.catalog._stores import has_files
from holdfast.cli._exits import MisuseError, NothingThereError
from holdfast.cli._glance import glance
from holdfast.cli._text import say
from holdfast.contracts import COMMIT_RECORD
from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.resilience import RetryPolicy
from holdfast.storage import open_storage
from holdfast.storage._roots import ROOT_MARK, roots_above

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OF_A_CHECKPOINT: Final = (".safetensors", ".chunks")
PATIENCE: Final = RetryPolicy(max_retries=2, initial_delay_s=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store, and, if a checkpoint was named, its name there and its record if that can be read.
    ``sure`` if it is known, and not only likely, where the store begins. ``inside`` is the store
    that this one is only a folder of, by the lock file above it."""

    catalog: Catalog
    name: str | None = None
    found: Found | None = None
    sure: bool = True
    inside: str | None = None


def path_of(text: str) -> Path | None:
    """The path that a text means, or ``None`` if it is the URL of a storage that is no disk."""
    scheme = _URL.match(text)
    if scheme is not None and scheme[0].lower() != "file://":
        return None
    with as_usage():
        open_storage(text)  # refuses 's3:/bucket', 'file://host/run' and the like
    return Path(text).expanduser() if scheme is None else Path(unquote(urlsplit(text).path))


def real(path: Path) -> Path:
    """The path without links. One whose links lead in circles stays as it is, and is not there."""
    return Path(os.path.realpath(path))


def said_store(text: str) -> Path | None:
    """The store on a disk that ``store//name`` says outright."""
    plain = unquote(urlsplit(text).path) if _URL.match(text) else text  # a Path has no '//'
    store, slashes, name = plain.rstrip("/").partition("//")
    return real(Path(store).expanduser()) if store and slashes and name else None


def check_folder(file: Path) -> None:
    """``NothingThereError`` unless there is a folder to write that file in."""
    if not file.parent.is_dir():
        raise NothingThereError("there is no such folder", path=str(file.parent))


def find_place(text: str) -> Place:
    """What ``text`` means. ``NothingThereError`` if it is a path to nothing."""
    path = path_of(text)
    if path is not None:
        return _on_disk(text, path)
    scheme, _, rest = text.partition("://")
    return _in_bucket(f"{scheme}://", rest)


def find_store(text: str, *, whole: bool = False) -> Catalog:
    """The store at ``text``, for verbs that look after all of one. Those that delete want a
    ``whole`` one: from a folder inside of it they would not see who refers to its files."""
    place = find_place(text)
    if whole and place.inside is not None:
        raise MisuseError(f"{text} is a folder inside of the store {place.inside}; give that one")
    if place.name is not None:
        raise MisuseError(
            f"{text} is a checkpoint; this verb takes a store, as {place.catalog.storage.url}"
        )
    return place.catalog


def find_checkpoint(text: str) -> tuple[Catalog, str]:
    """The checkpoint at ``text``, or the newest of the store there."""
    place = find_place(text)
    return place.catalog, place.name if place.name is not None else newest(place.catalog)


def open_checkpoint(text: str) -> OpenCheckpoint:
    """As ``find_checkpoint``, open for reading."""
    place = find_place(text)
    if place.found is not None:
        return OpenCheckpoint(place.catalog.storage, place.found)
    return place.catalog.open(place.name if place.name is not None else newest(place.catalog))


def newest(catalog: Catalog) -> str:
    """The name of the newest checkpoint that can be read."""
    scan = glance(catalog)
    for each in scan.unreadable:
        say(f"passed over, as it cannot be read: {each.error}")
    if scan.infos:
        return scan.infos[0].prefix
    if scan.unreadable:
        raise CorruptedError("no checkpoint here can be read", path=catalog.storage.url)
    raise nothing_in(catalog)


def nothing_in(catalog: Catalog) -> NothingThereError:
    return NothingThereError("there are no checkpoints here", path=catalog.storage.url)


def _on_disk(text: str, path: Path) -> Place:
    path = real(path)
    if path.is_file():
        if path.name != COMMIT_RECORD and not path.name.endswith(_OF_A_CHECKPOINT):
            raise NothingThereError("this is a file, and no part of a checkpoint", path=text)
        path = path.parent
        if not (path / COMMIT_RECORD).exists():
            raise NothingThereError(
                "this file is of no checkpoint: there is no commit record beside it", path=text
            )
    elif not path.exists():
        raise NothingThereError("there is no such file or folder", path=text)
    if (path / ROOT_MARK).exists() or path == path.parent:
        return Place(catalog=catalog_at(str(path)))
    marked = [*roots_above(path)]
    said = said_store(text)
    # Slashes are doubled by accident, too, and a lock file is not: it counts if it is the only one.
    roots = marked if said is None or len(marked) == 1 else [said, *marked]
    tried = [root for root in (*roots, *path.parents) if path.is_relative_to(root)]
    names = [(str(root), path.relative_to(root).as_posix()) for root in tried]
    found = _settled(names, sure=len(marked) == 1 or said is not None)
    inside = str(marked[0]) if marked else None
    return found or Place(catalog=catalog_at(str(path)), inside=inside)


def _in_bucket(scheme: str, rest: str) -> Place:
    bucket, _, key = rest.rstrip("/").partition("/")
    store, explicit, name = key.partition("//")
    if explicit:
        return _settled([(f"{scheme}{bucket}/{store}", name)], sure=True) or Place(
            catalog=catalog_at(f"{scheme}{bucket}/{store}"), name=name
        )
    parts = key.split("/") if key else []
    names = [
        (f"{scheme}{bucket}/{'/'.join(parts[:cut])}", "/".join(parts[cut:]))
        for cut in range(len(parts) - 1, -1, -1)
    ]
    found = _settled(names, sure=False) if names else None
    return found or Place(catalog=catalog_at(f"{scheme}{bucket}/{key}"))


def catalog_at(root: str) -> Catalog:
    with as_usage():
        return Catalog(root, retry_policy=PATIENCE)


@contextlib.contextmanager
def as_usage() -> Iterator[None]:
    """What cannot be a storage, or a name in one, was typed by somebody."""
    try:
        yield
    except ValueError as error:
        raise MisuseError(str(error)) from error


def _settled(names: Sequence[tuple[str, str]], *, sure: bool) -> Place | None:
    """The checkpoint that has these names in these stores, or ``None`` if it is none: in the first
    store that has all files which its record names, or if that is none, the first."""
    catalog, name = catalog_at(names[0][0]), names[0][1]
    first = Place(catalog=catalog, name=name, sure=sure)
    try:
        with as_usage():
            found = look(catalog.storage, name)
    except (CorruptedError, IncompatibleVersionError):
        return first  # the verb says what is wrong with it
    if isinstance(found, Foreign):
        below = (each.key.removeprefix(f"{name}/") for each in catalog.storage.list(f"{name}/"))
        return first if any(is_own_name(key) for key in below) else None
    if found is None or not found.is_committed:
        return None if found is None else first
    for root, other in names:
        here = catalog_at(root)
        if has_files(here.storage, found):
            return Place(catalog=here, name=other, found=replace(found, prefix=other), sure=sure)
    return replace(first, found=found)
