"""How an error on one rank becomes the one error that every rank raises. Pure."""

import dataclasses

import msgspec

from holdfast.errors import CheckpointError, ErrorRecord

_TRACE_CHARS = 20_000  # the last frames say most, and a record must stay one small value
_MESSAGE_CHARS = 100_000


def encode(record: ErrorRecord) -> bytes:
    return msgspec.json.encode(
        dataclasses.replace(
            record,
            message=record.message[:_MESSAGE_CHARS],
            traceback=record.traceback[-_TRACE_CHARS:],
        )
    )


def decode(data: bytes) -> ErrorRecord:
    return msgspec.json.decode(data, type=ErrorRecord)


def error_to_raise(own: BaseException, agreed: ErrorRecord, *, rank: int) -> BaseException:
    """What this rank raises, given what happened to it and the record all ranks agreed on.

    Its own error if that is the agreed one, with rank and phase filled in; otherwise the
    agreed one, caused by its own. Interrupts pass as themselves: the others have the record.
    """
    if not isinstance(own, Exception):
        return own
    mine = ErrorRecord.of(own, rank=rank, phase=agreed.phase)
    if isinstance(own, CheckpointError) and _same(mine, agreed):
        own.rank, own.phase = agreed.rank, agreed.phase
        return own
    error = agreed.rebuild()
    error.__cause__ = own
    return error


def _same(one: ErrorRecord, other: ErrorRecord) -> bool:
    return dataclasses.replace(one, traceback="") == dataclasses.replace(other, traceback="")
