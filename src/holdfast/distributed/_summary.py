"""What a rank has written, as it tells the committing rank, and the record's tensors from all of
them. Pure."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.catalog._placing import box_bounds, placement_of_boxes, placement_of_grid
from holdfast.catalog._writing import BoxSource
from holdfast.distributed._borrowing import Borrowed
from holdfast.distributed._flat import Held
from holdfast.format import StoredFile, StoredPlacement, StoredTensor
from holdfast.reshard import Box, Grid, IndexRuns, SavePlan
from holdfast.reshard._save import TensorPlan

Bounds = tuple[tuple[int, int], ...]
Mask = npt.NDArray[np.bool_]


class OwnLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf of one rank alone, which is whole in one of its files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one rank. ``boxes`` says what is in each of ``files``, if there are several: of
    one it is what the plan says. ``whole`` are files of whole tensors, with their numbers.

    ``referred`` are the leaves of which this rank has written nothing, since the base holds its
    part: runs of their numbers in the plan. ``referred_own`` are such leaves of its own; their
    files are those of the base.
    """

    whole: tuple[tuple[int, StoredFile], ...] = ()
    files: tuple[StoredFile, ...] = ()
    boxes: tuple[tuple[tuple[str, Bounds], ...], ...] = ()
    own: tuple[OwnLeaf, ...] = ()
    referred: tuple[tuple[int, int, int], ...] = ()
    referred_own: tuple[OwnLeaf, ...] = ()

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


def tensors_of(
    plan: SavePlan, summaries: Sequence[Summary], borrowed: Borrowed
) -> dict[str, StoredTensor]:
    """Where every leaf is, in files that are numbered as ``files_of`` lists them, and those that
    come to be ``borrowed`` behind them."""
    numbering = _Numbering(summaries)
    known: dict[tuple[int, int], StoredPlacement] = {}  # leaves that lie alike are many
    referring = _referring(len(plan.tensors), summaries)
    tensors = {}
    for number, tensor in enumerate(plan.tensors):
        leaf = tensor.leaf
        borrowing = _borrowing(tensor, referring[number]) if referring is not None else None
        if borrowing is not None and borrowing.all():
            placement = borrowed.placement(leaf.name)
        elif borrowing is not None or leaf.name in numbering.several:
            placement = _mixed(tensor, numbering, borrowed, borrowing)
        else:
            key = (id(tensor.grid), id(tensor.writers))
            if key not in known:
                files = IndexRuns.of(numbering.first[tensor.writers.array()])
                known[key] = placement_of_grid(tensor.grid, files)
            placement = known[key]
        tensors[leaf.name] = StoredTensor(dtype=leaf.dtype, shape=leaf.shape, placement=placement)
    for summary, start in zip(summaries, numbering.first.tolist(), strict=True):
        for own in summary.own:
            tensors[own.name] = whole_tensor(own.dtype, own.shape, start + own.file)
        for own in summary.referred_own:
            tensors[own.name] = whole_tensor(own.dtype, own.shape, borrowed.number(own.file))
    return tensors


def whole_tensor(dtype: str, shape: tuple[int, ...], file: int) -> StoredTensor:
    """A tensor that is in one file as a whole."""
    placement = placement_of_grid(Grid.whole(shape), IndexRuns.of([file]))
    return StoredTensor(dtype=dtype, shape=shape, placement=placement)


class _Numbering:
    """Where the files of each rank begin in the record, how many each has, and the boxes of every
    leaf that are in the files of ranks that wrote several."""

    def __init__(self, summaries: Sequence[Summary]) -> None:
        self.counts = np.array([len(summary.files) for summary in summaries], dtype=np.int64)
        before = sum(len(summary.whole) for summary in summaries)
        self.first = before + np.cumsum(self.counts) - self.counts
        self.several: dict[str, list[tuple[Box, int]]] = {}
        for summary, start in zip(summaries, self.first.tolist(), strict=True):
            for number, boxes in enumerate(summary.boxes):
                for name, bounds in boxes:
                    box = Box(tuple(low for low, _ in bounds), tuple(high for _, high in bounds))
                    self.several.setdefault(name, []).append((box, start + number))


def _referring(leaves: int, summaries: Sequence[Summary]) -> Mask | None:
    """Which leaves, by number, are referred to by which ranks; ``None`` if none is by any."""
    if not any(summary.referred for summary in summaries):
        return None
    referring = np.zeros((leaves, len(summaries)), dtype=np.bool_)
    for rank, summary in enumerate(summaries):
        referring[IndexRuns(runs=summary.referred).array(), rank] = True
    return referring


def _borrowing(tensor: TensorPlan, referring: Mask) -> Mask | None:
    """Which cells of a leaf are referred to, by their writers; ``None`` if none is."""
    return referring[tensor.writers.array()] if referring.any() else None


def _mixed(
    tensor: TensorPlan, numbering: _Numbering, borrowed: Borrowed, borrowing: Mask | None
) -> StoredPlacement:
    """A leaf whose parts are in the only file of their writer, in one of several, or borrowed."""
    grid, name = tensor.grid, tensor.leaf.name
    if borrowing is not None and name not in numbering.several:
        numbers = borrowed.of_cells(name, grid, borrowing)
        if numbers is not None:  # so that not every cell has to be looked at
            files = numbering.first[tensor.writers.array()]
            files[borrowing] = numbers
            return placement_of_grid(grid, IndexRuns.of(files))
    boxes = [*numbering.several.get(name, ())]
    for cell, writer in enumerate(tensor.writers):
        if borrowing is not None and borrowing[cell]:
            boxes += borrowed.within(name, grid.box(cell))
        elif numbering.counts[writer] == 1:
            boxes.append((grid.box(cell), int(numbering.first[writer])))
    boxes.sort(key=lambda each: each[0].start)
    runs = IndexRuns.of([file for _, file in boxes])
    if len(boxes) == grid.cells:
        return placement_of_grid(grid, runs)
    return placement_of_boxes(tensor.leaf.shape, [box for box, _ in boxes], runs)
