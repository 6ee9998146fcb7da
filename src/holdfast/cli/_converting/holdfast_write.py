"""A state as a checkpoint of holdfast's: names for its tensors, and the tree of its record."""

from typing import Any, Literal, cast

from holdfast.catalog import Attempt
from holdfast.catalog._placing import placement_of_boxes
from holdfast.catalog._shard_write import Tick
from holdfast.catalog._writing import _free_name, _leaf_name, check_record_size, record_of
from holdfast.cli._converting.choosing import check_fits
from holdfast.cli._converting.contents import Contents, Tensor
from holdfast.cli._converting.saving import Files, NewCheckpoint, box_source
from holdfast.errors import SaveError
from holdfast.format import (
    CommitRecord,
    CompressionLevel,
    LeafRef,
    StoredTensor,
    ValuePath,
    encode_value,
)
from holdfast.reshard import Box, IndexRuns


def write_checkpoint(
    contents: Contents,
    target: NewCheckpoint,
    *,
    overwrite: bool,
    level: CompressionLevel,
    tick: Tick,
) -> None:
    """Every tensor under the name of its place; one that has two places is stored once."""
    check_fits(contents.tree, _problem, "a checkpoint")
    tree, tensors = _encoded(contents.tree)
    facts = contents.facts
    check_record_size(tree, facts.custom, target.catalog.storage, target.name)

    def make(attempt: Attempt, ticking: Tick) -> CommitRecord:
        files = Files(catalog=target.catalog, attempt=attempt, level=level, tick=ticking)
        files.write(
            0,
            (
                box_source(name, tensor.shape, Box.whole(tensor.shape), tensor)
                for name, tensor in tensors.items()
            ),
        )
        stored = {}
        for name, tensor in tensors.items():
            ((box, file),) = files.placed[name].items()
            placement = placement_of_boxes(tensor.shape, [box], IndexRuns.of([file]))
            stored[name] = StoredTensor(dtype=tensor.dtype, shape=tensor.shape, placement=placement)
        return record_of(attempt, facts, tree=tree, files=files.written, tensors=stored)

    target.save(make, overwrite=overwrite, tick=tick)


def _encoded(tree: Any) -> tuple[object, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def leaf(path: ValuePath, value: object) -> LeafRef | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in names:
            name = names[id(value)] = _free_name(_leaf_name(path), tensors)
            tensors[name] = value
        return LeafRef(kind=cast("Literal['tensor', 'array']", value.kind), name=names[id(value)])

    return encode_value(tree, leaf=leaf), tensors


def _problem(_: ValuePath, value: Any) -> str | None:
    if isinstance(value, Tensor):
        return None
    try:
        encode_value(value)
    except SaveError:
        return type(value).__name__
    return None
