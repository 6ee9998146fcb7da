"""What one rank writes in one save: its own files, and files of whole tensors from all ranks.

Knows keys, sources and the storage; knows nothing of commits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from holdfast.catalog._names import model_name, shard_key, table_name
from holdfast.catalog._placing import box_bounds
from holdfast.catalog._shard_write import Tick, write_shard
from holdfast.catalog._writing import BoxSource, Retry, file_bytes, grouped
from holdfast.contracts import Storage
from holdfast.distributed._arranging import Arrangement
from holdfast.distributed._assembling import Assembler
from holdfast.distributed._bulk import Course
from holdfast.distributed._flat import Flat, Held
from holdfast.distributed._options import CheckpointFormat
from holdfast.distributed._summary import Summary, summary_of
from holdfast.format import CompressionLevel, ShardEntry, StoredFile
from holdfast.reshard import Box, Part, split_box

HUGGING_FACE = {"format": "pt"}
"""What readers of the Hugging Face layout look for in a file's metadata."""


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

    def total_bytes(self) -> int:
        """How many bytes this rank writes, before they are compressed."""
        steps = sum(
            Box.whole(step.leaf.shape).size * step.leaf.itemsize
            for step in self.arrangement.steps
            if step.writer == self.rank
        )
        own = sum(held.nbytes for held in self._own().values())
        rest = self.arrangement.rest.bytes_of
        return steps + own + (rest[self.rank] if self.rank < len(rest) else 0)

    def write(self, *, tick: Tick, retry: Retry, course: Course | None) -> Summary:
        """Write it all, durably. ``course`` is the way to other ranks, if anything is sent."""
        whole = self._write_whole(tick, course)
        own = self._own()
        groups = [*grouped(self._sources(own), self.level)]
        files: list[StoredFile] = []
        for part, group in enumerate(groups):
            key = shard_key(self.prefix, self.attempt, self.rank, part)
            sources = [each.source for each in group]
            write = partial(write_shard, self.storage, key, sources, level=self.level, tick=tick)
            files.append(retry(write).file)
        return summary_of(files, groups, own, whole)

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


def _source(held: Held, part: Part) -> BoxSource:
    box = part.box
    entry = ShardEntry(
        name=held.name,
        dtype=held.dtype.code,
        shape=box.shape,
        box=None if box.shape == held.shape else box_bounds(box),
    )
    return BoxSource(name=held.name, box=box, source=held.source(entry, part))
