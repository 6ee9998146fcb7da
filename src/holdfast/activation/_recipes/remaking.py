"""One storage of one call, dropped: what it is made from, and how. Knows the nodes of that call,
not which of its storages are dropped or why.

What comes out must fit where it came from: the same size, strides and dtype as what autograd saved,
or backward fails with an error. Bits are not compared here: they were when the drops were tried.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.activation._recipes.arithmetic import Arithmetic, arithmetic, restored
from holdfast.activation._recipes.bits import two_values
from holdfast.activation._recipes.drops import Source
from holdfast.activation._recipes.graph import Place, saved_handle, saved_value
from holdfast.activation._recipes.programs import Program
from holdfast.activation._regions.changes import changes, steps
from holdfast.activation._regions.found import as_found
from holdfast.errors import RecomputationError


class Call:
    """What is dropped of one call has this in common."""

    __slots__ = ("__weakref__", "arithmetic", "epoch", "lock", "stage")

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.lock = threading.RLock()
        self.epoch = steps.care(id(self))
        self.arithmetic: Arithmetic = arithmetic()

    def __del__(self) -> None:
        steps.forget(id(self))


class Dropped:
    """One storage of one call. The graph owns it, through the nodes that held the storage; it owns
    what it is made from, all of which lies above them."""

    __slots__ = (
        "_call",
        "_forms",
        "_frees",
        "_left",
        "_made",
        "_mask",
        "_operations",
        "_parameters",
        "_reads",
        "_results",
        "_shapes",
    )

    def __init__(self, program: Program, call: Call) -> None:
        drop = program.drop
        self._call = call
        self._reads = self._left = drop.reads
        self._made: list[Any] | None = None
        self._mask: Any = None
        self._forms, self._frees = program.forms, program.frees
        self._results = program.results
        self._shapes: list[Any] = [None] * len(drop.holders)
        self._parameters: list[Any] = []
        self._operations: list[tuple[Callable[..., Any], list[Any], tuple[Any, ...]]] = []

    def bind_mask(self, tensors: Sequence[Any]) -> bool:
        """Take the two values of a mask, which is what all holders have. ``False`` if it has
        others, or other strides than what is made of it will have."""
        found = two_values(tensors[0])
        if found is None or any(
            each.data_ptr() != tensors[0].data_ptr()
            or each.size() != found[0].size()
            or each.stride() != found[0].stride()
            for each in tensors
        ):
            return False
        self._mask = found
        return True

    def bind(
        self, program: Program, nodes: Sequence[Any], others: dict[Place, Callable[[], Any]]
    ) -> bool:
        """Take what it is made from out of a graph. ``others``: what will be dropped of the graph
        as well. ``False`` if it cannot be made from this graph."""
        for recipe, node, found, prepared, rest in program.operations:
            settings = recipe.settings(nodes[node])
            if settings is None:
                return False
            given = prepared
            if rest:
                given = prepared.copy()
                for number, source in rest:
                    given[number] = self._bound(source, nodes, others)
            self._operations.append((recipe.run, given, settings + found))
        self._parameters = [as_found(nodes[number].variable) for number in program.drop.watched]
        return True

    def _bound(
        self, source: Source, nodes: Sequence[Any], others: dict[Place, Callable[[], Any]]
    ) -> Callable[[], Any]:
        node = nodes[source.number]
        if source.kind == "saved":
            return functools.partial(saved_value, node, source.name)
        if source.kind == "leaf":
            leaf = node.variable
            return lambda: leaf
        other = others.get(Place(source.number, source.name))
        return other or self._held(saved_handle(node, source.name).data)

    def _held(self, tensor: Any) -> Callable[[], Any]:
        version, stage = tensor._version, self._call.stage  # noqa: SLF001 -- its public name

        def held() -> Any:
            if tensor._version != version:  # noqa: SLF001 -- as above
                raise RecomputationError(
                    f"stage {stage!r}: a tensor of shape {tuple(tensor.shape)} that autograd saved "
                    "was changed in place between forward and backward. The gradients would be "
                    "wrong.",
                    layer_id=stage,
                )
            return tensor

        return held

    def sources(self) -> list[Any]:
        """The tensors it is made from, as they are now."""
        return [
            source() for _, given, _ in self._operations for source in given if callable(source)
        ]

    def packed(self, number: int, tensor: Any) -> "Handle":
        """Note what holder ``number`` held. What it gets back is of that form."""
        self._shapes[number] = (tensor.size(), tensor.stride(), tensor.dtype)
        return Handle(self, number)

    def value(self, number: int) -> Any:
        """What holder ``number`` held, made again if it is not there; kept until the last that will
        ask for it has."""
        with self._call.lock:
            made = self._made
            if made is None:
                made = self.make()
            self._left -= 1
            if self._left:
                self._made = made
            else:
                self._made = None
                self._left = self._reads
            return made[number]

    def make(self) -> list[Any]:
        """What all holders held, made now."""
        self._refuse_changes()
        now = arithmetic()
        inferring, enabled = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # noqa: SLF001 -- torch.no_grad() costs ten times as much
        try:
            with torch._C._DisableAutocast():  # noqa: SLF001 -- the casts are operations of their own
                if now == self._call.arithmetic and not inferring:
                    return self._fitting()
                with torch.inference_mode(mode=False), restored(self._call.arithmetic, now):
                    torch._C._set_grad_enabled(False)  # noqa: SLF001 -- leaving inference turned it on
                    return self._fitting()
        finally:
            torch._C._set_grad_enabled(enabled)  # noqa: SLF001 -- as above

    def _refuse_changes(self) -> None:
        stage = self._call.stage
        for change in changes(self._parameters, self._call.epoch):
            raise RecomputationError(
                f"a parameter of stage {stage!r} {change.what} between forward and backward, and a "
                "tensor that was dropped would be made again from it. The gradients would be "
                "wrong. Call backward() first.",
                layer_id=stage,
            )

    def _fitting(self) -> list[Any]:
        copied, forms = self._forms
        for form in forms:
            try:
                made = self._unpacked() if self._mask is not None else self._run(copied, form)
            except RuntimeError:  # a view of a copy in another format, or a format it cannot have
                if form is forms[-1]:
                    raise
                continue
            fitted = list(map(_fitted, made, self._shapes)) if made is not None else [None]
            if all(each is not None for each in fitted):
                return fitted
        stage = self._call.stage
        raise RecomputationError(
            f"stage {stage!r} cannot make a tensor again that it dropped: with the settings its "
            "node has, the result is another. Please report this, with the model.",
            layer_id=stage,
        )

    def _unpacked(self) -> list[Any]:
        mask, value = self._mask
        return [torch.where(mask, value, torch.zeros_like(value))] * len(self._shapes)

    def _run(self, copied: int, form: Any) -> list[Any] | None:
        results: list[Any] = []
        for (run, given, settings), frees in zip(self._operations, self._frees, strict=True):
            tensors: list[Any] = []
            for source in given:
                if source is None:
                    tensors.append(None)
                elif source.__class__ is tuple:
                    step, output = source
                    tensors.append(results[step] if output is None else results[step][output])
                else:
                    tensors.append(source())
            if form is not None and len(results) == copied:
                results.append(run(*tensors, *settings, form))
            else:
                results.append(run(*tensors, *settings))
            if results[-1] is None:
                return None
            del tensors
            for number in frees:
                results[number] = None
        return [
            results[step] if output is None else results[step][output]
            for step, output in self._results
        ]


class Handle:
    """What autograd holds in the place of a dropped tensor."""

    __slots__ = ("_dropped", "_number")

    def __init__(self, dropped: Dropped, number: int) -> None:
        self._dropped = dropped
        self._number = number

    def tensor(self) -> Any:
        return self._dropped.value(self._number)


def _fitted(value: Any, shape: tuple[Any, Any, Any]) -> Any:
    """The value in the form it had; ``None`` if it has another."""
    size, stride, dtype = shape
    if value.size() != size or value.dtype is not dtype:
        return None
    if value.stride() == stride:
        return value
    if value.numel() and any(
        one != other and extent != 1
        for one, other, extent in zip(value.stride(), stride, size, strict=True)
    ):
        return None
    return torch.as_strided(value, size, stride)  # differs where it makes no difference
