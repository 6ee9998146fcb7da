"""What another checkpoint already holds, byte for byte, of the leaves that a rank is to write.

Reads that checkpoint's chunk tables and this rank's memory. Knows no commits, and writes nothing.

A leaf is the same if the other checkpoint has one of its name, dtype and shape, stored in the very
boxes in which it would be written here, and the digests of all their chunks (XXH3-128) agree. The
first chunk that differs ends the comparison, so that a leaf that was trained costs one chunk.
"""

import itertools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from holdfast._lanes import run_all
from holdfast.catalog._committed import Found, find_committed
from holdfast.catalog._names import is_model_name, record_key
from holdfast.catalog._placing import StoredBoxes
from holdfast.catalog._reading import TensorReader
from holdfast.catalog._shard_write import Source, Tick, raw_bytes
from holdfast.catalog._writing import BoxSource
from holdfast.contracts import Operation, Storage
from holdfast.distributed._watch import Watch
from holdfast.errors import CheckpointError
from holdfast.format import DIGEST_BYTES, StoredFile, StoredTensor, digest
from holdfast.reshard import Box
from holdfast.storage._roots import is_in_another

_log = logging.getLogger("holdfast.distributed")

LEAST_BYTES: Final = 4096
"""A leaf of which a rank has less is written: a reference would bring little and keep a file."""

LEAST_SHARE: Final = 32
"""A file is referred to only if a 32nd of it is wanted, by all ranks together. Otherwise a chain of
saves would keep every file for whatever little in it has not changed since."""

_LANES: Final = 16


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a save may refer to, as rank 0 tells the others."""

    prefix: str
    attempt: str

    @classmethod
    def of(cls, found: Found) -> Self:
        return cls(prefix=found.prefix, attempt=found.record.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPart:
    """What a rank has to write of a leaf: the leaf's whole shape, and its boxes here."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[BoxSource, ...]

    @property
    def nbytes(self) -> int:
        return sum(raw_bytes(each.source.entry) for each in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A part of a leaf that the base holds: how many bytes it has, and how many bytes it takes in
    which of the base's files, by their numbers."""

    nbytes: int
    stored: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What a rank does not write, since the base has it: leaves by name."""

    leaves: Mapping[str, Match]

    @property
    def nbytes(self) -> int:
        """How many bytes are not written."""
        return sum(match.nbytes for match in self.leaves.values())


NO_REFERENCES: Final = References(leaves={})


def compare(
    operation: Operation,
    storage: Storage,
    base: Base,
    parts: Iterable[LeafPart],
    *,
    prefix: str,
    ticking: Callable[[Callable[[], None]], Tick],
    found: Found | None = None,
) -> References:
    """What this rank need not write of ``parts`` in a save of ``prefix``. All ranks call this.

    ``found`` is the base if it was read already; a rank that sees it no more refers to nothing.
    ``ticking`` makes what is told of the bytes as they are looked at.
    """

    def work(proceed: Callable[[], None]) -> tuple[Found | None, dict[str, Match]]:
        seen = find_base(storage, base) if found is None else found
        if seen is None:
            return None, {}
        tick = ticking(proceed)
        return seen, find_matches(storage, seen, parts, prefix=prefix, tick=tick)

    seen, matches = Watch(operation).run(work)
    told = operation.all_gather(msgspec.json.encode([*shares_of(matches).items()]))
    if seen is None:
        return NO_REFERENCES
    shares = [dict(msgspec.json.decode(each, type=list[tuple[int, int]])) for each in told]
    return worth_keeping(matches, seen.record.files, shares)


def find_base(storage: Storage, base: Base) -> Found | None:
    """The base as this rank sees it; ``None``, with a warning, if it is not to be had here."""
    try:
        found = find_committed(storage, base.prefix)
    except CheckpointError as error:
        _log.warning("written anew rather than referred to: %s", error)
        return None
    if found.record.attempt != base.attempt:
        _log.warning("written anew rather than referred to: %s was replaced just now", base.prefix)
        return None
    return found


def find_matches(
    storage: Storage, base: Found, parts: Iterable[LeafPart], *, prefix: str, tick: Tick
) -> dict[str, Match]:
    """Those of ``parts`` that ``base`` holds, for a save of ``prefix``. ``tick`` is told of the
    bytes of each when it was looked at, and 0 often.

    A file of the base that is missing or damaged is not referred to, and a warning says so.
    """
    reader = TensorReader(storage, base.prefix, base.record)
    others = _of_other_stores(storage, base)
    likely: list[tuple[LeafPart, tuple[int, ...]]] = []
    for part in parts:
        files = _files_of(base, part, prefix)
        if files is None or not others.isdisjoint(files):
            tick(part.nbytes)
        else:
            likely.append((part, files))
    bad = _unusable(reader, {number for _, files in likely for number in files})
    matches: dict[str, Match] = {}
    for part, files in likely:
        match = _match(reader, part, files, tick) if bad.isdisjoint(files) else None
        if match is not None:
            matches[part.name] = match
        tick(part.nbytes)
    return matches


def shares_of(matches: Mapping[str, Match]) -> Mapping[int, int]:
    """How many bytes of which files of the base, by number, are matched."""
    shares: Counter[int] = Counter()
    for match in matches.values():
        shares.update(match.stored)
    return shares


def worth_keeping(
    matches: Mapping[str, Match], files: Sequence[StoredFile], shares: Iterable[Mapping[int, int]]
) -> References:
    """The matches in files of which all ranks together, whose ``shares`` these are, want enough.
    Pure; it is the same files on all ranks."""
    totals: Counter[int] = Counter()
    for each in shares:
        totals.update(each)
    little = {
        number for number, total in totals.items() if total * LEAST_SHARE < files[number].size_bytes
    }
    return References(
        leaves={name: match for name, match in matches.items() if little.isdisjoint(match.stored)}
    )


def _files_of(base: Found, part: LeafPart, prefix: str) -> tuple[int, ...] | None:
    """Which files of the base hold the boxes of a part, each exactly as it is, or ``None``."""
    tensor = base.record.tensors.get(part.name)
    if tensor is None or (tensor.dtype, tensor.shape) != (part.dtype, part.shape):
        return None
    if part.nbytes < LEAST_BYTES:
        return None
    try:
        found = [*_numbers(tensor, part, record_key(base.prefix))]
    except CheckpointError as error:
        _log.warning("written anew rather than referred to: %s", error)
        return None
    files = tuple(number for number in found if number is not None)
    usable = all(_is_usable(base, number, prefix) for number in files)
    return files if usable and len(files) == len(found) else None


def _numbers(tensor: StoredTensor, part: LeafPart, path: str) -> Iterator[int | None]:
    ((first, _, count), *more) = tensor.placement.files
    if count == 1 and not more:  # in one piece, as most are
        whole = Box.whole(tensor.shape)
        yield from (first if each.box == whole else None for each in part.sources)
        return
    stored = StoredBoxes.of(tensor)
    stored.check(part.name, path)
    for each in part.sources:
        met = [*itertools.islice(stored.within(each.box), 2)]
        yield met[0][1] if [box for box, _ in met] == [each.box] else None


def _is_usable(base: Found, number: int, prefix: str) -> bool:
    """Not if it is a model file in the folder that the save is for. Those of a record's own folder
    have an index for others to read, and this record is about no model."""
    file = base.record.files[number]
    return not (is_model_name(file.name) and (file.prefix or base.prefix) == prefix)


def _of_other_stores(storage: Storage, base: Found) -> frozenset[int]:
    """The files that are in a folder which is a store of its own as well. Who cleans up there does
    not see who refers to them here."""
    prefixes = [file.prefix or base.prefix for file in base.record.files]
    theirs = {prefix for prefix in {*prefixes} if is_in_another(storage, prefix)}
    for prefix in sorted(theirs):
        _log.warning(
            "written anew rather than referred to: %s is in a folder that is a store of its own, "
            "where it may be deleted",
            prefix,
        )
    return frozenset(number for number, prefix in enumerate(prefixes) if prefix in theirs)


def _unusable(reader: TensorReader, numbers: Collection[int]) -> frozenset[int]:
    """Those of the files that cannot be opened, or are not the ones that were written."""
    bad: list[int] = []

    def open_file(number: int) -> None:
        try:
            reader.shard(number)
        except CheckpointError as error:
            _log.warning("written anew rather than referred to: %s", error)
            bad.append(number)

    run_all(sorted(numbers), open_file, lanes=_LANES)
    return frozenset(bad)


def _match(reader: TensorReader, part: LeafPart, files: Sequence[int], tick: Tick) -> Match | None:
    stored: Counter[int] = Counter()
    for each, number in zip(part.sources, files, strict=True):
        try:
            shard = reader.shard(number)
            placed = reader.placed(part.name, each.box, shard)
        except CheckpointError as error:
            _log.warning("written anew rather than referred to: %s", error)
            return None
        if not _is_same(each.source, shard.table.digests_of(placed), tick):
            return None
        stored[number] += placed.stored_bytes
    return Match(nbytes=part.nbytes, stored=dict(stored))


def _is_same(source: Source, digests: memoryview, tick: Tick) -> bool:
    at = 0
    for chunk in source.chunks():
        if digest(chunk) != digests[at : at + DIGEST_BYTES]:
            return False
        at += DIGEST_BYTES
        tick(0)
    return at == len(digests)


def parts_of(
    sources: Iterable[BoxSource], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[LeafPart]:
    """Boxes that a rank is to write, by leaf; those of a leaf follow each other."""
    for name, boxes in itertools.groupby(sources, key=operator.attrgetter("name")):
        group = tuple(boxes)
        yield LeafPart(
            name=name, dtype=group[0].source.entry.dtype, shape=shapes[name], sources=group
        )
