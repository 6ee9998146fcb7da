"""What one rank of a DCP save writes, and what it tells of it. Knows a plan's items and shards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.catalog._placing import box_bounds
from holdfast.catalog._shard_write import Source, Tick, write_shard
from holdfast.catalog._writing import BoxSource, Retry, file_bytes, grouped
from holdfast.contracts import Storage
from holdfast.distributed._tensor_source import TensorSource, box_of
from holdfast.distributed._tensors import Unstorable, check_storable, code_of
from holdfast.errors import SaveError
from holdfast.format import CompressionLevel, LeafRef, ShardEntry, StoredFile, dtype_of
from holdfast.integrations.dcp._values import stored_value, value_of
from holdfast.reshard import Box, Hole, check_coverage, split_box


class Written(NamedTuple):
    """A box of a leaf in a file. There are very many."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: StoredFile


class Told(NamedTuple):
    """What a rank tells of an item: the boxes it wrote, and the value, encoded, if it is one."""

    written: tuple[Written, ...]
    value: object = None


def box_of_item(item: WriteItem) -> Box:
    chunk = item.tensor_data.chunk
    start = tuple(chunk.offsets)
    return Box(start, tuple(map(sum, zip(start, chunk.sizes, strict=True))))


def incomplete(plan: SavePlan) -> frozenset[str]:
    """The tensors that a plan which stands alone has only parts of, as one rank's of a DTensor."""
    boxes: dict[str, list[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for item in plan.items:
        if item.type is not WriteItemType.BYTE_IO:
            shapes[item.index.fqn] = tuple(item.tensor_data.size)
            boxes.setdefault(item.index.fqn, []).append(box_of_item(item))
    return frozenset(
        key
        for key, shape in shapes.items()
        if 0 not in shape
        and boxes[key] != [Box.whole(shape)]
        and isinstance(check_coverage(shape, boxes[key]), Hole)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemWriter:
    """All that a rank needs to write its part: ``key_of`` gives the place of its n-th file."""

    storage: Storage
    key_of: Callable[[int], str]
    level: CompressionLevel
    planner: SavePlanner
    incomplete: frozenset[str]

    def write(self, items: Sequence[WriteItem], *, tick: Tick, retry: Retry) -> list[WriteResult]:
        """Write it all, durably. Values are looked at first: what is refused is so at once."""
        values: dict[int, object] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        sources: list[BoxSource] = []
        owners: list[int] = []
        keys = {item.index.fqn for item in items}
        for nth, item in enumerate(items):
            if item.type is WriteItemType.BYTE_IO:
                value = stored_value(item.index.fqn, value_of(self.planner, item))
                values[nth] = value.encoded
                own, shape = value.inner, None
                for each in own:
                    if each.name in keys:
                        raise SaveError(
                            f"a tensor in {item.index.fqn!r} would be stored as {each.name!r}, "
                            "which is a key of the state as well; rename one of the two; nothing "
                            "was committed"
                        )
            else:
                own, shape = self._sources(item)
            shapes |= {each.name: shape or each.source.entry.shape for each in own}
            sources += own
            owners += [nth] * len(own)
        written: dict[int, list[Written]] = {nth: [] for nth in range(len(items))}
        owner = iter(owners)
        for part, group in enumerate(grouped(sources, self.level)):
            boxes = [each.source for each in group]
            write = partial(write_shard, self.storage, self.key_of(part), boxes, level=self.level)
            file = retry(partial(write, tick=tick)).file
            for each in group:
                told = Written(
                    each.name, each.source.entry.dtype, shapes[each.name], each.box, file
                )
                written[next(owner)].append(told)
        return [
            WriteResult(
                item.index,
                sum(each.box.size * dtype_of(each.dtype).itemsize for each in written[nth]),
                Told(tuple(written[nth]), values.get(nth)),
            )
            for nth, item in enumerate(items)
        ]

    def _sources(self, item: WriteItem) -> tuple[Sequence[BoxSource], tuple[int, ...]]:
        """The boxes of an item that have elements, and the shape of their leaf. Of a tensor
        without any, its whole box."""
        key, data = item.index.fqn, item.tensor_data
        shape, held = tuple(data.size), box_of_item(item)
        try:
            dtype = code_of(data.properties.dtype)
        except Unstorable as refusal:
            raise SaveError(f"{key!r} {refusal}; nothing was committed") from None
        if 0 in shape:
            return [_source(key, shape, Box.whole(shape), dtype.code, _Nothing)], shape
        if held.is_empty:
            return [], shape
        name, whole = key, held
        if key in self.incomplete:
            name, shape = f"{key}@{','.join(map(str, held.start))}", held.shape
            whole = Box.whole(shape)
        return [
            _source(
                name,
                shape,
                box,
                dtype.code,
                partial(_ItemSource, planner=self.planner, item=item, local=box.relative_to(whole)),
            )
            for box in split_box(whole, file_bytes(self.level) // dtype.itemsize)
        ], shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _ItemSource:
    """A box of an item on its way to a shard. The planner is asked for it only then: it may take
    memory. ``local`` is the box within what the planner gives."""

    entry: ShardEntry
    planner: SavePlanner
    item: WriteItem
    local: Box

    def chunks(self) -> Iterator[memoryview]:
        local = self._resolved()
        return TensorSource(entry=self.entry, tensor=box_of(local, self.local)).chunks()

    def _resolved(self) -> torch.Tensor:
        key, data = self.item.index.fqn, self.item.tensor_data
        tensor = self.planner.resolve_data(self.item)
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise SaveError(f"the planner gave a {kind} for {key!r}; nothing was committed")
        try:
            local = check_storable(tensor)
        except Unstorable as refusal:
            raise SaveError(f"{key!r} {refusal}; nothing was committed") from None
        planned = data.properties.dtype, tuple(data.chunk.sizes)
        if (local.dtype, tuple(local.shape)) != planned:
            raise SaveError(
                f"{key!r} was planned as {planned[0]} of shape {planned[1]}, and is {local.dtype} "
                f"of shape {tuple(local.shape)}; nothing was committed"
            )
        return local


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nothing:
    """A tensor without elements."""

    entry: ShardEntry

    def chunks(self) -> Iterator[memoryview]:
        return iter(())


def _source(
    name: str, shape: tuple[int, ...], box: Box, dtype: str, make: Callable[..., Source]
) -> BoxSource:
    bounds = None if box.shape == shape else box_bounds(box)
    try:
        LeafRef(kind="tensor", name=name)
    except ValueError as error:
        raise SaveError(f"{name!r} cannot name a tensor: {error}; nothing was saved") from error
    entry = ShardEntry(name=name, dtype=dtype, shape=box.shape, box=bounds)
    return BoxSource(name=name, box=box, source=make(entry=entry))
