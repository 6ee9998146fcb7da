"""One pass over layers that are computed together. Knows who needs whose result, not how any of
it is computed, on which thread or when."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


class Pass:
    """Each layer once, after what it needs; results that nobody needs any more are let go.

    ``dependencies`` are those of each layer in ``order``, which has every layer after what it
    needs; the results of ``asked`` are kept. Whoever runs the layers takes them in that order, or
    begins with ``ready`` and goes on with what each ``finish`` returns. Not thread-safe: one
    thread makes these calls, wherever the layers run.
    """

    __slots__ = ("_asked", "_dependents", "_missing", "_results", "_uses", "dependencies", "order")

    def __init__(
        self,
        asked: Sequence[str],
        order: Sequence[str],
        dependencies: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.order = order
        self.dependencies = dependencies
        self._asked = asked
        self._results: dict[str, Any] = {}
        self._missing = {each: len(dependencies[each]) for each in order}
        self._dependents: dict[str, list[str]] = {each: [] for each in order}
        for each in order:
            for needed in dependencies[each]:
                self._dependents[needed].append(each)
        self._uses = Counter({each: len(users) for each, users in self._dependents.items()})
        self._uses.update(asked)

    def ready(self) -> list[str]:
        """The layers that need no other."""
        return [each for each in self.order if not self._missing[each]]

    def arguments(self, layer_id: str) -> list[Any]:
        """What the layer is to be called with. To be asked for once: from then on only the caller
        keeps alive what nobody else needs."""
        needed = self.dependencies[layer_id]
        found = [self._results[each] for each in needed]
        for each in needed:
            self._uses[each] -= 1
            if not self._uses[each]:
                del self._results[each]
        return found

    def finish(self, layer_id: str, result: Any) -> list[str]:
        """Take the layer's result; the layers that can run now, because it was the last one that
        they waited for."""
        self._results[layer_id] = result
        freed = []
        for each in self._dependents[layer_id]:
            self._missing[each] -= 1
            if not self._missing[each]:
                freed.append(each)
        return freed

    def results(self) -> dict[str, Any]:
        """The results asked for, in the order asked. All layers are finished."""
        return {each: self._results[each] for each in self._asked}
