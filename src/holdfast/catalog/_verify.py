"""Reads a checkpoint to see whether it is what was written. Changes nothing.

Damage is collected, not raised: whoever verifies wants to know all of it.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast import _checks
from holdfast._lanes import run_all
from holdfast.catalog._committed import Found, find_committed
from holdfast.catalog._names import attempt_of_shard, record_key
from holdfast.catalog._opened import decoded
from holdfast.catalog._placing import StoredBoxes
from holdfast.catalog._reading import TensorReader, Tick
from holdfast.catalog._shard_read import OpenShard
from holdfast.catalog._shards import FILES_AT_ONCE
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError, LoadError
from holdfast.storage._uncached import UncachedStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong: in which file, and with which tensor if that is known."""

    file: str
    tensor: str | None
    problem: str

    def __str__(self) -> str:
        tensor = f"tensor {self.tensor!r}: " if self.tensor is not None else ""
        return f"{self.file}: {tensor}{self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found. ``files`` counts those that the record names, readable or not;
    ``checked_bytes`` says how much tensor data was read."""

    prefix: str
    files: int
    checked_bytes: int
    damage: tuple[Damage, ...]

    @property
    def is_intact(self) -> bool:
        """Whether no damage was found in what was read."""
        return not self.damage


def verify_checkpoint(
    storage: Storage,
    prefix: str,
    *,
    part: tuple[int, int] = (1, 1),
    progress: Tick = lambda _: None,
) -> VerifyReport:
    """Verify every header, table and placement, and all chunks, or one part of several.

    With ``part=(2, 10)`` the second tenth of the chunks is read: ten such calls read all of
    them, in any order. ``progress`` is told the number of bytes as they are read, from several
    threads. A commit record that cannot be read is damage, too; ``CheckpointNotFoundError`` if
    there is none.
    """
    nth, of = part
    _checks.count("part[1]", of, least=1)
    if _checks.count("part[0]", nth, least=1) > of:
        raise ValueError(f"part must be (1, {of}) to ({of}, {of}), not {part!r}")
    batches = itertools.count()
    stored = UncachedStorage(storage)
    return _verified(stored, prefix, lambda: next(batches) % of == nth - 1, progress)


def verify_structure(storage: Storage, prefix: str) -> VerifyReport:
    """Verify that every file is there with its size, and every header, table and placement, as
    ``verify_checkpoint`` does, but read no chunks: a few small requests for each file."""
    return _verified(storage, prefix, None, lambda _: None)


def _verified(
    storage: Storage, prefix: str, turn: Callable[[], bool] | None, progress: Tick
) -> VerifyReport:
    """``turn`` is asked, batch by batch of chunks, whether to read it; without, none is."""
    try:
        found = find_committed(storage, prefix)
    except (CorruptedError, IncompatibleVersionError) as error:
        return VerifyReport(prefix=prefix, files=0, checked_bytes=0, damage=(_damage(error),))
    reader = TensorReader(storage, prefix, found.record)
    damage: list[Damage] = []
    _check_values(found, damage)
    tensors = dict(_covered(found, damage))
    checked: list[int] = []

    def tick(nbytes: int) -> None:
        checked.append(nbytes)
        progress(nbytes)

    files = len(found.record.files)
    for first in range(0, files, FILES_AT_ONCE):
        numbers = range(first, min(first + FILES_AT_ONCE, files))
        opened = _open(reader, numbers, damage)
        named = _check_tensors(reader, tensors, numbers, opened, damage)
        if turn is not None:
            shards = [opened[index] for index in sorted(opened)]
            borrowed = {opened[index].key: named[index] for index in opened if _other(found, index)}
            bad = reader.verify(shards, only=borrowed, turn=turn, tick=tick)
            damage += [Damage(file=b.key, tensor=b.tensor, problem=b.description) for b in bad]
    return VerifyReport(
        prefix=prefix, files=files, checked_bytes=sum(checked), damage=tuple(damage)
    )


def _check_values(found: Found, damage: list[Damage]) -> None:
    """See that the tree and the custom metadata can be read, and refer to tensors that exist."""
    for root, encoded in (("state", found.record.tree), ("custom", found.record.custom)):
        try:
            decoded(found, encoded, root=root)
        except (CorruptedError, IncompatibleVersionError) as error:
            damage.append(_damage(error))


def _covered(found: Found, damage: list[Damage]) -> Iterator[tuple[str, StoredBoxes]]:
    """Every tensor whose parts are all of it, once."""
    for name, tensor in found.record.tensors.items():
        stored = StoredBoxes.of(tensor)
        try:
            stored.check(name, record_key(found.prefix))
        except CorruptedError as error:
            damage.append(_damage(error, name))
        else:
            yield name, stored


def _open(reader: TensorReader, numbers: range, damage: list[Damage]) -> dict[int, OpenShard]:
    """Open these files, side by side. Returns those that are what the record says."""
    opened: dict[int, OpenShard] = {}
    errors: dict[int, CheckpointError] = {}

    def run(index: int) -> None:
        try:
            opened[index] = reader.shard(index)
        except CheckpointError as error:
            errors[index] = error

    run_all(numbers, run, lanes=FILES_AT_ONCE // 2)
    damage += [_damage(errors[index]) for index in sorted(errors)]
    return opened


def _other(found: Found, index: int) -> bool:
    """Whether a file is of another save: the record says which of its entries are its own."""
    return attempt_of_shard(found.record.files[index].name) != found.record.attempt


def _check_tensors(
    reader: TensorReader,
    tensors: dict[str, StoredBoxes],
    numbers: range,
    opened: dict[int, OpenShard],
    damage: list[Damage],
) -> dict[int, set[str]]:
    """See that every part in these files is there as the record says, and return the names of
    their entries, by file. A tensor of which one is not is damage once."""
    named: dict[int, set[str]] = {index: set() for index in opened}
    for name, stored in [*tensors.items()]:
        try:
            for box, index in stored.in_files(numbers, opened):
                named[index].add(reader.placed(name, box, opened[index]).key)
        except CorruptedError as error:
            damage.append(_damage(error, name))
            del tensors[name]
    return named


def _damage(error: CheckpointError, tensor: str | None = None) -> Damage:
    """What an error says, unless trying again may help: that is raised."""
    if error.transient or isinstance(error, LoadError):
        raise error
    return Damage(file=error.path or "", tensor=tensor, problem=error.message)
