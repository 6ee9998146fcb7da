"""How a save begins: rank 0 announces it in the storage, and the others see that they see it."""

import contextlib
import datetime as dt
from collections.abc import Callable

from holdfast.catalog import Attempt, Catalog
from holdfast.catalog._model_index import check_index
from holdfast.catalog._names import attempt_of_intent, intent_name
from holdfast.contracts import Storage
from holdfast.distributed._options import CheckpointFormat, SaveOptions
from holdfast.distributed._seeing import seen_here
from holdfast.errors import CheckpointExistsError, SaveError


def announce(catalog: Catalog, options: SaveOptions) -> Attempt:
    """Begin a save under the name that is given, or a new one."""
    if options.checkpoint_prefix is not None:
        attempt = catalog.begin(options.checkpoint_prefix, overwrite=options.overwrite)
    else:
        attempt = _announce_new(catalog)
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


def _announce_new(catalog: Catalog) -> Attempt:
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
            attempt = catalog.begin(prefix)
            if attempt.intent.attempt == min(_attempts(catalog.storage, prefix)):
                return attempt
            attempt.abort()


def _attempts(storage: Storage, prefix: str) -> list[str]:
    found = (
        attempt_of_intent(info.key.removeprefix(f"{prefix}/"))
        for info in storage.list(f"{prefix}/intent-")
    )
    return [attempt for attempt in found if attempt is not None]
