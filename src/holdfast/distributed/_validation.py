"""Whether a checkpoint should be loaded at all: checks that find, and findings put together.

Knows the record and its files, not their tensors' values; those are verified as they are read,
whether or not anything is validated.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, Self, TypeVar

from holdfast import _checks
from holdfast._lanes import run_all
from holdfast.catalog import Catalog, OpenCheckpoint
from holdfast.catalog._committed import Found
from holdfast.catalog._opened import decoded
from holdfast.catalog._verify import verify_checkpoint
from holdfast.contracts import Storage
from holdfast.errors import (
    CheckpointError,
    CorruptedError,
    IncompatibleVersionError,
    ObjectNotFoundError,
)
from holdfast.storage import StorageOptions

_STAT_LANES: Final = 16
_SHOWN_LINES: Final = 20

Checker = TypeVar("Checker")

_log = logging.getLogger("holdfast.distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check has to say. An error keeps the checkpoint from being loaded, a warning does
    not."""

    message: str
    is_error: bool

    @classmethod
    def error(cls, message: str) -> Self:
        return cls(message=message, is_error=True)

    @classmethod
    def warning(cls, message: str) -> Self:
        return cls(message=message, is_error=False)


class IntegrityChecker(Protocol):
    """Looks whether a checkpoint is what it should be."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def check(self, checkpoint: OpenCheckpoint) -> Iterable[Finding]:
        """Everything there is to say, nothing if all is well. One process of a job calls it.
        What it raises counts as an error that it found."""


class CompatibilityChecker(Protocol):
    """Looks whether a checkpoint fits the job that wants to load it."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def check(self, checkpoint: OpenCheckpoint, world_size: int) -> Iterable[Finding]:
        """As ``IntegrityChecker.check``; ``world_size`` is that of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """What all checks found, in the order in which they ran."""

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether there are no errors; warnings may be there."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.is_valid

    @property
    def has_warnings(self) -> bool:
        return bool(self.warnings)

    def summary(self) -> str:
        """All of it for people, of many findings of a kind the first 20."""
        lines = ["valid" if self.is_valid else "not valid"]
        for kind, messages in (("error", self.errors), ("warning", self.warnings)):
            lines += capped([f"{kind}: {message}" for message in messages])
        return "\n".join(lines)


class CheckpointValidator:
    """Runs the checks that every checkpoint must pass, then those it was given. Thread-safe if
    they are.

    The storage, as such, as its URL or path, or as a catalog, is where ``validate_checkpoint``
    looks; ``validate`` needs none.
    """

    def __init__(
        self,
        storage_or_catalog: Catalog
        | Storage
        | StorageOptions
        | str
        | os.PathLike[str]
        | None = None,
        integrity_checkers: Sequence[IntegrityChecker] = (),
        compatibility_checkers: Sequence[CompatibilityChecker] = (),
    ) -> None:
        if storage_or_catalog is None or isinstance(storage_or_catalog, Catalog):
            self._catalog = storage_or_catalog
        else:
            self._catalog = Catalog(storage_or_catalog)
        self._integrity = checked_checkers("integrity_checkers", integrity_checkers)
        self._compatibility = checked_checkers("compatibility_checkers", compatibility_checkers)

    def validate(
        self, checkpoint: OpenCheckpoint, *, world_size: int, values_read: bool = False
    ) -> ValidationResult:
        """Everything that is wrong with a checkpoint, for a job of that size.

        The values of its record must be readable, which is known already if they were
        ``values_read``, and every file it names must be there, of its size. That needs one small
        request for each file, several at a time. A checker that raises is an error that names it.
        ``StorageError`` if the storage does not answer.
        """
        _checks.count("world_size", world_size, least=1)
        findings = [] if values_read else [*_unreadable_values(checkpoint.found)]
        findings += _wrong_files(checkpoint.storage, checkpoint.found)
        for integrity in self._integrity:
            findings += _run(integrity.name, partial(integrity.check, checkpoint))
        for compatibility in self._compatibility:
            check = partial(compatibility.check, checkpoint, world_size)
            findings += _run(compatibility.name, check)
        return ValidationResult(
            errors=tuple(each.message for each in findings if each.is_error),
            warnings=tuple(each.message for each in findings if not each.is_error),
        )

    def validate_checkpoint(self, prefix: str, *, world_size: int = 1) -> ValidationResult:
        """``validate`` a checkpoint of this validator's storage, from one process. A commit
        record that cannot be read is an error in the result; ``CheckpointNotFoundError`` if there
        is none."""
        if self._catalog is None:
            raise ValueError(
                f"this validator was made without a storage to find {prefix!r} in; make it as "
                "CheckpointValidator(storage)"
            )
        try:
            checkpoint = self._catalog.open(prefix)
        except (CorruptedError, IncompatibleVersionError) as error:
            return ValidationResult(errors=(str(error),))
        return self.validate(checkpoint, world_size=world_size)


class FullReadChecker:
    """Reads all of a checkpoint and compares every chunk with its digest. As slow as it sounds."""

    name = "full read"

    def check(self, checkpoint: OpenCheckpoint) -> Iterator[Finding]:
        storage, found = checkpoint.storage, checkpoint.found
        for damage in verify_checkpoint(storage, found.prefix).damage:
            yield Finding.error(str(damage))


class RequiredMetadata:
    """Refuses a checkpoint whose custom metadata lacks one of some keys."""

    name = "required metadata"

    def __init__(self, keys: Iterable[str]) -> None:
        if isinstance(keys, str):
            raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
                f"keys must be several texts, as [{keys!r}], not one"
            )
        self._keys = tuple(_checks.instance("each of keys", key, str) for key in keys)

    def check(self, checkpoint: OpenCheckpoint) -> Iterator[Finding]:
        custom = checkpoint.custom
        present = custom if isinstance(custom, Mapping) else {}
        for key in self._keys:
            if key not in present:
                yield Finding.error(
                    f"the custom metadata of {checkpoint.info.prefix} lacks {key!r}"
                )


class SameWorldSize:
    """Refuses a checkpoint that a job of another size saved: for runs that must not reshard."""

    name = "same world size"

    def check(self, checkpoint: OpenCheckpoint, world_size: int) -> Iterator[Finding]:
        info = checkpoint.info
        if info.world_size != world_size:
            yield Finding.error(
                f"{info.prefix} was saved by {info.world_size} ranks, and this job has {world_size}"
            )


def checked_checkers(name: str, checkers: Sequence[Checker]) -> tuple[Checker, ...]:
    """``checkers`` as a tuple, or ``ValueError`` unless each has a name and a ``check()``."""
    if not isinstance(checkers, list | tuple):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"{name} must be several checkers, as a list, not {checkers!r}"
        )
    for checker in checkers:
        _checks.having(f"each of {name}", checker, "checker", "check")
        if not isinstance(getattr(checker, "name", None), str):
            raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
                f"each of {name} must have a name, a text, and {checker!r} has none"
            )
    return tuple(checkers)


def capped(lines: Sequence[str]) -> list[str]:
    """The lines, indented; of many the first 20 and how many more there are."""
    shown = [f"  {line}" for line in lines[:_SHOWN_LINES]]
    more = len(lines) - len(shown)
    return [*shown, f"  ... and {more} more"] if more else shown


def _unreadable_values(found: Found) -> Iterator[Finding]:
    for root, encoded in (("state", found.record.tree), ("custom", found.record.custom)):
        try:
            decoded(found, encoded, root=root)
        except (CorruptedError, IncompatibleVersionError) as error:
            yield Finding.error(str(error))


def _wrong_files(storage: Storage, found: Found) -> Iterator[Finding]:
    """One error for each object that is not there as the record says, in the record's order. It
    does not say the size of a table beside its file: that is compared when it is read."""
    sizes: dict[str, int | None] = {}
    for file in found.record.files:
        prefix = file.prefix or found.prefix
        sizes |= dict.fromkeys(f"{prefix}/{name}" for name in file.names)
        sizes[f"{prefix}/{file.name}"] = file.size_bytes
    problems: dict[str, str] = {}

    def look(key: str) -> None:
        try:
            size_bytes = storage.stat(key).size_bytes
        except ObjectNotFoundError:
            problems[key] = "this file of the checkpoint is gone"
        except ValueError as error:
            problems[key] = f"there can be no such file: {error}"
        except CheckpointError as error:
            if error.transient:
                raise
            problems[key] = f"this file cannot be looked at: {error.message}"
        else:
            if sizes[key] not in {None, size_bytes}:
                problems[key] = (
                    f"this file was written with {sizes[key]} bytes and now has {size_bytes}"
                )

    run_all(sizes, look, lanes=_STAT_LANES)
    return (Finding.error(f"{key}: {problems[key]}") for key in sizes if key in problems)


def _run(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check finds. One that fails has found that: it must not pass for one that is
    content, and the others must still run. But a storage that does not answer just now says
    nothing of the checkpoint."""
    found: list[Finding] = []
    try:
        for finding in check():
            found.append(_checks.instance("what a check finds", finding, Finding))  # noqa: PERF401 -- what came before an error counts
    except Exception as error:
        if isinstance(error, CheckpointError) and error.transient:
            raise
        _log.warning("the check %r failed", name, exc_info=error)
        found.append(Finding.error(f"the check {name!r} failed: {type(error).__name__}: {error}"))
    return found
