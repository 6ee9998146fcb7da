"""``holdfast reshard``: a checkpoint rewritten as the files of another number of ranks.

Which of them would write what is planned as a save of that many ranks plans it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Final

import typer

from holdfast.catalog import Attempt
from holdfast.catalog._placing import placement_of_grid
from holdfast.catalog._shard_write import Tick, as_bytes
from holdfast.catalog._writing import PLAIN_FILE_BYTES, BoxSource, Facts, record_of
from holdfast.cli._arguments import CheckpointArgument
from holdfast.cli._converting.contents import Tensor
from holdfast.cli._converting.options import Compression, Overwrite
from holdfast.cli._converting.saving import Files, NewCheckpoint, box_source
from holdfast.cli._exits import Exit, MisuseError
from holdfast.cli._place import open_checkpoint
from holdfast.cli._progress import bar
from holdfast.cli._stored import StoredTensors
from holdfast.cli._text import clean, counted, put, size
from holdfast.format import CHUNK_BYTES, CommitRecord, CompressionLevel, StoredTensor, dtype_of
from holdfast.reshard import (
    Box,
    IndexRuns,
    Layout,
    Leaf,
    LeafList,
    RankGroup,
    SavePlan,
    Shard,
    plan_save,
)

_MOST_RANKS: Final = 65_536


def run(
    checkpoint: CheckpointArgument,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The new checkpoint, as runs/b/step_100.")
    ],
    *,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", help="How many files, one for each rank.")
    ],
    axis: Annotated[
        int | None,
        typer.Option(
            "--axis",
            metavar="DIM",
            help="Cut every tensor that has this dimension along it, a part for each rank. Without "
            "it tensors are dealt out whole, and cut only where that balances the files.",
        ),
    ] = None,
    compression: Compression = CompressionLevel.NONE,
    overwrite: Overwrite = False,
) -> int:
    """The new checkpoint has the same tensors, values, step and metrics, and needs no file of any
    other. Every byte that is read is compared with its digest, and the new one is there only when
    it is whole. It loads on any number of ranks, as any does: what changes is how many files there
    are."""
    if not 1 <= ranks <= _MOST_RANKS:
        raise MisuseError(f"--ranks must be 1 to {_MOST_RANKS}, not {ranks}")
    if axis is not None and axis < 0:
        raise MisuseError(f"--axis must be 0 or more, not {axis}")
    stored = StoredTensors(open_checkpoint(checkpoint))
    dims = max((len(tensor.shape) for tensor in stored.tensors.values()), default=0)
    if axis is not None and axis >= dims:
        told = counted(dims, "dimension")
        raise MisuseError(f"--axis {axis} counts from 0, and no tensor has more than {told}")
    new = NewCheckpoint.at(target)
    found = stored.opened.found
    if f"{stored.opened.storage.url}/{found.prefix}" == new.url:
        raise MisuseError(f"{target} is the checkpoint that is read; give another name")
    plan = _planned(stored, ranks, axis)
    total = sum(map(stored.nbytes, stored.tensors))
    with bar(clean(new.name), total) as tick:
        written: list[int] = []

        def make(attempt: Attempt, ticking: Tick) -> CommitRecord:
            files = Files(catalog=new.catalog, attempt=attempt, level=compression, tick=ticking)
            record = _written(stored, files, plan, ranks)
            written.append(len(record.files))
            return record

        new.save(make, overwrite=overwrite, tick=tick)
    tensors, files = counted(len(stored.tensors), "tensor"), counted(written[-1], "file")
    put(f"{clean(new.url)}: {tensors}, {size(total)}, {files}")
    return Exit.OK


def _planned(stored: StoredTensors, ranks: int, axis: int | None) -> SavePlan:
    everyone = tuple(range(ranks))
    layouts: tuple[Layout, ...] = ()
    if axis is not None:
        spread = IndexRuns.of(list(everyone))
        layouts = (Layout(mesh_shape=(ranks,), ranks=spread, placements=(Shard(axis),)),)
    leaves = tuple(
        Leaf(
            name=name,
            dtype=tensor.dtype,
            itemsize=dtype_of(tensor.dtype).itemsize,
            shape=tensor.shape,
            layout=0 if axis is not None and axis < len(tensor.shape) else None,
        )
        for name, tensor in stored.tensors.items()
    )
    group = RankGroup(ranks=everyone, leaves=LeafList(leaves=leaves, layouts=layouts))
    return plan_save([group], piece_bytes=CHUNK_BYTES)


def _written(stored: StoredTensors, files: Files, plan: SavePlan, ranks: int) -> CommitRecord:
    for rank in range(ranks):
        boxes = [(write.leaf.name, write.part.box) for write in plan.writes_of(rank)]
        sources = (_source(stored, name, box) for name, box in boxes)
        files.write(rank, sources, limit=PLAIN_FILE_BYTES)
    tensors = {}
    for tensor in plan.tensors:
        placed = files.placed[tensor.leaf.name]
        cells = [placed[tensor.grid.box(cell)] for cell in range(tensor.grid.cells)]
        placement = placement_of_grid(tensor.grid, IndexRuns.of(cells))
        tensors[tensor.leaf.name] = StoredTensor(
            dtype=tensor.leaf.dtype, shape=tensor.leaf.shape, placement=placement
        )
    record = stored.opened.found.record
    return record_of(
        files.attempt,
        Facts(step=record.step, metrics=record.metrics, custom=record.custom),
        tree=record.tree,
        files=files.written,
        tensors=tensors,
        world_size=ranks,
    )


def _source(stored: StoredTensors, name: str, box: Box) -> BoxSource:
    tensor = stored.tensors[name]
    part = Tensor(dtype=tensor.dtype, shape=box.shape, pieces=partial(_pieces, stored, name, box))
    return box_source(name, tensor.shape, box, part)


def _pieces(stored: StoredTensors, name: str, box: Box) -> Iterator[memoryview]:
    if not box.is_empty:
        for piece in stored.pieces(name, box):
            yield as_bytes(stored.read(name, piece))
