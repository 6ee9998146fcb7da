"""How a save begins: rank 0 announces it in the storage, and the others see that they see it.

An incremental save is announced together with the checkpoint that it may refer to. Whoever deletes
that one takes its record away, and then looks for announcements; so the save looks for the record
after it is announced. Knows no tensors.
"""

import contextlib
import datetime as dt
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.catalog import Attempt, Catalog
from holdfast.catalog._committed import Found
from holdfast.catalog._model_index import check_index
from holdfast.catalog._names import attempt_of_intent, intent_name
from holdfast.contracts import Storage
from holdfast.distributed._options import CheckpointFormat, SaveOptions
from holdfast.distributed._seeing import seen_here
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    SaveError,
)

_log = logging.getLogger("holdfast.distributed")

_BASES: Final = 3
"""How many checkpoints are tried: each must have been deleted or replaced at that very moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A save that is announced, and the checkpoint that it may refer to, which stays until it is
    over."""

    attempt: Attempt
    base: Found | None


def announce(catalog: Catalog, options: SaveOptions, last: str | None) -> Announced:
    """Begin a save under the name that is given, or a new one.

    An incremental one may refer to the checkpoint ``last``, or to the newest if that is not there.
    One that cannot be read is passed over, and without any the save is like others.
    """
    bases = _bases(catalog, last) if options.incremental else iter(())
    for base in itertools.islice(bases, _BASES):
        attempt = _begin(catalog, options, _refers(base))
        try:
            now = _found(catalog, base.prefix)
            if now is not None and now.record.attempt == base.record.attempt:
                return Announced(attempt=attempt, base=now)
        except BaseException:
            attempt.abort()
            raise
        attempt.abort()
        _log.info("%s was deleted or replaced just now; not referred to", base.prefix)
    return Announced(attempt=_begin(catalog, options), base=None)


def _bases(catalog: Catalog, last: str | None) -> Iterator[Found]:
    """What a save may refer to, the best first, as far as it can be read."""
    found = None if last is None else _found(catalog, last)
    if found is not None:
        yield found
    try:
        listed = catalog.list()
    except CheckpointError as error:
        _log.warning("no checkpoint is referred to: %s", error)
        return
    for info in listed:
        found = _found(catalog, info.prefix)
        if found is not None:
            yield found


def _found(catalog: Catalog, prefix: str) -> Found | None:
    try:
        return catalog.find(prefix)
    except CheckpointNotFoundError:
        return None
    except CheckpointError as error:
        _log.warning("not referred to: %s", error)
        return None


def _refers(base: Found) -> tuple[str, ...]:
    """The folders of all its files: what it refers to itself is referred to where it is."""
    return tuple(sorted({file.prefix or base.prefix for file in base.record.files}))


def _begin(catalog: Catalog, options: SaveOptions, refers: Sequence[str] = ()) -> Attempt:
    if options.checkpoint_prefix is not None:
        prefix = options.checkpoint_prefix
        attempt = catalog.begin(prefix, overwrite=options.overwrite, refers=refers)
    else:
        attempt = _begin_new(catalog, refers)
    if options.format is CheckpointFormat.CONSOLIDATED:
        try:
            check_index(catalog.storage, attempt.intent.prefix)
        except BaseException:
            attempt.abort()
            raise
    return attempt


def look_for(storage: Storage, prefix: str, attempt: str, proceed: Callable[[], None]) -> None:
    """See what rank 0 announced: a root that is local to each host holds a part of everything."""
    if seen_here(storage, f"{prefix}/{intent_name(attempt)}", proceed) is None:
        raise SaveError(
            "this rank does not see what rank 0 wrote here: the storage is not the same on all "
            "hosts, and what was saved could not be loaded. Use one that all ranks share. Nothing "
            "was saved",
            path=f"{storage.url}/{prefix}",
        )


def _begin_new(catalog: Catalog, refers: Sequence[str]) -> Attempt:
    """Begin under a name that is made here, and that nobody uses. Of two jobs that make the same
    name at the same time, one goes on to the next."""
    made = f"checkpoint_{dt.datetime.now(dt.UTC):%Y%m%d_%H%M%S}"
    number = 1
    while True:
        prefix = made if number == 1 else f"{made}-{number}"
        number += 1
        if next(catalog.storage.list(f"{prefix}/"), None) is not None:
            continue
        with contextlib.suppress(CheckpointExistsError):
            attempt = catalog.begin(prefix, refers=refers)
            if attempt.intent.attempt == min(_attempts(catalog.storage, prefix)):
                return attempt
            attempt.abort()


def _attempts(storage: Storage, prefix: str) -> list[str]:
    found = (
        attempt_of_intent(info.key.removeprefix(f"{prefix}/"))
        for info in storage.list(f"{prefix}/intent-")
    )
    return [attempt for attempt in found if attempt is not None]
