"""What the exit code says. Knows every error, and no verb."""

import enum

from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptedError,
    IncompatibleVersionError,
    ObjectNotFoundError,
    TensorNotFoundError,
)


class Exit(enum.IntEnum):
    """The table of ``docs/cli.md``."""

    OK = 0
    FOUND = 1
    """The verb did its work and found a fault or a difference."""
    USAGE = 2
    NOT_FOUND = 3
    DAMAGED = 4
    STORAGE = 5
    INTERNAL = 70
    INTERRUPTED = 130
    CLOSED_PIPE = 141


class MisuseError(CheckpointError):
    """What was typed cannot be meant."""


class NothingThereError(CheckpointError):
    """What the command line names is not there."""


_CODES = (
    (MisuseError, Exit.USAGE),
    (NothingThereError, Exit.NOT_FOUND),
    (CheckpointNotFoundError, Exit.NOT_FOUND),
    (TensorNotFoundError, Exit.NOT_FOUND),
    (ObjectNotFoundError, Exit.NOT_FOUND),
    (CorruptedError, Exit.DAMAGED),
    (IncompatibleVersionError, Exit.DAMAGED),
)


def exit_of(error: CheckpointError) -> Exit:
    """The code for an error that ended a verb."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.STORAGE)
