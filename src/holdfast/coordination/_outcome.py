"""What ranks raise: one error for all, and the words for ranks that are lost or late. Pure."""

import dataclasses
from collections.abc import Mapping

import msgspec

from holdfast.coordination._beacon import LEFT
from holdfast.coordination._liveness import LOSS_IN_WORDS
from holdfast.errors import (
    CheckpointError,
    CoordinationError,
    ErrorRecord,
    OperationTimeoutError,
    RankLostError,
    RankTimeoutError,
)

_TRACE_CHARS = 20_000  # the last frames say most, and a record must stay one small value
_MESSAGE_CHARS = 100_000
_RECORD_BYTES = 1024 * 1024
_PLACES = 8  # ranks whose place is told


def encode(record: ErrorRecord) -> bytes:
    """One small value, whatever is in the record: a failure that cannot be told would leave the
    others waiting."""
    clipped = dataclasses.replace(
        record,
        message=record.message[:_MESSAGE_CHARS],
        path=None if record.path is None else record.path[:_MESSAGE_CHARS],
        phase=None if record.phase is None else record.phase[:_MESSAGE_CHARS],
        traceback=record.traceback[-_TRACE_CHARS:],
    )
    try:
        data = msgspec.json.encode(clipped)
    except (TypeError, ValueError, OverflowError):  # a fact of a strange kind, or a huge number
        data = b""
    if 0 < len(data) <= _RECORD_BYTES:
        return data
    plain = dataclasses.replace(clipped, error=clipped.error[:_MESSAGE_CHARS], facts={})
    return msgspec.json.encode(plain)


def decode(data: bytes) -> ErrorRecord:
    try:
        return msgspec.json.decode(data, type=ErrorRecord)
    except msgspec.MsgspecError as error:
        return ErrorRecord(
            error=CoordinationError.__name__,
            kind=CoordinationError.kind,
            message=f"a rank failed, and what it said of it cannot be read ({error})",
        )


def error_to_raise(own: BaseException, agreed: ErrorRecord, *, rank: int) -> BaseException:
    """What this rank raises, given what happened to it and the record all ranks agreed on.

    Its own error if that is the agreed one, with rank and phase filled in; otherwise the
    agreed one, caused by its own. Interrupts pass as themselves: the others have the record.
    """
    if not isinstance(own, Exception):
        return own
    mine = ErrorRecord.of(own, rank=rank, phase=agreed.phase)
    if not _same(mine, agreed):
        return agreed.rebuild()
    if isinstance(own, CheckpointError):
        own.rank, own.phase = agreed.rank, agreed.phase
        return own
    return dataclasses.replace(agreed, traceback="").rebuild()  # its cause is shown with it


def _same(one: ErrorRecord, other: ErrorRecord) -> bool:
    return dataclasses.replace(one, traceback="") == dataclasses.replace(other, traceback="")


def lost_error(lost: Mapping[int, str], what: str) -> RankLostError:
    """Names the culprits: a rank that left did so, as a rule, because another one was lost."""
    culprits = [rank for rank, state in lost.items() if state != LEFT] or list(lost)
    ranks = tuple(sorted(culprits))
    story = "; ".join(f"rank {rank} {LOSS_IN_WORDS[lost[rank]]}" for rank in ranks)
    return RankLostError(f"{story}, noticed in {what}", rank=ranks[0], ranks=ranks)


def late_error(late: Mapping[int, str], what: str, timeout_s: float) -> RankTimeoutError:
    """``late`` says of each rank that did not come where it is instead."""
    ranks = tuple(sorted(late))
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    places = "; ".join(f"rank {rank} {late[rank]}" for rank in ranks[:_PLACES])
    return RankTimeoutError(
        f"{names} did not arrive at {what} within {timeout_s:g} s; {places}",
        rank=ranks[0],
        ranks=ranks,
        timeout_s=timeout_s,
    )


def overdue_error(what: str, timeout_s: float) -> OperationTimeoutError:
    """For a rank that has used up the time itself: no other kept it waiting."""
    return OperationTimeoutError(
        f"{what} did not end within {timeout_s:g} s: this rank is still at work in it. "
        "Give it more time (timeout_s) if it was not stuck",
        timeout_s=timeout_s,
    )
