"""Which checkpoint a training goes on from: the newest that loads, and why others were passed over.

Knows errors and what they say of a checkpoint. Others list and load; nothing here looks into one.
"""

import datetime as dt
import enum
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

import msgspec

from holdfast.catalog import CheckpointInfo
from holdfast.catalog._listing import Scan
from holdfast.contracts import Operation
from holdfast.distributed._options import LoadOptions
from holdfast.distributed._result import CheckpointLoadResult, CheckpointMetadata
from holdfast.distributed._tools import Tools
from holdfast.distributed._validation import capped
from holdfast.distributed._watch import Watch
from holdfast.errors import (
    CheckpointError,
    CorruptedError,
    ErrorKind,
    IncompatibleVersionError,
    LoadError,
    StorageError,
    ValidationError,
)

_TOLD: Final = frozenset(
    {
        ErrorKind.CORRUPTED,
        ErrorKind.INCOMPATIBLE_VERSION,
        ErrorKind.LOAD_FAILED,
        ErrorKind.STORAGE_ERROR,
        ErrorKind.VALIDATION_FAILED,
    }
)
"""Kinds of errors that may speak of the checkpoint. An error is of one kind on all ranks."""

_VALIDATE: Final = "validate"
"""The phase of a load in which a refusal is the checkpoint's, and not one of what it is to fill."""

_Identity = tuple[str, int, dt.datetime]

_log = logging.getLogger("holdfast.distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint that a resume did not load, though it is newer than the one it did, and why.
    Of one whose record cannot be read nobody knows the step."""

    prefix: str
    step: int | None
    reason: str

    def __str__(self) -> str:
        step = "" if self.step is None else f" (step {self.step})"
        return f"{self.prefix}{step}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeResult:
    """What a resume has done on this rank: what it ``loaded``, and the newer checkpoints that it
    ``passed_over``, the newest first, those of unknown age last. All ranks passed over the same."""

    loaded: CheckpointLoadResult
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def prefix(self) -> str:
        return self.metadata.prefix

    @property
    def step(self) -> int | None:
        """The step that was given to the save; ``None`` if none was."""
        return self.metadata.step

    @property
    def metadata(self) -> CheckpointMetadata:
        return self.loaded.metadata

    @property
    def extra(self) -> Mapping[str, object]:
        return self.loaded.extra

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """All of it for people, of many checkpoints that were passed over the first 20."""
        loaded = self.loaded
        step = "" if self.step is None else f", step {self.step}"
        saved, here = _ranks(loaded.source_world_size), _ranks(loaded.target_world_size)
        lines = [f"resumed from {self.prefix}{step}, saved by {saved} and loaded by {here}"]
        if loaded.not_restored:
            lines.append(f"not restored: {', '.join(loaded.not_restored)}")
        if self.passed_over:
            lines += ["passed over:", *capped([str(each) for each in self.passed_over])]
        return "\n".join(lines)


def check_resume_options(options: LoadOptions) -> None:
    """``ValueError`` for what makes no sense when the checkpoint is not the caller's choice."""
    if options.checkpoint_prefix is not None:
        raise ValueError(
            "resume chooses the checkpoint itself; use load for checkpoint_prefix "
            f"{options.checkpoint_prefix!r}"
        )
    if options.in_place and not options.strict:
        raise ValueError(
            "in_place needs strict=True in a resume: what a damaged checkpoint has put into a "
            "tensor would stay there if an older one has no such tensor"
        )


def resume_newest(
    tools: Tools,
    load: Callable[[str], CheckpointLoadResult],
    *,
    timeout_s: float,
    in_place: bool = False,
) -> ResumeResult | None:
    """Load the newest checkpoint that can be loaded; ``None`` if there is none at all. All ranks
    call this, with a ``load`` that all ranks call together.

    Rank 0 lists and chooses for all, once more after every checkpoint that did not load: others
    may save, prune and overwrite meanwhile.
    """
    choosing = _Choosing(tools, timeout_s, in_place=in_place)
    choice = choosing.choose()
    while choice.prefix is not None:
        try:
            loaded = load(choice.prefix)
        except CheckpointError as error:
            if error.kind not in _TOLD:
                raise
            # Not after this block: the error keeps alive what the load has read.
            choice = choosing.choose(error)
            if choice.is_over:
                raise
        else:
            result = ResumeResult(loaded=loaded, passed_over=choice.passed_over)
            if tools.coordinator.rank == 0:
                _log.info("%s: %s", tools.storage.url, result)
            return result
    return None


class _Verdict(enum.Enum):
    """What an error of a load says."""

    BAD = "bad"
    """The checkpoint is not whole, or not for this version or job: an older one may do."""

    LOOK = "look"
    """It was there and is not any more, or the state refuses it: the storage knows which."""

    WRONG = "wrong"
    """The storage does not answer, or the model is another: an older one is no help."""


def _judge(error: CheckpointError) -> _Verdict:
    """Pure. A storage that fails for good to give one object, though it lists it, has lost it;
    but not if it refuses to."""
    if isinstance(error, CorruptedError | IncompatibleVersionError):
        return _Verdict.BAD
    if isinstance(error, StorageError) and not error.transient:
        is_refused = isinstance(error.__cause__, PermissionError)
        return _Verdict.WRONG if is_refused else _Verdict.BAD
    if isinstance(error, ValidationError) and error.phase == _VALIDATE:
        return _Verdict.BAD
    return _Verdict.LOOK if isinstance(error, LoadError) else _Verdict.WRONG


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do next: load ``prefix``, or nothing if it is ``None``. ``is_over``: raise the
    error that they have met."""

    prefix: str | None = None
    passed_over: tuple[PassedOver, ...] = ()
    is_over: bool = False


@final
class _Choosing:
    """Chooses on rank 0, and tells the others. Remembers what was tried."""

    def __init__(self, tools: Tools, timeout_s: float, *, in_place: bool) -> None:
        self._tools = tools
        self._in_place = in_place
        self._timeout_s = timeout_s
        self._tried: CheckpointInfo | None = None
        self._bad: dict[_Identity, PassedOver] = {}
        self._told: set[PassedOver] = set()

    def choose(self, error: CheckpointError | None = None) -> _Choice:
        """The next, given what the load of the last one has raised on this rank. Of an error that
        has spread the rank where it began knows the most, so that all of them are asked."""
        own = b"" if error is None else _judge(error).value.encode()
        with self._tools.coordinator.operation("resume", self._timeout_s) as operation:
            verdicts = operation.gather(own)
            told = None
            if verdicts is not None:
                choice = self._decide(operation, error, {each.decode() for each in verdicts})
                told = msgspec.json.encode(choice)
            return msgspec.json.decode(operation.broadcast(told), type=_Choice)

    def _decide(
        self, operation: Operation, error: CheckpointError | None, verdicts: set[str]
    ) -> _Choice:
        if _Verdict.WRONG.value in verdicts:
            return _Choice(is_over=True)
        scan = Watch(operation).run(lambda _: self._scan())
        tried = self._tried
        if error is not None and tried is not None and _is_in(scan, tried):
            if _Verdict.LOOK.value in verdicts:
                return _Choice(is_over=True)
            passed = PassedOver(prefix=tried.prefix, step=tried.step, reason=str(error))
            self._bad[_identity(tried)] = passed
        return self._newest(scan)

    def _newest(self, scan: Scan) -> _Choice:
        """The newest checkpoint that was not found to be bad, or ``LoadError`` if all are."""
        self._tried = next((info for info in scan.infos if _identity(info) not in self._bad), None)
        newer = itertools.takewhile(lambda info: info is not self._tried, scan.infos)
        since_s = -math.inf if self._tried is None else scan.written_s[self._tried.prefix]
        passed_over = [self._bad[_identity(info)] for info in newer] + [
            PassedOver(prefix=each.prefix, step=None, reason=str(each.error))
            for each in scan.unreadable
            if scan.written_s[each.prefix] >= since_s
        ]
        for each in passed_over:
            if each not in self._told:
                _log.warning("resume passes over %s", each)
        self._told.update(passed_over)
        if self._tried is None and passed_over:
            state = "The tensors hold anything now" if self._in_place else "Nothing was loaded"
            raise LoadError(
                f"there are checkpoints, and none of them can be loaded. {state}; mend or delete "
                "them, or choose another storage, to begin anew.\n"
                + "\n".join(capped([str(each) for each in passed_over])),
                path=self._tools.storage.url,
            )
        return _Choice(
            prefix=None if self._tried is None else self._tried.prefix,
            passed_over=tuple(passed_over),
        )

    def _scan(self) -> Scan:
        """``StorageError`` and the like if the storage does not answer, also for one record."""
        scan = self._tools.catalog.scan()
        for each in scan.unreadable:
            if _judge(each.error) is not _Verdict.BAD:
                raise each.error
        return scan


def _identity(info: CheckpointInfo) -> _Identity:
    """Tells a checkpoint from one that has replaced it under the same name."""
    return info.prefix, info.ordinal, info.timestamp


def _is_in(scan: Scan, info: CheckpointInfo) -> bool:
    return _identity(info) in map(_identity, scan.infos)


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
