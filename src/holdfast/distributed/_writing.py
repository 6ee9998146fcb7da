"""What one rank writes in one save: its own files, and files of whole tensors from all ranks.

Knows keys, sources and the storage; knows nothing of commits. What the save refers to in another
checkpoint is not written; which leaves these are is decided elsewhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.catalog._names import model_name, shard_key, table_name
from holdfast.catalog._placing import box_bounds
from holdfast.catalog._shard_write import Source, Tick, write_shard
from holdfast.catalog._writing import BoxSource, Retry, file_bytes, grouped
from holdfast.contracts import Storage
from holdfast.distributed._arranging import Arrangement
from holdfast.distributed._assembling import Assembler
from holdfast.distributed._bulk import Course
from holdfast.distributed._flat import Flat, Held
from holdfast.distributed._kept_source import KeptSource
from holdfast.distributed._options import CheckpointFormat
from holdfast.distributed._referring import NO_REFERENCES, LeafPart, References, parts_of
from holdfast.distributed._snapshot import Kept
from holdfast.distributed._summary import OwnLeaf, Summary, summary_of
from holdfast.distributed._units import Span
from holdfast.format import CompressionLevel, ShardEntry, StoredFile
from holdfast.reshard import Box, IndexRuns, Part, split_box

HUGGING_FACE = {"format": "pt"}
"""What readers of the Hugging Face layout look for in a file's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a rank has to say when it is done. ``written_bytes`` is the size of its files,
    ``referred_bytes`` that of the tensors it did not write because another checkpoint has them."""

    summary: Summary
    written_bytes: int
    referred_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWriter:
    """All that a rank needs to know to write its part of a save."""

    storage: Storage
    prefix: str
    attempt: str
    rank: int
    form: CheckpointFormat
    level: CompressionLevel
    flat: Flat
    arrangement: Arrangement
    references: References = NO_REFERENCES

    def total_bytes(self) -> int:
        """How many bytes this rank writes, before they are compressed."""
        steps = sum(
            Box.whole(step.leaf.shape).size * step.leaf.itemsize
            for step in self.arrangement.steps
            if step.writer == self.rank
        )
        own = sum(held.nbytes for held in self._own().values())
        rest = self.arrangement.rest.bytes_of
        planned = steps + own + (rest[self.rank] if self.rank < len(rest) else 0)
        return planned - self.references.nbytes

    def parts(self) -> Iterator[LeafPart]:
        """What this rank has of every leaf that is not written as a whole tensor of all ranks."""
        own = self._own()
        shapes = {held.name: held.shape for held in (*self.flat.shared.values(), *own.values())}
        return parts_of(self._sources(own), shapes)

    def needs(self) -> dict[Kept, list[Span]] | None:
        """What is read of what a snapshot kept; ``None`` if it is all that there is."""
        if self.arrangement.steps:
            return None
        needed: dict[Kept, list[Span]] = {}
        for each in self._sources(self._own()):
            source = each.source
            if isinstance(source, KeptSource) and each.name not in self.references.leaves:
                needed.setdefault(source.kept, []).append(source.span())
        return needed

    def write(self, *, tick: Tick, retry: Retry, course: Course | None) -> Written:
        """Write it all, durably. ``course`` is the way to other ranks, if anything is sent."""
        whole = self._write_whole(tick, course)
        own = self._own()
        leaves = self.references.leaves
        sources = (source for source in self._sources(own) if source.name not in leaves)
        groups = [*grouped(sources, self.level)]
        files: list[StoredFile] = []
        for part, group in enumerate(groups):
            key = shard_key(self.prefix, self.attempt, self.rank, part)
            boxes = [_last(each.source) for each in group]
            write = partial(write_shard, self.storage, key, boxes, level=self.level, tick=tick)
            files.append(retry(write).file)
        summary = summary_of(files, groups, own, whole)
        return Written(
            summary=msgspec.structs.replace(
                summary, referred=self._referred(), referred_own=self._referred_own(own)
            ),
            written_bytes=sum(file.size_bytes for file in (*files, *(file for _, file in whole))),
            referred_bytes=self.references.nbytes,
        )

    def _referred(self) -> tuple[tuple[int, int, int], ...]:
        """The leaves of the plan that are referred to, by number."""
        leaves = self.references.leaves
        tensors = self.arrangement.rest.tensors if leaves else ()
        numbers = [number for number, each in enumerate(tensors) if each.leaf.name in leaves]
        return IndexRuns.of(numbers).runs

    def _referred_own(self, own: Mapping[str, Held]) -> tuple[OwnLeaf, ...]:
        """A leaf of a rank's own is in one piece, and so in one file of the base."""
        return tuple(
            OwnLeaf(name=name, dtype=own[name].dtype.code, shape=own[name].shape, file=file)
            for name, match in self.references.leaves.items()
            if name in own
            for file in match.stored
        )

    def _write_whole(self, tick: Tick, course: Course | None) -> list[tuple[int, StoredFile]]:
        """The files of whole tensors that are this rank's to write. What arrives from other ranks
        arrives once, so that such a file is not written again if it fails."""
        steps = self.arrangement.steps
        assembler = Assembler(
            steps,
            {**self.flat.shared, **self.flat.own},
            dict(self._parts()),
            rank=self.rank,
            course=course,
        )
        written = []
        for number in range(self.arrangement.files):
            mine = [n for n, step in enumerate(steps) if step.file == number]
            writer = steps[mine[0]].writer if mine else 0
            if writer != self.rank:
                continue
            sources = [assembler.source(index) for index in mine]
            key, table, metadata = self._whole_key(number)
            shard = write_shard(
                self.storage,
                key,
                sources,
                level=self.level,
                tick=tick,
                metadata=metadata,
                table_key=table,
            )
            written.append((number, shard.file))
        assembler.finish()
        return written

    def _whole_key(self, number: int) -> tuple[str, str | None, Mapping[str, str] | None]:
        if self.form is not CheckpointFormat.CONSOLIDATED:
            return shard_key(self.prefix, self.attempt, self.rank), None, None
        name = model_name(number + 1, self.arrangement.files, self.attempt)
        return f"{self.prefix}/{name}", f"{self.prefix}/{table_name(name)}", HUGGING_FACE

    def _own(self) -> Mapping[str, Held]:
        """This rank's own leaves, unless another rank writes them."""
        return {} if self.form is CheckpointFormat.SINGLE_FILE else self.flat.own

    def _parts(self) -> Iterator[tuple[tuple[str, Box], Part]]:
        """Where the boxes that this rank may have to send are in its memory."""
        for write in self.arrangement.whole.writes_of(self.rank):
            yield (write.leaf.name, write.part.box), write.part
        for name, held in self.flat.own.items():
            whole = Box.whole(held.shape)
            yield (name, whole), Part.alone(whole)

    def _sources(self, own: Mapping[str, Held]) -> Iterator[BoxSource]:
        limit = file_bytes(self.level)
        for write in self.arrangement.rest.writes_of(self.rank):
            held = self.flat.shared[write.leaf.name]
            for box in split_box(write.part.box, limit // held.dtype.itemsize):
                yield _source(held, write.part.within(box))
        for held in own.values():
            yield _source(held, Part.alone(Box.whole(held.shape)))


def _last(source: Source) -> Source:
    """A source that is read for the last time, unless it has to be written again."""
    return source.last() if isinstance(source, KeptSource) else source


def _source(held: Held, part: Part) -> BoxSource:
    box = part.box
    entry = ShardEntry(
        name=held.name,
        dtype=held.dtype.code,
        shape=box.shape,
        box=None if box.shape == held.shape else box_bounds(box),
    )
    return BoxSource(name=held.name, box=box, source=held.source(entry, part))
