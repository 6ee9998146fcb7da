"""Whole tensors in the files of few ranks, from parts that lie on many.

Every rank walks through the same list of steps, one for each tensor, and sends what it holds to
the rank that writes it. A writer holds one assembled tensor at a time. Knows no storage.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.distributed._bulk import Course
from holdfast.distributed._flat import Held
from holdfast.distributed._tensor_source import TensorSource
from holdfast.distributed._tensors import bytes_view, empty_local, memory_of
from holdfast.format import CHUNK_BYTES, ShardEntry
from holdfast.reshard import Box, Leaf, Part, Replicate, SavePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A tensor on its way to the rank that writes it: who sends which box of it. The writer needs
    nobody's if it holds all of it itself."""

    leaf: Leaf
    writer: int
    file: int
    cells: tuple[tuple[int, Box], ...] = ()


def plan_steps(
    plan: SavePlan, leaves: Sequence[Leaf], files: Sequence[Sequence[int]], *, world_size: int
) -> list[Step]:
    """One step for each leaf, in the order in which all ranks take them.

    ``files`` are the numbers of the leaves in each file; file n is written by rank n of
    ``world_size``, over and over. A leaf that every rank holds is not sent.
    """
    tensors = {tensor.leaf.name: tensor for tensor in plan.tensors}
    by_writer: dict[int, list[Step]] = {}
    for number, members in enumerate(files):
        writer = number % world_size
        for index in members:
            leaf = leaves[index]
            tensor = tensors[leaf.name]
            is_whole = all(isinstance(each, Replicate) for each in tensor.layout.placements)
            cells = (
                ()
                if is_whole and writer in set(tensor.layout.ranks)
                else tuple(
                    (owner, tensor.grid.box(cell)) for cell, owner in enumerate(tensor.writers)
                )
            )
            step = Step(leaf=leaf, writer=writer, file=number, cells=cells)
            by_writer.setdefault(writer, []).append(step)
    rounds = itertools.zip_longest(*by_writer.values())
    return [step for each in rounds for step in each if step is not None]


class Assembler:
    """One rank's walk through the steps. Used by one thread."""

    def __init__(
        self,
        steps: Sequence[Step],
        held: Mapping[str, Held],
        parts: Mapping[tuple[str, Box], Part],
        *,
        rank: int,
        course: Course | None,
    ) -> None:
        self._steps = steps
        self._held = held
        self._parts = parts
        self._rank = rank
        self._course = course
        self._next = 0

    def source(self, index: int) -> "AssembledSource":
        """The bytes of a step that this rank writes. To be read once, in the order of steps."""
        leaf = self._steps[index].leaf
        entry = ShardEntry(name=leaf.name, dtype=leaf.dtype, shape=leaf.shape)
        return AssembledSource(entry=entry, assembler=self, index=index)

    def chunks(self, index: int) -> Iterator[memoryview]:
        self._send_until(index)
        self._next = index + 1
        step = self._steps[index]
        held = self._held.get(step.leaf.name)
        if not step.cells and held is not None:
            whole = Part.alone(Box.whole(step.leaf.shape))
            entry = ShardEntry(name=step.leaf.name, dtype=step.leaf.dtype, shape=step.leaf.shape)
            yield from held.source(entry, whole).chunks()
            return
        data = memory_of(self._assembled(step))
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]

    def finish(self) -> None:
        """Send what is still wanted of this rank."""
        self._send_until(len(self._steps))
        if self._course is not None:
            self._course.flush()

    def _send_until(self, index: int) -> None:
        for step in self._steps[self._next : index]:
            if step.writer == self._rank:
                raise ValueError(f"the step of {step.leaf.name!r} was passed over")
            for owner, box in step.cells:
                if owner == self._rank and not box.is_empty:
                    self._to_course().send(step.writer, self._cell(step, box))
        self._next = index

    def _assembled(self, step: Step) -> torch.Tensor:
        whole = empty_local(step.leaf.shape, step.leaf.dtype)
        for owner, box in step.cells:
            if box.is_empty:
                continue
            where = whole[tuple(map(slice, box.start, box.stop))]
            if owner == self._rank:
                where.copy_(self._cell(step, box).view(whole.dtype).view(box.shape))
            elif where.is_contiguous():
                self._to_course().receive(owner, bytes_view(where))
            else:
                data = torch.empty(box.shape, dtype=whole.dtype, device="cpu")
                self._to_course().receive(owner, bytes_view(data))
                where.copy_(data)
        return whole

    def _cell(self, step: Step, box: Box) -> torch.Tensor:
        """A box of this rank's as bytes."""
        held, part = self._held[step.leaf.name], self._parts[step.leaf.name, box]
        entry = ShardEntry(name=step.leaf.name, dtype=step.leaf.dtype, shape=box.shape)
        source = held.source(entry, part)
        if isinstance(source, TensorSource):
            return bytes_view(source.tensor.contiguous().cpu())
        return torch.frombuffer(bytearray(b"".join(source.chunks())), dtype=torch.uint8)

    def _to_course(self) -> Course:
        if self._course is None:
            raise ValueError("a tensor has to be sent, and no way to the other ranks was opened")
        return self._course


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledSource:
    """``catalog``'s ``Source`` for a tensor whose parts come from other ranks."""

    entry: ShardEntry
    assembler: Assembler
    index: int

    def chunks(self) -> Iterator[memoryview]:
        return self.assembler.chunks(self.index)
