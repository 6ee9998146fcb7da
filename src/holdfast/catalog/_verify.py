"""Reads a checkpoint to see whether it is what was written. Changes nothing.

Damage is collected, not raised: whoever verifies wants to know all of it.
"""

from dataclasses import dataclass

from holdfast import _checks
from holdfast.catalog._committed import Found, find_committed
from holdfast.catalog._names import record_key
from holdfast.catalog._opened import decoded
from holdfast.catalog._placing import StoredBoxes
from holdfast.catalog._reading import TensorReader, Tick
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError, CorruptedError, IncompatibleVersionError, LoadError


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
    """What a verification found. ``checked_bytes`` says how much tensor data was read."""

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
    try:
        found = find_committed(storage, prefix)
    except (CorruptedError, IncompatibleVersionError) as error:
        return VerifyReport(prefix=prefix, files=0, checked_bytes=0, damage=(_damage(error),))
    reader = TensorReader(storage, prefix, found.record)
    damage: list[Damage] = []
    _check_values(found, damage)
    readable = _check_files(reader, len(found.record.files), damage)
    _check_tensors(reader, found, readable, damage)
    checked: list[int] = []

    def tick(nbytes: int) -> None:
        checked.append(nbytes)
        progress(nbytes)

    bad = reader.verify(sorted(readable), part=(nth, of), tick=tick)
    damage += [Damage(file=b.key, tensor=b.tensor, problem=b.description) for b in bad]
    return VerifyReport(
        prefix=prefix,
        files=len(readable),
        checked_bytes=sum(checked),
        damage=tuple(damage),
    )


def _check_values(found: Found, damage: list[Damage]) -> None:
    """See that the tree and the custom metadata can be read, and refer to tensors that exist."""
    for root, encoded in (("state", found.record.tree), ("custom", found.record.custom)):
        try:
            decoded(found, encoded, root=root)
        except (CorruptedError, IncompatibleVersionError) as error:
            damage.append(_damage(error))


def _check_files(reader: TensorReader, count: int, damage: list[Damage]) -> set[int]:
    """Open every file. Returns the numbers of those that are what the record says."""
    readable = set()
    for index in range(count):
        try:
            reader.shard(index)
        except CheckpointError as error:
            damage.append(_damage(error))
        else:
            readable.add(index)
    return readable


def _check_tensors(
    reader: TensorReader, found: Found, readable: set[int], damage: list[Damage]
) -> None:
    """See that every part of every tensor is where the record says, in files that are readable."""
    for name, tensor in found.record.tensors.items():
        try:
            stored = StoredBoxes.of(tensor)
            stored.check(name, record_key(found.prefix))
            for box, index in stored.in_files(readable):
                reader.placed(name, box, index)
        except CorruptedError as error:
            damage.append(_damage(error, name))


def _damage(error: CheckpointError, tensor: str | None = None) -> Damage:
    """What an error says, unless trying again may help: that is raised."""
    if error.transient or isinstance(error, LoadError):
        raise error
    return Damage(file=error.path or "", tensor=tensor, problem=error.message)
