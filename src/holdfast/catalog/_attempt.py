"""One attempt at saving a checkpoint, from its intent to its commit. Knows no tensors.

    intent -> shards -> every shard stat'ed -> commit record -> intent removed

The commit record is put in place in one step, and only over what stood there when the attempt
began. So whoever gives an attempt up for dead changes what stands there, and an attempt that wakes
up again publishes nothing.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from holdfast import _checks
from holdfast.catalog._committed import Found, find_record, publish
from holdfast.catalog._intents import DEFAULT_LEASE_S, Intent, encode_intent
from holdfast.catalog._names import attempt_of_shard, new_attempt, shard_name
from holdfast.contracts import COMMIT_RECORD, Clock, ObjectInfo, Storage
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    SaveError,
    StorageError,
)
from holdfast.format import CommitRecord, encode_record
from holdfast.resilience import SystemClock

_log = logging.getLogger("holdfast.catalog")

_RENEWALS_PER_LEASE = 4


class Attempt:
    """Used by one thread. A context manager: leaving it without ``commit`` removes what was
    written, unless it cannot be known whether the commit took effect."""

    def __init__(self, storage: Storage, intent: Intent, seen: Found | None, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._seen = seen
        self._version = _announced(storage, intent).version
        self._renewed_s = clock.now()
        self._open = True
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

        ``refers`` are prefixes whose files the record may name: see after this that they are
        still committed, and they stay until the commit.
        """
        check_prefix("prefix", prefix)
        _checks.seconds("lease_s", lease_s)
        seen = find_record(storage, prefix)
        if seen is not None and seen.is_committed and not overwrite:
            raise _exists(storage, prefix)
        intent = Intent(prefix=prefix, attempt=new_attempt(), lease_s=lease_s, refers=tuple(refers))
        return cls(storage, intent, seen, SystemClock() if clock is None else clock)

    @property
    def replaces(self) -> Found | None:
        """What the commit will replace, if there is a committed checkpoint of this name."""
        return self._seen if self._seen is not None and self._seen.is_committed else None

    def shard_key(self, rank: int, part: int = 0) -> str:
        return f"{self.intent.prefix}/{shard_name(rank, self.intent.attempt, part)}"

    def keep_alive(self) -> None:
        """Renew the lease if it is time to. Cheap to call often; call it at least that often."""
        if self._clock.now() - self._renewed_s < self.intent.lease_s / _RENEWALS_PER_LEASE:
            return
        with self._lost_if_changed():
            info = self._storage.replace(self.intent.key, encode_intent(self.intent), self._version)
        self._version = info.version
        self._renewed_s = self._clock.now()

    def commit(self, record: CommitRecord) -> CommitRecord:
        """Make the checkpoint exist. Every file that the record names must be there.

        Returns the record as it was put in place: with the fences of the one before it.
        """
        storage, prefix = self._storage, self.intent.prefix
        if self._seen is not None:
            record = msgspec.structs.replace(record, fence=self._seen.record.fence)
        try:
            data = encode_record(record)
        except ValueError as error:
            raise SaveError(f"{error}; nothing was committed", path=prefix) from error
        with self._lost_if_changed():
            if storage.stat(self.intent.key).version != self._version:
                raise ObjectChangedError("the intent was changed", path=self.intent.key)
        for file in record.files:
            self._check_written(f"{file.prefix or prefix}/{file.name}", file.size_bytes)
        over = None if self._seen is None else self._seen.info.version
        try:
            publish(storage, prefix, data, over)
        except (ObjectExistsError, ObjectChangedError, ObjectNotFoundError) as error:
            raise SaveError(
                "somebody else saved, deleted or gave up this checkpoint in the meantime; "
                "nothing was committed",
                path=f"{storage.url}/{prefix}",
            ) from error
        except BaseException as error:
            if not self._took_effect(record.attempt, error):
                raise
        self._open = False
        self._remove_intent()
        return record

    def abort(self) -> None:
        """Remove what this attempt wrote. Idempotent; does nothing after ``commit``."""
        if not self._open:
            return
        self._open = False
        prefix = self.intent.prefix
        for info in [*self._storage.list(f"{prefix}/shard-")]:
            if attempt_of_shard(info.key.removeprefix(f"{prefix}/")) == self.intent.attempt:
                self._storage.delete(info.key)
        self._storage.delete(self.intent.key)

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

    def _check_written(self, key: str, size_bytes: int) -> None:
        try:
            found = self._storage.stat(key)
        except ObjectNotFoundError as error:
            raise SaveError(
                "a file of this checkpoint is gone, though it was written; nothing was committed",
                path=key,
            ) from error
        if found.size_bytes != size_bytes:
            raise SaveError(
                f"a file was written with {size_bytes} bytes and now has {found.size_bytes}; "
                "nothing was committed",
                path=key,
            )

    def _took_effect(self, attempt: str, error: BaseException) -> bool:
        """After a commit that failed: whether it succeeded all the same.

        A storage that lost its answer on the way has the record, and that is all there is to a
        commit. A disk that failed to sync may show the record and still lose it: no success.
        Where nothing can be known, everything is left in place for gc to judge.
        """
        visible: bool | None = None
        with contextlib.suppress(CheckpointError):
            found = find_record(self._storage, self.intent.prefix)
            visible = found is not None and found.record.attempt == attempt
        transient = isinstance(error, CheckpointError) and error.transient
        if visible and transient:
            return True
        if visible is False and isinstance(error, StorageError) and not transient:
            return False
        self._open = False
        error.add_note(
            f"Whether {self.intent.prefix} is committed, and durably, is unknown. What was saved "
            "before is intact. List the checkpoints to see; gc removes what is left if it is not."
        )
        return False

    def _remove_intent(self) -> None:
        try:
            self._storage.delete(self.intent.key)
        except StorageError as error:
            _log.warning("the checkpoint is committed, but its intent stays until gc: %s", error)

    @contextlib.contextmanager
    def _lost_if_changed(self) -> Iterator[None]:
        try:
            yield
        except (ObjectChangedError, ObjectNotFoundError) as error:
            raise SaveError(
                f"the save lost its lease of {self.intent.lease_s:g} s: it was silent for longer, "
                "and somebody cleaned up after it; nothing was committed",
                path=self.intent.key,
            ) from error


def _announced(storage: Storage, intent: Intent) -> ObjectInfo:
    try:
        return storage.create(intent.key, encode_intent(intent))
    except BaseException:
        with contextlib.suppress(CheckpointError):  # it may be there all the same
            storage.delete(intent.key)
        raise


def check_prefix(name: str, prefix: object) -> str:
    """``prefix``, or ``ValueError`` unless it can name a checkpoint."""
    checked = _checks.key(name, prefix)
    if COMMIT_RECORD in checked.split("/"):
        raise ValueError(f"{name} must name a checkpoint, not its {COMMIT_RECORD}: {prefix!r}")
    return checked


def _exists(storage: Storage, prefix: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        "a committed checkpoint of this name is there already; choose another name, or pass "
        "overwrite=True",
        path=f"{storage.url}/{prefix}",
    )
