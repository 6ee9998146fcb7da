"""A store of checkpoints: write, list, read, verify, delete. Knows no torch and no ranks.

This is the front of the room; the modules beside it do the work.
"""

import datetime as dt
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from holdfast import _checks
from holdfast.catalog._attempt import Attempt
from holdfast.catalog._collect import GcReport, collect_garbage
from holdfast.catalog._committed import Found, find_committed
from holdfast.catalog._delete import delete_checkpoint, delete_replaced, roll_back
from holdfast.catalog._info import CheckpointInfo, info_of
from holdfast.catalog._intents import DEFAULT_LEASE_S, check_lease
from holdfast.catalog._listing import Listing, Scan
from holdfast.catalog._names import check_prefix
from holdfast.catalog._opened import OpenCheckpoint
from holdfast.catalog._prune import PruneReport, prune_checkpoints
from holdfast.catalog._reading import Tick
from holdfast.catalog._retention import Retention
from holdfast.catalog._verify import VerifyReport, verify_checkpoint
from holdfast.catalog._writing import (
    Facts,
    check_record_size,
    collect_leaves,
    record_of,
    write_leaves,
)
from holdfast.contracts import Clock, Storage
from holdfast.errors import LoadError
from holdfast.format import CommitRecord, CompressionLevel, encode_value
from holdfast.format._record_check import MAX_METRIC_CHARS
from holdfast.resilience import FaultToleranceHandler, RetryPolicy
from holdfast.storage import StorageOptions, open_storage, retrying

_MAX_COUNT: Final = 2**63 - 1


class Catalog:
    """The checkpoints of one storage, given as such, as its URL or path, or as options.
    Thread-safe; may be shared with any number of others, here or on other hosts.

    A checkpoint exists if and only if its commit record does. Listing, reading, deleting and gc
    all go by that.

    What may pass is tried again as ``retry_policy`` says: every request to a storage that is
    opened here, and the writing of a file to any storage. Wrap a storage of your own yourself.
    """

    def __init__(
        self,
        storage: Storage | str | os.PathLike[str] | StorageOptions,
        *,
        retry_policy: RetryPolicy | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self._handler = FaultToleranceHandler(None, retry_policy, clock=clock)
        if isinstance(storage, str | os.PathLike | StorageOptions):
            storage = retrying(open_storage(storage), retry_policy, clock=clock)
        elif not hasattr(storage, "open_writer"):
            raise ValueError(f"storage must be a Storage, a path or a URL, not {storage!r}")
        self._storage: Storage = _checks.storage("storage", storage)
        self._lease_s = check_lease(lease_s)
        self._clock = clock
        self._listing = Listing(self._storage)

    def __repr__(self) -> str:
        return f"Catalog({self._storage.url!r})"

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def lease_s(self) -> float:
        """How long a save that began here, and has fallen silent, is taken for alive."""
        return self._lease_s

    def write(
        self,
        prefix: str,
        state: object,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        custom: object = None,
        compression: CompressionLevel | str = CompressionLevel.NONE,
        overwrite: bool = False,
        progress: Tick = lambda _: None,
    ) -> CheckpointInfo:
        """Save a tree of values and NumPy arrays. Durable on return.

        All or nothing: until this returns there is no checkpoint of this name, or, with
        ``overwrite``, there is the old one. ``CheckpointExistsError`` if the name is taken;
        ``SaveError`` for what cannot be stored, before anything is written. ``progress`` is told
        each number of bytes as they are written, compressed ones if they are; what it raises
        ends the save. A file that is written again after an error counts again. The arrays must
        not change meanwhile.
        """
        level = _level(compression)
        tree, leaves = collect_leaves(state)
        facts = Facts(
            step=None if step is None else checked_step(step),
            metrics=checked_metrics(metrics),
            custom=encode_value(custom, root="custom"),
        )
        check_record_size(tree, facts.custom, self._storage, prefix)
        attempt = self.begin(prefix, overwrite=overwrite)

        def tick(nbytes: int) -> None:
            attempt.keep_alive()
            progress(nbytes)

        with attempt:
            files, tensors = write_leaves(
                self._storage,
                attempt,
                leaves,
                level=level,
                tick=tick,
                retry=self._handler.execute_with_retry,
            )
            record = record_of(attempt, facts, tree=tree, files=files, tensors=tensors)
            record = self.commit(attempt, record)
        if attempt.replaces is not None:
            delete_replaced(self._storage, attempt.replaces)
        return info_of(prefix, record)

    def begin(self, prefix: str, *, overwrite: bool = False, refers: Sequence[str] = ()) -> Attempt:
        """Announce a save whose files the caller writes; see ``Attempt.begin``."""
        return Attempt.begin(
            self._storage,
            prefix,
            overwrite=overwrite,
            refers=refers,
            lease_s=self._lease_s,
            clock=self._clock,
        )

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """Make the checkpoint of an attempt exist, as the newest; see ``Attempt.commit``."""
        return attempt.commit(record, next_ordinal=self._listing.next_ordinal)

    def list(self) -> list[CheckpointInfo]:
        """Every committed checkpoint, the newest first. One whose record is damaged, or of a
        newer version, is left out with a warning in the log; ``verify`` says what is wrong with
        it. ``StorageError`` if the storage does not give a record.

        A save that began after another had returned is the newer one. Of two that ran at the
        same time either may be, whichever returned first.
        """
        return self._listing.read()

    def scan(self) -> Scan:
        """As ``list``, with the records that cannot be read beside, each with its error, and
        without a word in the log. ``StorageError`` only if the storage does not answer."""
        return self._listing.scan()

    def info(self, prefix: str) -> CheckpointInfo:
        """``CheckpointNotFoundError`` if it is not committed."""
        return info_of(prefix, self.find(prefix).record)

    def find(self, prefix: str) -> Found:
        """The commit record; ``CheckpointNotFoundError`` if it is not committed."""
        return find_committed(self._storage, check_prefix("prefix", prefix))

    def open(self, prefix: str) -> OpenCheckpoint:
        """Open a committed checkpoint for reading; ``CheckpointNotFoundError`` if it is none."""
        return OpenCheckpoint(self._storage, self.find(prefix))

    def read(
        self, prefix: str, names: Iterable[str] | None = None, *, progress: Tick = lambda _: None
    ) -> object:
        """The state as it was saved, verified; see ``OpenCheckpoint.read_tree``.

        One that is replaced meanwhile is read again: the old one or the new one, whole.
        """
        while True:
            found = self.find(prefix)
            try:
                return OpenCheckpoint(self._storage, found).read_tree(names, progress=progress)
            except LoadError:
                now = self.find(prefix)
                if now.record.attempt == found.record.attempt:
                    raise

    def verify(
        self, prefix: str, *, part: tuple[int, int] = (1, 1), progress: Tick = lambda _: None
    ) -> VerifyReport:
        """Read all of a checkpoint, or one ``part`` of several, and report all damage.

        With ``part=(2, 10)`` the second tenth of the chunks is read: ten such calls, on ten
        nights, read all of them. Headers, tables and placements are checked every time.
        """
        return verify_checkpoint(
            self._storage, check_prefix("prefix", prefix), part=part, progress=progress
        )

    def delete(self, prefix: str) -> None:
        """Delete a committed checkpoint: its record first, then files that nothing else needs.

        Files that another checkpoint or a save needs stay until that is deleted, or gc finds them
        unneeded.
        ``StorageError`` if files stay because they could not be removed, or because something in
        the storage cannot be read that may need them; the checkpoint is gone all the same.
        """
        delete_checkpoint(self._storage, prefix)

    def prune(self, retention: Retention, *, dry_run: bool = False) -> PruneReport:
        """Delete every committed checkpoint that ``retention`` lets go, the oldest first; with
        ``dry_run`` only report which those are.

        The newest that is whole stays whatever ``retention`` says: every file it names is there,
        with its size, header and table. So do those that are newer. If none is whole, or any
        commit record cannot be read, nothing is deleted. What could not be deleted is in the
        report; ``StorageError`` if it could not be found out what there is.
        """
        _checks.instance("retention", retention, Retention)
        return prune_checkpoints(
            self._storage,
            self._listing.scan(),
            retention,
            now=dt.datetime.now(dt.UTC),
            dry_run=dry_run,
        )

    def rollback(self, prefix: str) -> None:
        """Remove whatever saves put under the prefix, committed or not, readable or not.

        Files that other checkpoints need stay, and so do objects that are not holdfast's.
        ``StorageError`` while a save is under way there, and if the ``metadata.json`` there is
        somebody else's.
        """
        roll_back(self._storage, prefix)

    def gc(self) -> GcReport:
        """Remove what saves left behind that were never committed and are not alive any more."""
        return collect_garbage(self._storage)


def _level(compression: CompressionLevel | str) -> CompressionLevel:
    try:
        return CompressionLevel(compression)
    except ValueError:
        known = ", ".join(repr(level.value) for level in CompressionLevel)
        raise ValueError(f"compression must be one of {known}, not {compression!r}") from None


def checked_step(step: object) -> int:
    number = step.item() if isinstance(step, np.integer) else step
    checked = _checks.count("step", number, least=0)
    if checked > _MAX_COUNT:
        raise ValueError(f"step must be less than 2**63, not {step!r}")
    return checked


def checked_metrics(metrics: object) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"metrics must be a dict of numbers by name, not {metrics!r}"
        )
    return {
        _checks.text("the name of a metric", name, most=MAX_METRIC_CHARS): _metric(name, value)
        for name, value in metrics.items()
    }


def _metric(name: str, value: object) -> float:
    value = value.item() if isinstance(value, np.number) else value
    if isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_COUNT
    ):
        return value
    raise ValueError(f"metrics[{name!r}] must be a float or an int of 64 bits, not {value!r}")
