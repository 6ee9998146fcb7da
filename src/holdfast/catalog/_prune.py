"""Deletes the checkpoints that a retention lets go, and never the newest that is whole. Which those
are is decided in ``_retention``, how one is deleted in ``_delete``."""

import datetime as dt
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.catalog._committed import find_committed
from holdfast.catalog._delete import Taken, clear_away, take_record
from holdfast.catalog._info import CheckpointInfo, info_of
from holdfast.catalog._listing import Scan
from holdfast.catalog._retention import Retention, reasons_to_stay
from holdfast.catalog._verify import verify_structure
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError, CheckpointNotFoundError, LoadError

_log = logging.getLogger("holdfast.catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What pruning did, or would do. Every checkpoint that was there is in one of these, unless
    somebody else deleted it meanwhile.

    ``deleted``: prefixes, the oldest first. ``kept``: by prefix, the newest first, why it stays.
    ``failed``: by prefix, why it could not be deleted, or not all of it.
    """

    deleted: tuple[str, ...] = ()
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def prune_checkpoints(
    storage: Storage, scan: Scan, retention: Retention, *, now: dt.datetime, dry_run: bool = False
) -> PruneReport:
    """Delete those of the committed checkpoints that ``retention`` lets go, the oldest first.

    The newest one that is whole stays, and so do those that are newer: whether they can be read is
    not known. If none is whole, all stay. While any record cannot be read, all stay, too: it may
    refer to their files, which could not be deleted. That one cannot be deleted does not keep the
    others. ``StorageError`` if the storage does not even let itself be looked at; then nothing
    was deleted.
    """
    reasons = reasons_to_stay(retention, scan.infos, now)
    if all(reasons.values()):
        return PruneReport(kept=reasons)
    if scan.unreadable:
        unreadable = ", ".join(each.prefix for each in scan.unreadable)
        problem = (
            f"it stays: what is in {unreadable} cannot be read, and it may refer to these files; "
            "if it is damaged, remove that with rollback (holdfast rm --force)"
        )
        return PruneReport(kept=_kept(reasons), failed=dict.fromkeys(_going(reasons), problem))
    whole = _newest_whole(storage, scan.infos)
    if whole is None:
        why = "no checkpoint here is whole, so that none is deleted"
        return PruneReport(kept={prefix: (*found, why) for prefix, found in reasons.items()})
    reasons = reasons_to_stay(retention, scan.infos, now, whole=whole)
    going = _going(reasons)
    if dry_run:
        return PruneReport(deleted=going, kept=_kept(reasons))
    return _deleted(storage, scan, set(going), _kept(reasons))


def _deleted(
    storage: Storage, scan: Scan, going: Collection[str], kept: dict[str, tuple[str, ...]]
) -> PruneReport:
    """Delete these: first the records of all, then, after one look for all, their files."""
    failed: dict[str, str] = {}
    taken: list[Taken] = []
    for info in reversed(scan.infos):
        if info.prefix not in going:
            continue
        try:
            found = find_committed(storage, info.prefix)
            current = info_of(info.prefix, found.record)
            if (current.ordinal, current.timestamp) != (info.ordinal, info.timestamp):
                kept[info.prefix] = ("saved again meanwhile",)
            else:
                taken.append(take_record(storage, found))
        except CheckpointNotFoundError:
            _log.debug("somebody else deleted %s in %s", info.prefix, storage.url)
        except CheckpointError as error:
            failed[info.prefix] = str(error)
    if taken:
        problems = clear_away(storage, taken, tombstones=scan.tombstones)
        failed |= {prefix: str(problem) for prefix, problem in problems.items()}
    deleted = tuple(each.found.prefix for each in taken if each.found.prefix not in failed)
    if deleted:
        _log.info("pruned from %s: %s", storage.url, ", ".join(deleted))
    return PruneReport(deleted=deleted, kept=kept, failed=failed)


def _newest_whole(storage: Storage, infos: Sequence[CheckpointInfo]) -> int | None:
    """The place of the newest checkpoint of which every file is there, with its size, its header
    and its table. What its tensors hold is not read."""
    for place, info in enumerate(infos):
        try:
            report = verify_structure(storage, info.prefix)
        except LoadError as error:  # deleted or replaced meanwhile, or too large to be looked at
            _log.info("passed over when pruning: %s", error)
            continue
        if report.is_intact:
            return place
        _log.warning("not whole, and passed over when pruning: %s", report.damage[0])
    return None


def _going(reasons: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Those without a reason to stay, the oldest first."""
    return tuple(prefix for prefix in reversed([*reasons]) if not reasons[prefix])


def _kept(reasons: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {prefix: found for prefix, found in reasons.items() if found}
