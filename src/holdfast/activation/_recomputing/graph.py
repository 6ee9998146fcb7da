"""Which layers need the results of which. Knows their ids, not what they compute."""

import threading
from collections import ChainMap, deque
from collections.abc import Iterable, Iterator, Mapping

from holdfast.activation._layer_ids import layer_id as checked_id
from holdfast.activation._layer_ids import layer_ids as checked_ids
from holdfast.errors import DependencyCycleError

_SHOWN = 8


class DependencyGraph:
    """Layers and what each depends on. Thread-safe.

    Anything can be added, also a cycle and layers that are added later or never; a cycle is an
    error only for whom it concerns, in ``topological_order``. Ids that are blank or no texts are
    refused with ``ValueError``. No call recurses, so a chain may be as long as memory allows.
    """

    __slots__ = ("_dependencies", "_lock", "_needed")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dependencies: dict[str, tuple[str, ...]] = {}
        self._needed: set[str] = set()

    def add_dependency(self, layer_id: str, depends_on: Iterable[str]) -> None:
        """``layer_id`` needs the results of ``depends_on``, and of those it was said to need
        before, which come first."""
        layer_id = checked_id("layer_id", layer_id)
        added = checked_ids("depends_on", depends_on)
        with self._lock:
            self._dependencies[layer_id] = self._with(layer_id, added)
            self._needed.update(added)

    def dependencies(self, layer_id: str) -> tuple[str, ...]:
        """What the layer itself depends on, in the order in which it was added."""
        return self._dependencies.get(layer_id, ())

    def topological_order(self, layer_ids: Iterable[str]) -> list[str]:
        """These layers and all that they need, each once and after what it needs.

        Otherwise in the order asked and added, so the same calls give the same order. A cycle
        that any of them needs raises ``DependencyCycleError``, whose ``layers`` depend each on the
        next and the last on the first.
        """
        asked = checked_ids("layer_ids", layer_ids)
        with self._lock:
            order, cycle = _walk(asked, self._dependencies)
        if cycle:
            raise DependencyCycleError(
                f"no order has every layer after what it needs: {cycle_in_words(cycle)}",
                layer_id=cycle[0],
                layers=cycle,
            )
        return order

    def has_cycle(self) -> bool:
        """Whether any layers depend on each other in a circle."""
        with self._lock:
            return bool(_walk(self._dependencies, self._dependencies)[1])

    def cycle_with(self, layer_id: str, depends_on: Iterable[str]) -> tuple[str, ...]:
        """The shortest cycle through ``layer_id`` that there would be after ``add_dependency`` with
        the same arguments, beginning with it; empty if none. Nothing is added."""
        layer_id = checked_id("layer_id", layer_id)
        added = checked_ids("depends_on", depends_on)
        with self._lock:
            # Layers are mostly added after what they need, or all before: then this is no search.
            if layer_id not in self._needed and layer_id not in added:
                return ()
            after = ChainMap({layer_id: self._with(layer_id, added)}, self._dependencies)
            return _circle(layer_id, after)

    def clear(self) -> None:
        """Forget every layer."""
        with self._lock:
            self._dependencies.clear()
            self._needed.clear()

    def _with(self, layer_id: str, added: list[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._dependencies.get(layer_id, ()), *added)))


def cycle_in_words(cycle: tuple[str, ...]) -> str:
    """Who depends on whom, for a sentence. Of a long cycle only the beginning and the end."""
    if len(cycle) == 1:
        return f"{cycle[0]!r} depends on itself"
    names = [repr(each) for each in cycle[1:]]
    if len(names) > _SHOWN:
        names[_SHOWN - 1 : -1] = [f"... {len(names) - _SHOWN} more ..."]
    chain = ", which depends on ".join([*names, repr(cycle[0])])
    return f"{cycle[0]!r} depends on {chain}"


def _walk(
    starts: Iterable[str], dependencies: Mapping[str, tuple[str, ...]]
) -> tuple[list[str], tuple[str, ...]]:
    """All that is reached, dependencies first, and no cycle; or what came before the first cycle
    and that cycle. Depth first, as Tarjan orders a graph, with the path as the stack."""
    placed: dict[str, None] = {}
    for start in starts:
        path: dict[str, Iterator[str]] = {}
        step: str | None = None if start in placed else start
        while step is not None or path:
            if step is not None:
                path[step] = iter(dependencies.get(step, ()))
            layer = next(reversed(path))
            step = next((each for each in path[layer] if each not in placed), None)
            if step is None:
                del path[layer]
                placed[layer] = None
            elif step in path:
                return list(placed), _from(step, path)
    return list(placed), ()


def _circle(start: str, dependencies: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The shortest way from ``start`` back to it, without its end; empty if there is none."""
    reached_from: dict[str, str] = {}
    queue = deque([start])
    while queue:
        layer = queue.popleft()
        for each in dependencies.get(layer, ()):
            if each == start:
                way = [layer]
                while way[-1] != start:
                    way.append(reached_from[way[-1]])
                return tuple(reversed(way))
            if each not in reached_from:
                reached_from[each] = layer
                queue.append(each)
    return ()


def _from(layer: str, path: Iterable[str]) -> tuple[str, ...]:
    layers = tuple(path)
    return layers[layers.index(layer) :]
