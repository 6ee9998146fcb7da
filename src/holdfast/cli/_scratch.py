"""A place inside of a store for a verb that tries things out. Nothing of it is left."""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli._place import as_usage, path_of, real
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError
from holdfast.storage import open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """A new and empty place. ``folder`` is where on a disk it is, if it is on one."""

    url: str
    storage: Storage
    folder: Path | None


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there: a store need not be yet."""
    whole = real(path)
    return next(each for each in (whole, *whole.parents) if each.exists())


def is_memory(store: str) -> bool:
    """Whether it is ``memory://``, which is another one whenever it is opened."""
    return store.lower().startswith("memory://")


@contextlib.contextmanager
def scratch(store: str, purpose: str) -> Iterator[Scratch]:
    """Such a place, ``holdfast-<purpose>-...`` in the store, removed when the block ends, however
    it does. Only a process that is killed leaves it."""
    path = path_of(store)
    if path is not None:
        with tempfile.TemporaryDirectory(
            prefix=f"holdfast-{purpose}-", dir=nearest_folder(path)
        ) as own:
            yield Scratch(url=own, storage=open_storage(own), folder=Path(own))
        return
    if is_memory(store):
        with as_usage():
            own_memory = open_storage(store)  # nobody else has it
        yield Scratch(url=own_memory.url, storage=own_memory, folder=None)
        return
    scheme, _, rest = store.partition("://")
    name = f"holdfast-{purpose}-{secrets.token_hex(8)}"
    url = f"{scheme}://{'/'.join([*rest.strip('/').split('/'), name]).lstrip('/')}"
    with as_usage():
        open_storage(store)  # a URL without a bucket must not become one
        storage = open_storage(url)
    try:
        yield Scratch(url=url, storage=storage, folder=None)
    except BaseException:
        with contextlib.suppress(CheckpointError):  # the first one says what is wrong
            _empty(storage)
        raise
    _empty(storage)


def _empty(storage: Storage) -> None:
    for each in [*storage.list()]:
        storage.delete(each.key)
