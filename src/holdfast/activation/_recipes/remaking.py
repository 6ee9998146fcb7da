"""One storage of one call, dropped: what it is made from, and how. Knows the nodes of that call,
not which of its storages are dropped or why.

What comes out must fit where it came from: the same size, strides and dtype as what autograd saved,
or backward fails with an error. Bits are not compared here: they were when the drops were tried.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.activation._recipes.bits import two_values
from holdfast.activation._recipes.following import Found
from holdfast.activation._recipes.programs import Program
from holdfast.activation._regions.changes import changes, steps
from holdfast.activation._regions.found import Parameter
from holdfast.activation._surroundings import Arithmetic, arithmetic, as_computed
from holdfast.errors import RecomputationError

Shape = tuple[Any, Any, Any]  # size, strides, dtype


class Call:
    """What all that is dropped of one call has in common: the settings of its operations, the
    parameters it was computed from, the shapes of what is dropped, as ``Programs`` numbers them. It
    owns no node. Its lock is held while anything is made, so whoever finds ``is_making`` set is
    asked by what is being made."""

    __slots__ = (
        "arithmetic",
        "epoch",
        "is_making",
        "lock",
        "parameters",
        "settings",
        "shapes",
        "stage",
    )

    def __init__(
        self,
        stage: str,
        settings: list[tuple[Any, ...]],
        parameters: list[Parameter],
        shapes: list[Shape],
    ) -> None:
        self.stage, self.settings = stage, settings
        self.parameters, self.shapes = parameters, shapes
        self.lock = threading.RLock()
        self.epoch = steps.care(id(self))
        self.arithmetic: Arithmetic = arithmetic()
        self.is_making = False

    def __del__(self) -> None:
        steps.forget(id(self))

    def as_then(self, make: Callable[[], list[Any]]) -> list[Any]:
        """``make()`` under what the call computed under."""
        now = arithmetic()
        inferring, enabled = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.is_making = True
        torch._C._set_grad_enabled(False)  # noqa: SLF001 -- torch.no_grad() costs ten times as much
        try:
            with torch._C._DisableAutocast():  # noqa: SLF001 -- the casts are operations of their own
                if now == self.arithmetic and not inferring:
                    return make()
                with torch.inference_mode(mode=False), as_computed(self.arithmetic, now):
                    torch._C._set_grad_enabled(False)  # noqa: SLF001 -- leaving inference turned it on
                    return make()
        finally:
            torch._C._set_grad_enabled(enabled)  # noqa: SLF001 -- as above
            self.is_making = False


class Held:
    """A tensor that was found, and that others are made from."""

    __slots__ = ("_stage", "_tensor", "_version")

    def __init__(self, tensor: Any, stage: str) -> None:
        self._tensor = tensor
        self._version = tensor._version  # noqa: SLF001 -- its public name
        self._stage = stage

    def tensor(self) -> Any:
        """It, if it is as it was."""
        tensor, stage = self._tensor, self._stage
        if tensor._version != self._version:  # noqa: SLF001 -- as above
            raise RecomputationError(
                f"stage {stage!r}: a tensor of shape {tuple(tensor.shape)} that autograd saved "
                "was changed in place between forward and backward. The gradients would be wrong.",
                layer_id=stage,
            )
        return tensor


class Dropped:
    """One storage of one call. The graph owns it, through the nodes that held the storage; it owns
    what it is made from, all of which lies above them."""

    __slots__ = ("_call", "_left", "_made", "_mask", "_nodes", "_program", "_tensors")

    def __init__(self, program: Program, call: Call, nodes: list[Any]) -> None:
        self._program, self._call = program, call
        self._nodes = [nodes[number] for number in program.nodes]
        self._left = program.reads
        self._made: list[Any] | None = None
        self._tensors: list[Held | Handle] = []
        self._mask: Any = None

    def bind(self, found: Found, others: "Sequence[Held | Handle]") -> None:
        """Take the tensors it is made from. ``others``: what all holders hold from now on."""
        for is_other, number in self._program.tensors:
            self._tensors.append(
                others[number] if is_other else Held(found.tensors[number], self._call.stage)
            )

    def bind_mask(self, held: Sequence[Any]) -> bool:
        """Take the two values of a mask, which is what all holders have. ``False`` if it has
        others, or other strides than what is made of it will have."""
        found = two_values(held[0])
        if found is None or any(
            each.data_ptr() != held[0].data_ptr()
            or each.size() != found[0].size()
            or each.stride() != found[0].stride()
            for each in held
        ):
            return False
        self._mask = found
        return True

    def sources(self) -> list[Any]:
        """The tensors it is made from, as they are now."""
        given = [source for _, sources, _, _ in self._program.operations for source in sources]
        found = [
            getattr(self._nodes[place], what) for kind, place, what in given if kind == "saved"
        ]
        found += [
            self._source(kind, place) for kind, place, _ in given if kind in {"tensor", "leaf"}
        ]
        return found

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
                self._left = self._program.reads
            return made[number]

    def make(self) -> list[Any]:
        """What all holders held, made now. Call it with the call's lock held."""
        call = self._call
        return self._fitting() if call.is_making else call.as_then(self._fitting)

    def _fitting(self) -> list[Any]:
        self._refuse_changes()
        program, shapes = self._program, self._call.shapes
        for form in program.forms:
            try:
                made = self._run(form) if self._mask is None else self._unpacked()
            except RuntimeError:  # a view of a copy in another format, or a format it cannot have
                if form is program.forms[-1]:
                    raise
                continue
            fitted = None if made is None else _fitted(made, shapes[program.holders])
            if fitted is not None:
                return fitted
        stage = self._call.stage
        raise RecomputationError(
            f"stage {stage!r} cannot make a tensor again that it dropped: with the settings its "
            "node has, the result is another. Please report this, with the model.",
            layer_id=stage,
        )

    def _refuse_changes(self) -> None:
        call = self._call
        parameters = [call.parameters[number] for number in self._program.watched]
        if call.epoch == steps.epoch and all(map(_is_untouched, parameters)):
            return
        stage = call.stage
        for change in changes(parameters, call.epoch):
            raise RecomputationError(
                f"a parameter of stage {stage!r} {change.what} between forward and backward, and a "
                "tensor that was dropped would be made again from it. The gradients would be "
                "wrong. Call backward() first.",
                layer_id=stage,
            )

    def _unpacked(self) -> list[Any]:
        mask, value = self._mask
        return [torch.where(mask, value, torch.zeros_like(value))] * self._program.count

    def _run(self, form: Any) -> list[Any] | None:
        program, nodes, settings = self._program, self._nodes, self._call.settings
        copied = program.copied if form is not None else -1
        results: list[Any] = []
        for run, sources, number, frees in program.operations:
            tensors: list[Any] = []
            for kind, place, what in sources:
                if kind == "result":
                    tensors.append(results[place] if what is None else results[place][what])
                elif kind == "saved":
                    tensors.append(getattr(nodes[place], what))
                else:
                    tensors.append(self._source(kind, place))
            if len(results) == copied:
                results.append(run(*tensors, *settings[number], form))
            else:
                results.append(run(*tensors, *settings[number]))
            if results[-1] is None:
                return None
            del tensors
            for freed in frees:
                results[freed] = None
        return [
            results[place] if what is None else results[place][what]
            for place, what in program.results
        ]

    def _source(self, kind: str, place: int) -> Any:
        if kind == "tensor":
            return self._tensors[place].tensor()
        return self._call.parameters[place].tensor if kind == "leaf" else None


class Handle:
    """What autograd holds in the place of a dropped tensor. Called with that, it gives itself: so
    it is the hook that packs, too."""

    __slots__ = ("_dropped", "_number")

    def __init__(self, dropped: Dropped, number: int) -> None:
        self._dropped = dropped
        self._number = number

    def __call__(self, tensor: Any) -> "Handle":
        del tensor
        return self

    def tensor(self) -> Any:
        return self._dropped.value(self._number)


def _is_untouched(item: Parameter) -> bool:
    """Whether nothing at all has happened to it. If not, ``changes`` tells what that means."""
    tensor, _, _, version, storage, requires_grad = item
    return bool(
        storage
        and tensor._version == version  # noqa: SLF001 -- its public name
        and tensor.untyped_storage()._cdata == storage  # noqa: SLF001 -- the identity of a storage
        and tensor.requires_grad is requires_grad
    )


def _fitted(made: list[Any], shapes: list[Shape]) -> list[Any] | None:
    """What was made in the shapes it had; ``None`` if one has another."""
    for number, (size, stride, dtype) in enumerate(shapes):
        value = made[number]
        if value.size() != size or value.dtype is not dtype:
            return None
        if value.stride() != stride:
            if value.numel() and any(
                one != other and extent != 1
                for one, other, extent in zip(value.stride(), stride, size, strict=True)
            ):
                return None
            made[number] = torch.as_strided(value, size, stride)  # where it makes no difference
    return made
