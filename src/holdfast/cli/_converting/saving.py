"""Saves a checkpoint of holdfast's, on any storage: announced, durable, committed in one step, as
any save is. Knows where it goes, not what is in it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from holdfast.catalog import Attempt, Catalog
from holdfast.catalog._delete import delete_replaced
from holdfast.catalog._placing import box_bounds
from holdfast.catalog._shard_write import Tick, write_shard
from holdfast.catalog._writing import BoxSource, grouped
from holdfast.cli._converting.contents import Tensor, chunks_of
from holdfast.cli._exits import MisuseError
from holdfast.cli._place import PATIENCE, as_usage, catalog_at, path_of, real, said_store
from holdfast.contracts import COMMIT_RECORD
from holdfast.errors import CheckpointExistsError
from holdfast.format import CommitRecord, CompressionLevel, ShardEntry, StoredFile
from holdfast.reshard import Box
from holdfast.resilience import FaultToleranceHandler
from holdfast.storage._roots import roots_above


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCheckpoint:
    """A checkpoint that is to be: its store and its name there."""

    catalog: Catalog
    name: str

    @classmethod
    def at(cls, text: str) -> Self:
        """``runs/a/step_100``: the store is all but the last name, as for ``holdfast.save``. Two
        slashes say it outright: ``s3://bucket/run//a/step_100``."""
        path = path_of(text)
        if path is None:
            scheme, _, rest = text.partition("://")
            store, slash, name = rest.rstrip("/").partition("//")
            if not slash:
                store, _, name = rest.rstrip("/").rpartition("/")
            root = f"{scheme}://{store}"
        else:
            whole = real(path)
            store_path = said_store(text) or _store_above(whole)
            root, name = str(store_path), whole.relative_to(store_path).as_posix()
        if not name or root.endswith("://"):
            raise MisuseError(f"{text} names no checkpoint: write store/name, as runs/a/step_100")
        return cls(catalog=catalog_at(root), name=name)

    @property
    def url(self) -> str:
        return f"{self.catalog.storage.url}/{self.name}"

    def save(
        self,
        make: Callable[[Attempt, Tick], CommitRecord],
        *,
        overwrite: bool,
        tick: Tick,
    ) -> None:
        """Commit the record that ``make`` returns, which has written all that it names. Nothing is
        there until then, or what was there before."""
        try:
            with as_usage():
                attempt = self.catalog.begin(self.name, overwrite=overwrite)
        except CheckpointExistsError as error:
            raise CheckpointExistsError(
                "a checkpoint of this name is there already; nothing was written. Choose another "
                "name, or give --overwrite",
                path=self.url,
            ) from error

        def ticking(nbytes: int) -> None:
            attempt.keep_alive()
            tick(nbytes)

        with attempt:
            self.catalog.commit(attempt, make(attempt, ticking))
        if attempt.replaces is not None:
            delete_replaced(self.catalog.storage, attempt.replaces)


def _store_above(path: Path) -> Path:
    """The folder above; but one that has checkpoints already is part of the store whose lock file
    is above it: others there may refer to their files."""
    folder = path.parent
    marked = roots_above(path)
    return next(marked, folder) if any(folder.glob(f"*/{COMMIT_RECORD}")) else folder


@dataclass(slots=True, kw_only=True)
class Files:
    """The files of an attempt, as they are written, and which box of which tensor is in which."""

    catalog: Catalog
    attempt: Attempt
    level: CompressionLevel
    tick: Tick
    written: list[StoredFile] = field(default_factory=list)
    placed: dict[str, dict[Box, int]] = field(default_factory=dict)

    def write(self, rank: int, sources: Iterable[BoxSource], *, limit: int | None = None) -> None:
        """All of a rank's boxes, in one file unless that would get larger than ``limit``."""
        retry = FaultToleranceHandler(None, PATIENCE).execute_with_retry
        storage = self.catalog.storage
        for part, group in enumerate(grouped(sources, self.level, limit)):
            key = self.attempt.shard_key(rank, part)
            write = partial(write_shard, storage, key, [each.source for each in group])
            done = retry(partial(write, level=self.level, tick=self.tick))
            for each in group:
                self.placed.setdefault(each.name, {})[each.box] = len(self.written)
            self.written.append(done.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Bytes on their way to a shard: ``catalog``'s ``Source``."""

    entry: ShardEntry
    tensor: Tensor

    def chunks(self) -> Iterator[memoryview]:
        return chunks_of(self.tensor)


def box_source(name: str, shape: tuple[int, ...], box: Box, part: Tensor) -> BoxSource:
    """A box of a tensor of that shape and name, whose bytes are those of ``part``."""
    bounds = None if box.shape == shape else box_bounds(box)
    entry = ShardEntry(name=name, dtype=part.dtype, shape=box.shape, box=bounds)
    return BoxSource(name=name, box=box, source=_Source(entry=entry, tensor=part))
