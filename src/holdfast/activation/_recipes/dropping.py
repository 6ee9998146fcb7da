"""Drops saved tensors from a call's graph, so that they are made again when backward asks. Knows
what to drop; does not choose it.

Every call of a stage builds a new graph; one that did something else than the graph the drops were
made for keeps everything. Tensors that are kept have no hooks and cost nothing.

What no graph shows, and so must not be done to a tensor of the stage between the operation that
made it and its use: writing to it through ``.data``, through NumPy, or under ``no_grad`` where an
operation of the stage could have been the one that wrote; and writing to a parameter, within the
call, after its use.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.activation._recipes.bits import same_bits
from holdfast.activation._recipes.drops import Drops
from holdfast.activation._recipes.expecting import together
from holdfast.activation._recipes.graph import Place, kind_of, saved_handle, saved_value
from holdfast.activation._recipes.programs import Program
from holdfast.activation._recipes.remaking import Call, Dropped, Handle
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
        self._drops = drops
        self._programs = [Program(drop) for drop in drops.drops]
        self._expected = together(drop.expects for drop in drops.drops)

    def drop(self, roots: Sequence[Any]) -> bool:
        """Drop from the graph whose outputs have ``roots`` for nodes. ``False``, with nothing
        dropped, if it is not a graph the drops were made for, or somebody else's hooks are at work
        on what autograd saves."""
        nodes = self._follow(roots)
        if nodes is None:
            return False
        call = Call(self._stage)
        bound = []
        others: dict[Place, Callable[[], Any]] = {}
        for program in self._programs:
            dropped, holders = Dropped(program, call), program.drop.holders
            if program.is_mask and not dropped.bind_mask(_tensors(nodes, holders)):
                continue  # what was a mask is none in this call, and stays
            bound.append((program, dropped))
            for number, place in enumerate(holders):
                others[place] = functools.partial(dropped.value, number)
        if not all(
            program.is_mask or dropped.bind(program, nodes, others) for program, dropped in bound
        ):
            return False
        for program, dropped in bound:
            for number, place in enumerate(program.drop.holders):
                saved_handle(nodes[place.node], place.name).register_hooks(
                    functools.partial(dropped.packed, number), Handle.tensor
                )
        return True

    def tried(self, roots: Sequence[Any], repeats: int) -> list[Tried]:
        """Make every one again, though nothing was dropped."""
        nodes = self._follow(roots)
        if nodes is None:
            raise RuntimeError(f"stage {self._stage!r}: not the graph the drops were made for")
        call = Call(self._stage)
        return [_tried(program, nodes, call, repeats) for program in self._programs]

    def _follow(self, roots: Sequence[Any]) -> list[Any] | None:
        """The nodes that matter, or ``None`` if one is another."""
        drops = self._drops
        if tuple(map(kind_of, roots)) != drops.roots:
            return None
        nodes = list(roots)
        seen = {}
        for way in drops.ways:
            following = seen[way.start] = nodes[way.start].next_functions
            for edge, kind in way.edges:
                if edge >= len(following):
                    return None
                node = following[edge][0]
                if node is None or kind_of(node) != kind:
                    return None
                nodes.append(node)
        return nodes if self._expected.holds(nodes, seen) else None


def _tensors(nodes: Sequence[Any], places: Sequence[Place]) -> list[Any]:
    return [saved_handle(nodes[place.node], place.name).data for place in places]


def _tried(program: Program, nodes: list[Any], call: Call, repeats: int) -> Tried:
    held = [saved_value(nodes[place.node], place.name) for place in program.drop.holders]
    times = []
    try:
        for _ in range(repeats):
            dropped = Dropped(program, call)
            began = time.perf_counter()
            if not (
                dropped.bind_mask(held) if program.is_mask else dropped.bind(program, nodes, {})
            ):
                return Tried(0.0, is_exact=False)
            if not all(map(_is_there, dropped.sources())):
                return Tried(0.0, is_exact=False)
            for number, tensor in enumerate(held):
                dropped.packed(number, tensor)
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
