"""One attempt at saving a checkpoint, from its intent to its commit. Knows no tensors.

    intent -> shards -> every shard stat'ed -> ordinal -> commit record -> intent removed

The commit record is put in place in one step, and only over what stood there when the attempt
began. So whoever gives an attempt up for dead changes what stands there, and an attempt that wakes
up again publishes nothing.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from holdfast._lanes import run_all
from holdfast.catalog._committed import Found, find_record, publish
from holdfast.catalog._intents import DEFAULT_LEASE_S, Intent, announce, check_lease, renew
from holdfast.catalog._model_index import settle_index
from holdfast.catalog._names import (
    SHARD_STARTS,
    attempt_of_shard,
    check_prefix,
    is_model_name,
    new_attempt,
    shard_key,
)
from holdfast.catalog._needed import needed_in
from holdfast.catalog._survey import storage_time, survey
from holdfast.contracts import Clock, ObjectInfo, Storage
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptedError,
    IncompatibleVersionError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    SaveError,
    StorageError,
)
from holdfast.format import CommitRecord, StoredFile, encode_record
from holdfast.resilience import SystemClock

_log = logging.getLogger("holdfast.catalog")

_RENEWALS_PER_LEASE: Final = 4
_TRIES_PER_LEASE: Final = 16
_STATS_AT_ONCE: Final = 64
_STAT_LANES: Final = 16


class Attempt:
    """Used by one thread. A context manager: leaving it without ``commit`` removes what was
    written, unless it cannot be known whether the commit took effect."""

    def __init__(self, storage: Storage, intent: Intent, seen: Found | None, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._seen = seen
        announce(storage, intent)
        self._renew_at_s = clock.now() + intent.lease_s / _RENEWALS_PER_LEASE
        self._open = True
        self._published = False
        self.intent = intent

    @classmethod
    def begin(
        cls,
        storage: Storage,
        prefix: str,
        *,
        overwrite: bool = False,
        refers: Sequence[str] = (),
        lease_s: float = DEFAULT_LEASE_S,
        clock: Clock | None = None,
    ) -> Self:
        """Announce a save of ``prefix``. ``CheckpointExistsError`` if it is committed already,
        unless it is to be overwritten, in which case it stays whole until the commit.

        ``refers`` are prefixes whose files the record may name: see after this that a checkpoint
        which names them is still committed, and they stay until the commit.
        """
        check_prefix("prefix", prefix)
        check_lease(lease_s)
        try:
            seen = find_record(storage, prefix)
        except (CorruptedError, IncompatibleVersionError) as error:
            error.add_note(
                "Nothing was saved. Choose another name; or, if this was a checkpoint of "
                "holdfast's, remove it with rollback (holdfast rm --force) and save again."
            )
            raise
        if seen is not None and seen.is_committed and not overwrite:
            raise _exists(storage, prefix)
        intent = Intent(prefix=prefix, attempt=new_attempt(), lease_s=lease_s, refers=tuple(refers))
        return cls(storage, intent, seen, SystemClock() if clock is None else clock)

    @property
    def replaces(self) -> Found | None:
        """What the commit will replace, if there is a committed checkpoint of this name."""
        return self._seen if self._seen is not None and self._seen.is_committed else None

    def shard_key(self, rank: int, part: int = 0) -> str:
        """Where a rank writes its file; ``part`` counts if it writes several."""
        return shard_key(self.intent.prefix, self.intent.attempt, rank, part)

    def keep_alive(self) -> None:
        """Renew the lease if it is time to: four times in each. Cheap to call often; call it at
        least that often.

        ``SaveError`` if somebody has given this save up. A renewal that fails is tried again at a
        later call: the save does not hang on it, and its commit is safe without any lease.
        """
        if self._clock.now() < self._renew_at_s:
            return
        self._check_lease()
        times = _RENEWALS_PER_LEASE
        try:
            renew(self._storage, self.intent)
        except CheckpointError as error:
            _log.warning("the lease of a save could not be renewed yet: %s", error)
            times = _TRIES_PER_LEASE
        self._renew_at_s = self._clock.now() + self.intent.lease_s / times

    def commit(
        self, record: CommitRecord, *, next_ordinal: Callable[[], int] | None = None
    ) -> CommitRecord:
        """Make the checkpoint exist. Every file that the record names must be there.

        ``next_ordinal`` is asked as late as possible, and its answer takes the place of the
        record's ordinal. Returns the record as it was put in place: with that, and with the
        fences of the one before it.
        """
        storage, prefix = self._storage, self.intent.prefix
        self._check_lease()
        for first in range(0, len(record.files), _STATS_AT_ONCE):
            self.keep_alive()
            files = record.files[first : first + _STATS_AT_ONCE]
            run_all(files, self._check_written, lanes=_STAT_LANES)
        if next_ordinal is not None:
            record = msgspec.structs.replace(record, ordinal=next_ordinal())
        if self._seen is not None:
            record = msgspec.structs.replace(record, fence=self._seen.record.fence)
        try:
            data = encode_record(record)
        except ValueError as error:
            raise SaveError(f"{error}; nothing was committed", path=prefix) from error
        over = None if self._seen is None else self._seen.info.version
        self._published = True
        try:
            publish(storage, prefix, data, over)
        except (ObjectExistsError, ObjectChangedError, ObjectNotFoundError) as error:
            if not self._is_ours(error):
                raise SaveError(
                    "somebody else saved, deleted or gave up this checkpoint in the meantime; "
                    "nothing was committed",
                    path=f"{storage.url}/{prefix}",
                ) from error
        except BaseException as error:
            if not self._took_effect(error):
                raise
        self._open = False
        self._remove_intent()
        return record

    def abort(self) -> None:
        """Remove what this attempt wrote. Idempotent; does nothing after ``commit``.

        Nothing is removed if the record in place is this attempt's, or cannot be read.
        """
        if not self._open:
            return
        self._open = False
        storage, prefix = self._storage, self.intent.prefix
        found = find_record(storage, prefix)
        if found is not None and found.record.attempt == self.intent.attempt:
            return
        written = written_in(storage, prefix, self.intent.attempt)
        if any(is_model_name(key.removeprefix(f"{prefix}/")) for key in written):
            settle_index(storage, prefix)  # this attempt may have written one already
        if written and self._published:
            # It may have been committed for a moment, and another may refer to it since.
            needed = needed_in(survey(storage, storage_time(storage)).values())
            written = [key for key in written if not needed.holds(key)]
        for key in written:
            storage.delete(key)
        storage.delete(self.intent.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.abort()
            return
        try:
            self.abort()
        except CheckpointError as problem:
            error.add_note(f"What the save had written could not be removed: {problem}")

    def _check_lease(self) -> None:
        """Nobody else writes the intent of an attempt, so it is there or it was given up."""
        try:
            self._storage.stat(self.intent.key)
        except ObjectNotFoundError as error:
            raise SaveError(
                f"the save lost its lease of {self.intent.lease_s:g} s: it was silent for longer, "
                "and somebody cleaned up after it; nothing was committed",
                path=self.intent.key,
            ) from error

    def _check_written(self, file: StoredFile) -> None:
        prefix = file.prefix or self.intent.prefix
        found = self._written(f"{prefix}/{file.name}")
        if found.size_bytes != file.size_bytes:
            raise SaveError(
                f"a file was written with {file.size_bytes} bytes and now has {found.size_bytes}; "
                "nothing was committed",
                path=found.key,
            )
        if file.table is not None:
            self._written(f"{prefix}/{file.table}")

    def _written(self, key: str) -> ObjectInfo:
        try:
            return self._storage.stat(key)
        except ObjectNotFoundError as error:
            raise SaveError(
                "a file of this checkpoint is gone, though it was written; nothing was committed",
                path=key,
            ) from error

    def _is_ours(self, error: CheckpointError) -> bool:
        """After a commit that was refused: whether the record in place is this attempt's all the
        same. A retry may find what its first try has put there, and what others made of it since.
        """
        try:
            found = find_record(self._storage, self.intent.prefix)
        except CheckpointError:
            self._leave(error)
            raise error from None
        return found is not None and found.record.attempt == self.intent.attempt

    def _took_effect(self, error: BaseException) -> bool:
        """After a commit that failed: whether it succeeded all the same.

        A storage that lost its answer on the way has the record, and that is all there is to a
        commit. A disk that failed to sync may show the record and still lose it: no success.
        Where nothing can be known, everything is left in place for gc to judge.
        """
        visible: bool | None = None
        with contextlib.suppress(CheckpointError):
            found = find_record(self._storage, self.intent.prefix)
            visible = found is not None and found.record.attempt == self.intent.attempt
        transient = isinstance(error, CheckpointError) and error.transient
        if visible and transient:
            return True
        if visible is False and isinstance(error, StorageError) and not transient:
            return False
        self._leave(error)
        return False

    def _leave(self, error: BaseException) -> None:
        """Leave everything in place, and say so: it may be a checkpoint."""
        self._open = False
        error.add_note(
            f"Whether {self.intent.prefix} is committed, and durably, is unknown. What was saved "
            "before is intact. List the checkpoints to see; gc removes what is left if it is not."
        )

    def _remove_intent(self) -> None:
        try:
            self._storage.delete(self.intent.key)
        except CheckpointError as error:
            _log.warning("the checkpoint is committed, but its intent stays until gc: %s", error)


def written_in(storage: Storage, prefix: str, attempt: str) -> list[str]:
    """The files of an attempt, of all ranks, as far as they are there."""
    return [
        info.key
        for start in SHARD_STARTS
        for info in storage.list(f"{prefix}/{start}")
        if attempt_of_shard(info.key.removeprefix(f"{prefix}/")) == attempt
    ]


def _exists(storage: Storage, prefix: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        "a committed checkpoint of this name is there already; choose another name, or pass "
        "overwrite=True",
        path=f"{storage.url}/{prefix}",
    )
