"""Drops saved tensors from a call's graph, so that they are made again when backward asks. Knows
what to drop; does not choose it.

Every call of a stage builds a new graph; one that did something else than the graph the drops were
made for keeps everything. Tensors that are kept have no hooks and cost nothing.

What no graph shows, and so must not be done to a tensor of the stage between the operation that
made it and its use: writing to it through ``.data``, through NumPy, or under ``no_grad`` where an
operation of the stage could have been the one that wrote; and writing to a parameter, within the
call, after its use.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.activation._recipes.bits import same_bits
from holdfast.activation._recipes.drops import Drops
from holdfast.activation._recipes.following import Found
from holdfast.activation._recipes.programs import programs_of
from holdfast.activation._recipes.remaking import Call, Dropped, Handle, Held
from holdfast.activation._regions.found import as_found
from holdfast.errors import RecomputationError


@dataclass(frozen=True, slots=True)
class Tried:
    """A storage made again: the time it took, and whether all its bits came out the same."""

    seconds: float
    is_exact: bool


class Dropping:
    """Drops what ``drops`` says from the graphs of the stage's calls. Thread-safe."""

    def __init__(self, stage: str, drops: Drops) -> None:
        self._stage = stage
        self._programs = programs_of(drops)

    def drop(self, roots: Sequence[Any]) -> bool:
        """Drop from the graph whose outputs have ``roots`` for nodes. ``False``, with nothing
        dropped, if it is not a graph the drops were made for, or somebody else's hooks are at work
        on what autograd saves."""
        programs = self._programs
        found = programs.following.find(roots)
        if found is None:
            return False
        tensors = [found.tensors[number] for number in programs.holders]
        call = self._call(found, tensors)
        if call is None:
            return False
        bound: list[Dropped] = []
        others: list[Handle | Held] = []
        for program in programs.each:
            dropped = Dropped(program, call, found.nodes)
            if program.is_mask and not dropped.bind_mask(tensors[program.holders]):
                # What was a mask is none in this call, and stays.
                others += [Held(tensor, self._stage) for tensor in tensors[program.holders]]
                continue
            bound.append(dropped)
            for number in range(program.count):
                others.append(Handle(dropped, number))
        for dropped in bound:
            dropped.bind(found, others)
        for number, other in zip(programs.holders, others, strict=True):
            if other.__class__ is Handle:
                found.handles[number].register_hooks(other, Handle.tensor)
        return True

    def is_exact(self, roots: Sequence[Any]) -> bool:
        """Whether this is a graph the drops fit, and each is made again with the same bits."""
        if self._programs.following.find(roots) is None:
            return False
        return all(each.is_exact for each in self.tried(roots, 1))

    def tried(self, roots: Sequence[Any], repeats: int) -> list[Tried]:
        """Make every one again, though nothing was dropped."""
        programs = self._programs
        found = programs.following.find(roots)
        if found is None:
            raise RuntimeError(f"stage {self._stage!r}: not the graph the drops were made for")
        tensors = [found.tensors[number] for number in programs.holders]
        call = self._call(found, tensors)
        if call is None:
            return [Tried(0.0, is_exact=False)] * len(programs.each)
        others = [Held(tensor, self._stage) for tensor in tensors]
        tried = []
        for program in programs.each:
            dropped = Dropped(program, call, found.nodes)
            dropped.bind(found, others)
            held = tensors[program.holders]
            tried.append(_tried(dropped, held, repeats, is_mask=program.is_mask))
        return tried

    def _call(self, found: Found, tensors: list[Any]) -> Call | None:
        """What is common to all that is dropped, or ``None`` if a node does not tell enough."""
        programs, nodes = self._programs, found.nodes
        shapes = [(each.size(), each.stride(), each.dtype) for each in tensors]
        settings = []
        for read, number in programs.settings:
            told = (shapes[number][0],) if read is None else read(nodes[number])
            if told is None:
                return None
            settings.append(told)
        parameters = [as_found(nodes[number].variable) for number in programs.watched]
        return Call(self._stage, settings, parameters, shapes)


def _tried(dropped: Dropped, held: list[Any], repeats: int, *, is_mask: bool) -> Tried:
    times = []
    try:
        for _ in range(repeats):
            began = time.perf_counter()
            if is_mask and not dropped.bind_mask(held):
                return Tried(0.0, is_exact=False)
            if not all(map(_is_there, dropped.sources())):
                return Tried(0.0, is_exact=False)
            made = dropped.make()
            times.append(time.perf_counter() - began)
            if not all(map(same_bits, made, held)):
                return Tried(0.0, is_exact=False)
    except (RecomputationError, RuntimeError):  # torch has no kernel for it, or no memory
        return Tried(0.0, is_exact=False)
    return Tried(min(times), is_exact=True)


def _is_there(tensor: Any) -> bool:
    """Whether a tensor has its memory: sharded parameters give theirs away after the forward."""
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0
