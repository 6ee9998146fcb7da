"""From what the ranks of a DCP save have told to the commit record's tensors and tree. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.catalog._placing import placement_of_boxes, placement_of_grid
from holdfast.errors import SaveError
from holdfast.format import (
    LeafRef,
    StoredFile,
    StoredPlacement,
    StoredTensor,
    decode_value,
    encode_value,
)
from holdfast.integrations.dcp._items import Told, Written
from holdfast.integrations.dcp._tree import tree_of
from holdfast.reshard import Box, Grid, IndexRuns, check_coverage

NOTES: Final = "dcp"
"""The key of the custom metadata under which stands what DCP needs besides tensors and tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a record says is in a checkpoint; tree and notes are typed values, ``tree`` encoded."""

    files: Sequence[StoredFile]
    tensors: Mapping[str, StoredTensor]
    tree: object
    notes: Mapping[str, Any]


def contents_of(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> Contents:
    """``SaveError`` unless every tensor was written exactly once, all of it."""
    told: dict[str, list[Told]] = {}
    for result in (each for of_rank in results for each in of_rank):
        told.setdefault(result.index.fqn, []).append(result.storage_data)
    files, tensors = _stored(each for of_key in told.values() for one in of_key for each in one[0])
    values: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for key in _ordered(metadata):
        kind = metadata.state_dict_metadata[key]
        if key not in told:
            raise SaveError(f"no rank has written {key!r}; nothing was committed")
        if isinstance(kind, BytesStorageMetadata):
            values[key] = decode_value(told[key][0].value, root=repr(key))
        elif key in tensors:
            values[key] = LeafRef(kind="tensor", name=key)
        else:  # only parts of it are here, each a tensor of its own
            written = [each for one in told[key] for each in one.written]
            starts = {each.name: _start_of(key, each) for each in written}
            values[key] = {name: LeafRef(kind="tensor", name=name) for name in starts}
            parts[key] = {"shape": [*kind.size], "starts": starts}
    tree = tree_of(values, metadata.planner_data)
    notes: dict[str, Any] = {"parts": parts} if parts else {}
    if tree is None:
        notes |= {"is_flat": True, "planner_data": metadata.planner_data}
    elif tree.whole:
        notes["whole"] = [[*path] for path in tree.whole]
    root = values if tree is None else tree.root
    return Contents(files=files, tensors=tensors, tree=encode_value(root), notes=notes)


def _ordered(metadata: Metadata) -> list[str]:
    """The keys as they stand in the state: a plan has them by rank."""
    keys, paths = metadata.state_dict_metadata, metadata.planner_data
    if not isinstance(paths, dict):
        return [*keys]
    return [*(key for key in paths if key in keys), *(key for key in keys if key not in paths)]


def _start_of(key: str, written: Written) -> list[int]:
    return [int(each) for each in written.name.removeprefix(f"{key}@").split(",") if each]


def _stored(
    written: Iterable[Written],
) -> tuple[list[StoredFile], dict[str, StoredTensor]]:
    files: dict[str, StoredFile] = {}
    numbers: dict[str, int] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    placed: dict[str, list[tuple[Box, int]]] = {}
    for name, dtype, shape, box, file in written:
        files[file.name] = file
        number = numbers.setdefault(file.name, len(numbers))
        if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
            raise SaveError(
                f"{name!r} is {dtype} of shape {shape} on one rank and {kinds[name][0]} of shape "
                f"{kinds[name][1]} on another; nothing was committed"
            )
        if 0 not in shape or name not in placed:  # of one without elements, one is all there is
            placed.setdefault(name, []).append((box, number))
    known: dict[Any, StoredPlacement] = {}  # tensors that lie alike are many
    tensors = {}
    for name, at in placed.items():
        dtype, shape = kinds[name]
        alike = shape, *at
        if alike not in known:
            known[alike] = _placement(name, shape, at)
        tensors[name] = StoredTensor(dtype=dtype, shape=shape, placement=known[alike])
    return [*files.values()], tensors


def _placement(name: str, shape: tuple[int, ...], placed: list[tuple[Box, int]]) -> StoredPlacement:
    placed = sorted(placed, key=lambda each: each[0].start)
    boxes = [box for box, _ in placed]
    files = IndexRuns.of([file for _, file in placed])
    if len(boxes) > 1:
        starts = ({box.start[dim] for box in boxes} - {0} for dim in range(len(shape)))
        grid = Grid.of_cuts(shape, [sorted(each) for each in starts])
        if grid.cells == len(boxes) and all(
            grid.box(cell) == box for cell, box in enumerate(boxes)
        ):
            return placement_of_grid(grid, files)
    problem = check_coverage(shape, boxes)
    if problem is not None:
        raise SaveError(
            f"the ranks' parts of {name!r} are not the whole of it: {problem}; nothing was "
            "committed. All ranks that hold a part must take part in the save"
        )
    return placement_of_boxes(shape, boxes, files)
