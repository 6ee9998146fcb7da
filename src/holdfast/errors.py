"""Every error holdfast raises, and the record in which an error travels between ranks.

    CheckpointError                     kind               transient   also a
    ├── SaveError                       SAVE_FAILED
    │   ├── CheckpointExistsError
    │   ├── ReplicaMismatchError
    │   ├── SaveInProgressError
    │   └── TornSnapshotError
    ├── LoadError                       LOAD_FAILED
    │   ├── CheckpointNotFoundError                                    KeyError
    │   └── TensorNotFoundError                                        KeyError
    ├── ValidationError                 VALIDATION_FAILED
    ├── CorruptedError                  CORRUPTED
    ├── IncompatibleVersionError        INCOMPATIBLE_VERSION
    ├── OperationTimeoutError           TIMEOUT                        TimeoutError
    │   └── RankTimeoutError
    ├── StorageError                    STORAGE_ERROR
    │   ├── ObjectChangedError
    │   ├── ObjectExistsError                                          FileExistsError
    │   ├── ObjectNotFoundError                                        FileNotFoundError
    │   ├── NoSpaceError
    │   └── TransientStorageError                          yes
    ├── CircuitOpenError                STORAGE_ERROR
    ├── ClosedError                     UNKNOWN
    ├── CoordinationError               UNKNOWN
    │   ├── RankFailedError
    │   └── RankLostError
    ├── FallbackRequiresRewrapError     UNKNOWN                        RuntimeError
    ├── PlanError                       UNKNOWN                        ValueError
    │   └── BudgetError
    └── RecomputationError              UNKNOWN                        RuntimeError
        ├── DependencyCycleError                                       ValueError
        └── UnknownLayerError                                          KeyError

Builtins are mixed in where the meaning agrees, so ``except KeyError`` and ``except TimeoutError``
work as people expect. ``TimeoutError`` is an ``OSError``: a retry that trusts ``OSError`` would
repeat timeouts and missing objects for ever, so no error of ours is retried unless its class
says ``transient``.

This module imports nothing heavier than ``traceback``: it is loaded by ``import holdfast``.
"""

import enum
import operator
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CircuitOpenError",
    "ClosedError",
    "CoordinationError",
    "CorruptedError",
    "DependencyCycleError",
    "ErrorKind",
    "ErrorRecord",
    "FallbackRequiresRewrapError",
    "IncompatibleVersionError",
    "LoadError",
    "NoSpaceError",
    "ObjectChangedError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "OperationTimeoutError",
    "PlanError",
    "RankFailedError",
    "RankLostError",
    "RankTimeoutError",
    "RecomputationError",
    "ReplicaMismatchError",
    "SaveError",
    "SaveInProgressError",
    "StorageError",
    "TensorNotFoundError",
    "TornSnapshotError",
    "TransientStorageError",
    "UnknownLayerError",
    "ValidationError",
]


class ErrorKind(enum.Enum):
    """What went wrong, in eight words. Every error class has exactly one kind."""

    UNKNOWN = "unknown"
    SAVE_FAILED = "save_failed"
    LOAD_FAILED = "load_failed"
    VALIDATION_FAILED = "validation_failed"
    CORRUPTED = "corrupted"
    INCOMPATIBLE_VERSION = "incompatible_version"
    TIMEOUT = "timeout"
    STORAGE_ERROR = "storage_error"


Fact = str | int | float | bool | None | tuple[int | str, ...]


class CheckpointError(Exception):
    """The root: ``except CheckpointError`` catches everything holdfast raises on purpose.

    ``message`` says what failed and what to do; ``path`` where; ``rank`` and ``phase`` on which
    rank and in which part of a distributed operation. Further keyword facts become attributes.
    All of it survives ``copy`` and crosses between processes.
    """

    kind: ClassVar[ErrorKind] = ErrorKind.UNKNOWN
    transient: ClassVar[bool] = False
    """Whether trying the same call again may help. Inherited by subclasses."""

    facts: ClassVar[tuple[str, ...]] = ()
    """Names of the further keyword facts this class carries, each ``None`` unless given."""

    # Defaults, so that a subclass which forgets to call __init__ can still be printed and told.
    path: str | None = None
    rank: int | None = None
    phase: str | None = None

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        phase: str | None = None,
        **facts: Fact,
    ) -> None:
        super().__init__(message)
        unknown = facts.keys() - set(self.facts)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no fact named {', '.join(sorted(unknown))}")
        self.path = None if path is None else os.fsdecode(path)
        self.rank = rank
        self.phase = phase
        for name in self.facts:
            setattr(self, name, facts.get(name))

    @property
    def message(self) -> str:
        """The sentence alone, without rank, phase and path."""
        return str(self.args[0]) if self.args else type(self).__name__

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"phase {self.phase}"] if self.phase is not None else []
        where += [f"path {self.path}"] if self.path is not None else []
        if not where:
            return self.message
        after = "\n" if "\n" in self.message else " "
        return f"{self.message}{after}[{', '.join(where)}]"


class SaveError(CheckpointError):
    """A checkpoint could not be saved. What was committed before is untouched."""

    kind = ErrorKind.SAVE_FAILED


class CheckpointExistsError(SaveError):
    """The prefix already holds a committed checkpoint and overwriting was not asked for."""


class ReplicaMismatchError(SaveError):
    """Ranks that should hold the same values hold different ones."""


class SaveInProgressError(SaveError):
    """An earlier save is still under way, and this one was not to wait for it."""


class TornSnapshotError(SaveError):
    """A tensor changed while it was being saved; nothing was committed."""


class LoadError(CheckpointError):
    """A checkpoint could not be loaded. The state to be filled is unchanged."""

    kind = ErrorKind.LOAD_FAILED


class CheckpointNotFoundError(LoadError, KeyError):
    """No committed checkpoint, or no kept activation, has this name."""


class TensorNotFoundError(LoadError, KeyError):
    """The checkpoint is there, but has no tensor of this name."""


class ValidationError(CheckpointError):
    """A checkpoint does not fit what it is to be loaded into, or a check refused it."""

    kind = ErrorKind.VALIDATION_FAILED


class CorruptedError(CheckpointError):
    """Stored bytes are not the bytes that were written."""

    kind = ErrorKind.CORRUPTED


class IncompatibleVersionError(CheckpointError):
    """Written by a version of the format that this version does not read."""

    kind = ErrorKind.INCOMPATIBLE_VERSION


class OperationTimeoutError(CheckpointError, TimeoutError):
    """Something did not finish in its time. ``timeout_s`` is the time it had."""

    kind = ErrorKind.TIMEOUT
    facts: ClassVar[tuple[str, ...]] = ("timeout_s",)

    timeout_s: float | None


class RankTimeoutError(OperationTimeoutError):
    """Ranks that are alive did not arrive in time. ``ranks`` names them."""

    facts = ("timeout_s", "ranks")

    ranks: tuple[int, ...] | None


class StorageError(CheckpointError):
    """A storage refused or failed an operation."""

    kind = ErrorKind.STORAGE_ERROR


class ObjectChangedError(StorageError):
    """The object is no longer the version the caller expected to replace."""


class ObjectExistsError(StorageError, FileExistsError):
    """The key is taken."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """Nothing is stored under this key."""


class NoSpaceError(StorageError):
    """The storage is full, or a quota is."""


class TransientStorageError(StorageError):
    """A storage failed in a way that may pass: throttling, a dropped connection."""

    transient = True


class CircuitOpenError(CheckpointError):
    """A circuit breaker refused the call because the thing behind it keeps failing.

    ``retry_after_s`` is the time until it will let a probe through.
    """

    kind = ErrorKind.STORAGE_ERROR
    facts = ("retry_after_s",)

    retry_after_s: float | None


class ClosedError(CheckpointError):
    """The object was used after ``close()``."""


class CoordinationError(CheckpointError):
    """Ranks could not act together."""


class RankFailedError(CoordinationError):
    """Another library's exception stopped a rank; ``error_type`` is its class name."""

    facts = ("error_type",)

    error_type: str | None


class RankLostError(CoordinationError):
    """Ranks died, fell silent, or took the store down with them. ``ranks`` names them."""

    facts = ("ranks",)

    ranks: tuple[int, ...] | None


class RecomputationError(CheckpointError, RuntimeError):
    """An activation could not be recomputed. ``layer_id`` names the layer."""

    facts: ClassVar[tuple[str, ...]] = ("layer_id",)

    layer_id: str | None


class DependencyCycleError(RecomputationError, ValueError):
    """Layers depend on each other in a circle. ``layers`` names them in order."""

    facts = ("layer_id", "layers")

    layers: tuple[str, ...] | None


class UnknownLayerError(RecomputationError, KeyError):
    """No recompute function is registered for the layer."""


class FallbackRequiresRewrapError(CheckpointError, RuntimeError):
    """A model must go on in FP32, but is wrapped so that its dtype cannot change. Nothing has: its
    masters are intact."""


class PlanError(CheckpointError, ValueError):
    """No activation plan could be made, or it is not one for this model. The model is as it was,
    but for parameters that it changes in a step by itself: the message then says so."""


class BudgetError(PlanError):
    """No plan fits the budget. ``smallest_bytes`` is the smallest budget that one fits."""

    facts = ("smallest_bytes",)

    smallest_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """An error as values, for sending to other ranks. Never a pickle.

    ``error`` is the class's name; only names of this module's tree are ever turned back into
    that class, so a record cannot make a receiver build anything else.
    """

    error: str
    kind: ErrorKind
    message: str
    path: str | None = None
    rank: int | None = None
    phase: str | None = None
    traceback: str = ""
    facts: Mapping[str, str | int | float | bool | list[int | str] | None] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, error: BaseException, *, rank: int, phase: str | None = None) -> "ErrorRecord":
        """Record ``error`` as ``rank`` met with it; facts already in the error win.

        That a rank was lost or late has no traceback: there is nothing to be found where it was
        noticed.
        """
        try:
            return cls._of(error, rank, phase)
        except Exception as problem:  # noqa: BLE001 -- what cannot be told leaves others waiting
            name = type(error).__name__
            return cls(
                error=RankFailedError.__name__,
                kind=RankFailedError.kind,
                message=f"{name}, which cannot be described ({type(problem).__name__})",
                rank=rank,
                phase=phase,
                facts={"error_type": name},
            )

    @classmethod
    def _of(cls, error: BaseException, rank: int, phase: str | None) -> "ErrorRecord":
        trace = _utf8("".join(traceback.format_exception(error)))
        if not isinstance(error, CheckpointError):
            return cls(
                error=RankFailedError.__name__,
                kind=RankFailedError.kind,
                message=_utf8("".join(traceback.format_exception_only(error)).strip()),
                rank=rank,
                phase=phase,
                traceback=trace,
                facts={"error_type": type(error).__name__},
            )
        return cls(
            error=type(error).__name__,
            kind=error.kind,
            message=_utf8(error.message),
            path=None if error.path is None else _utf8(str(error.path)),
            rank=rank if error.rank is None else operator.index(error.rank),
            phase=phase if error.phase is None else _utf8(str(error.phase)),
            traceback="" if isinstance(error, RankLostError | RankTimeoutError) else trace,
            facts={name: _plain(getattr(error, name)) for name in error.facts},
        )

    def rebuild(self) -> CheckpointError:
        """The same error again, with the other rank's traceback attached as a note.

        A class this version does not know becomes the plainest class of the same kind.
        """
        cls = _CLASSES.get(self.error) or _PLAINEST[self.kind]
        facts = {k: tuple(v) if isinstance(v, list) else v for k, v in self.facts.items()}
        error = cls(
            self.message,
            path=self.path,
            rank=self.rank,
            phase=self.phase,
            **{k: v for k, v in facts.items() if k in cls.facts},
        )
        if self.traceback:
            error.add_note(f"On rank {self.rank}:\n{self.traceback.rstrip()}")
        return error


def _plain(value: object) -> Any:
    """A fact as JSON can carry it; what it cannot, in words."""
    if isinstance(value, list | tuple):
        return [item if isinstance(item, str) else _index_or_words(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, float):
        return float(value)
    return _index_or_words(value)


def _index_or_words(value: object) -> int | str:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return _utf8(str(value))


def _utf8(text: str) -> str:
    """Text that can be encoded: file names may carry bytes that are no characters."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _tree(root: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


# Taken once, here, so that a class a user derives later is not built from a stranger's record.
_CLASSES = {cls.__name__: cls for cls in _tree(CheckpointError)}
_PLAINEST = {cls.kind: cls for cls in reversed(_CLASSES.values())}
