"""What a rank has written, as it tells the committing rank, and the record's tensors from all of
them. Pure."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from holdfast.catalog._placing import box_bounds, placement_of_boxes, placement_of_grid
from holdfast.catalog._writing import BoxSource
from holdfast.distributed._flat import Held
from holdfast.format import StoredFile, StoredPlacement, StoredTensor
from holdfast.reshard import Box, Grid, IndexRuns, SavePlan

Bounds = tuple[tuple[int, int], ...]


class OwnLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf of one rank alone, which is whole in one of its files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one rank. ``boxes`` says what is in each of ``files``, if there are several: of
    one it is what the plan says. ``whole`` are files of whole tensors, with their numbers."""

    whole: tuple[tuple[int, StoredFile], ...] = ()
    files: tuple[StoredFile, ...] = ()
    boxes: tuple[tuple[tuple[str, Bounds], ...], ...] = ()
    own: tuple[OwnLeaf, ...] = ()

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Summary":
        return msgspec.json.decode(data, type=cls)


def summary_of(
    files: Sequence[StoredFile],
    groups: Sequence[Sequence[BoxSource]],
    own: Mapping[str, Held],
    whole: Sequence[tuple[int, StoredFile]] = (),
) -> Summary:
    """``groups`` are the boxes of each of ``files``."""
    leaves = tuple(
        OwnLeaf(
            name=source.name,
            dtype=own[source.name].dtype.code,
            shape=own[source.name].shape,
            file=number,
        )
        for number, group in enumerate(groups)
        for source in group
        if source.name in own
    )
    boxes = tuple(
        tuple((source.name, box_bounds(source.box)) for source in group if source.name not in own)
        for group in groups
    )
    return Summary(
        whole=tuple(whole), files=tuple(files), boxes=boxes if len(files) > 1 else (), own=leaves
    )


def files_of(summaries: Sequence[Summary]) -> tuple[StoredFile, ...]:
    """Every file in the order of its number: those of whole tensors come first."""
    whole = sorted(
        itertools.chain.from_iterable(summary.whole for summary in summaries),
        key=lambda numbered: numbered[0],
    )
    files = itertools.chain.from_iterable(summary.files for summary in summaries)
    return (*(file for _, file in whole), *files)


def tensors_of(plan: SavePlan, summaries: Sequence[Summary]) -> dict[str, StoredTensor]:
    """Where every leaf is, in files that are numbered as ``files_of`` lists them."""
    counts = [len(summary.files) for summary in summaries]
    before = sum(len(summary.whole) for summary in summaries)
    first = before + np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    several = _boxes_by_name(summaries, first.tolist())
    known: dict[tuple[int, int], StoredPlacement] = {}  # leaves that lie alike are many
    tensors = {}
    for tensor in plan.tensors:
        boxes = several.get(tensor.leaf.name)
        if boxes is None:
            key = (id(tensor.grid), id(tensor.writers))
            if key not in known:
                files = IndexRuns.of(first[tensor.writers.array()])
                known[key] = placement_of_grid(tensor.grid, files)
            placement = known[key]
        else:
            cells = _cells(tensor.grid, [*tensor.writers], counts, first.tolist())
            placement = _placement(tensor.leaf.shape, tensor.grid, [*cells, *boxes])
        tensors[tensor.leaf.name] = StoredTensor(
            dtype=tensor.leaf.dtype, shape=tensor.leaf.shape, placement=placement
        )
    for summary, start in zip(summaries, first.tolist(), strict=True):
        for leaf in summary.own:
            tensors[leaf.name] = whole_tensor(leaf.dtype, leaf.shape, start + leaf.file)
    return tensors


def whole_tensor(dtype: str, shape: tuple[int, ...], file: int) -> StoredTensor:
    """A tensor that is in one file as a whole."""
    placement = placement_of_grid(Grid.whole(shape), IndexRuns.of([file]))
    return StoredTensor(dtype=dtype, shape=shape, placement=placement)


def _boxes_by_name(
    summaries: Sequence[Summary], first: Sequence[int]
) -> dict[str, list[tuple[Box, int]]]:
    """The boxes of every leaf that are in the files of ranks that wrote several."""
    found: dict[str, list[tuple[Box, int]]] = {}
    for summary, start in zip(summaries, first, strict=True):
        for number, boxes in enumerate(summary.boxes):
            for name, bounds in boxes:
                box = Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
                found.setdefault(name, []).append((box, start + number))
    return found


def _cells(
    grid: Grid, writers: Sequence[int], counts: Sequence[int], first: Sequence[int]
) -> list[tuple[Box, int]]:
    """The cells that are in the only file of their writer."""
    return [
        (grid.box(cell), first[writer])
        for cell, writer in enumerate(writers)
        if counts[writer] == 1
    ]


def _placement(shape: tuple[int, ...], grid: Grid, boxes: list[tuple[Box, int]]) -> StoredPlacement:
    boxes.sort(key=lambda each: each[0].start)
    files = IndexRuns.of([file for _, file in boxes])
    if len(boxes) == grid.cells:
        return placement_of_grid(grid, files)
    return placement_of_boxes(shape, [box for box, _ in boxes], files)
