"""A save that was announced and is not committed yet, on the rank that will. Knows no tensors.

DCP tells a storage when to commit, but not that another rank has failed and there will be no
commit. So what is left is removed when its writer is used again or is no more.
"""

import logging
import os
import threading

from holdfast.catalog import Attempt, Catalog
from holdfast.catalog._delete import delete_replaced
from holdfast.catalog._names import attempt_of_shard, intent_name
from holdfast.distributed._keeping import Keeper
from holdfast.errors import CheckpointError
from holdfast.format import CommitRecord

_log = logging.getLogger("holdfast.integrations.dcp")


class Saving:
    """Keeps the lease of an attempt alive, in a thread, until it is committed or given up."""

    def __init__(self, catalog: Catalog, attempt: Attempt) -> None:
        self._catalog = catalog
        self._attempt = attempt
        self._keeper = Keeper(attempt)
        self._keeper.__enter__()
        self._process = os.getpid()

    @property
    def attempt(self) -> Attempt:
        return self._attempt

    def commit(self, record: CommitRecord) -> None:
        """Make the checkpoint exist, then tidy up, which cannot make the save fail."""
        try:
            self._keeper.__exit__(None, None, None)
            self._catalog.commit(self._attempt, record)
        except BaseException:
            self.give_up()
            raise
        storage, attempt = self._catalog.storage, self._attempt
        names = {attempt_of_shard(file.name) for file in record.files}
        try:
            for name in names - {None, attempt.intent.attempt}:
                storage.delete(f"{attempt.intent.prefix}/{intent_name(name or '')}")
        except CheckpointError as error:
            _log.warning("%s is saved, but not all is tidy: %s", attempt.intent.prefix, error)
        if attempt.replaces is not None:
            delete_replaced(storage, attempt.replaces)

    def forget(self) -> None:
        """``give_up``, for the garbage collector: it may run in a thread that holds a lock of the
        storage, and so waits for nobody. When the interpreter ends, there is only this thread."""
        if not threading.main_thread().is_alive():
            self.give_up()
            return
        threading.Thread(target=self.give_up, name="holdfast-tidy", daemon=True).start()

    def give_up(self) -> None:
        """Remove what all ranks have written, unless it is committed. Idempotent, and does nothing
        in a process that was forked off: the save is not its own."""
        if os.getpid() != self._process:
            return
        try:
            self._keeper.__exit__(CheckpointError, CheckpointError("given up"), None)
            self._attempt.abort()
        except CheckpointError as error:
            _log.warning("what a failed save wrote stays until gc: %s", error)
