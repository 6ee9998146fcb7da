"""Runs a region again, exactly as its forward ran, for the tensors autograd asks for. Knows the
order in which they were saved; does not know what the region computes.

Everything is compared on the way: a region that saves other tensors than it did in its forward
is named together with the module and the line that did.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from holdfast.activation._regions.bindings import bound
from holdfast.activation._regions.buffers import swapped_in
from holdfast.activation._regions.changes import Change, Touched, changes
from holdfast.activation._regions.digests import Digests, digest
from holdfast.activation._regions.inputs import given, leaves
from holdfast.activation._regions.place import Place, here
from holdfast.activation._regions.saved import Saved
from holdfast.activation._regions.streams import rewound
from holdfast.activation._surroundings import restored
from holdfast.errors import RecomputationError

if TYPE_CHECKING:
    from holdfast.activation._regions.region import Region


class _EnoughError(BaseException):
    """Ends a replay early. No ``Exception``: the region's own ``except Exception`` must let it
    through."""


class Replay:
    """One replay. ``run`` may be called once; the region's lock is held over it.

    For ``asked``, one saved tensor, it stops when all that are wanted are there. Without, it runs
    to its end, and ``outputs`` are the tensors the region returned, without their history.
    """

    def __init__(self, region: "Region", asked: Saved | None) -> None:
        self._region = region
        self._asked = asked
        self._stops = region.options.early_stop and asked is not None
        self.outputs: list[Any] = []
        self.answer = Saved(region)  # apart: from the handle another backward could take it
        self._targets: list[Saved | None] = [reference() for reference in region.saved]
        wanted = (
            index
            for index in range(len(self._targets) - 1, -1, -1)
            if (target := self._targets[index]) is not None
            and target.held is None
            and target.value is None
        )
        self._last = next(wanted, -1)
        self._count = 0
        self.error: Exception | None = None
        self._enough = _EnoughError()
        self._stopped = False
        self._differences: list[str] = []
        self._other_values = True
        self._comparing = region.options.determinism_check != "none"
        self._digests = None if region.digests is None else Digests()
        self._extra: Place | None = None

    def run(self) -> int:
        """Fills the saved tensors that are still wanted. Returns how many tensors were saved on
        the way. Leaves random streams, buffers and modes as they were, also on failure; what
        it raises then is ``error`` too."""
        try:
            return self._run()
        except Exception as error:
            self.error = error
            raise

    def _run(self) -> int:
        region = self._region
        # One by one, not on the way through the containers: nested regions would get deep.
        args, kwargs = given(region.arguments, {id(each): each.get() for each in region.inputs})
        changed = self._changed()
        touched = Touched(changed) if changed else None
        try:
            self._call(args, kwargs, touched)
        except _EnoughError as stop:
            if stop is not self._enough:
                raise
        except Exception as error:
            # TorchScript, and code that catches everything, turn our exception into theirs.
            if not self._stopped:
                if touched is not None and touched.used:
                    told = self._difference(touched.used)
                    raise RecomputationError(told, layer_id=region.name) from error
                for change in changed:
                    error.add_note(f"before that, {self._name_of(change.tensor)} {change.what}")
                raise
        finally:
            # Its traceback holds every tensor of the replay's frames.
            self._enough.__traceback__ = None
            self._enough.__context__ = None
        self._compare_digests()
        told = self._difference(touched.used if touched else ())
        if told:
            for target in self._targets:
                if target is not None:
                    target.value = None
            raise RecomputationError(told, layer_id=region.name)
        return self._count

    def _call(self, args: Any, kwargs: Any, touched: Any) -> None:
        region = self._region
        hooks = saved_tensors_hooks(self._packer(), _itself)
        with as_it_ran(region), touched or _NOTHING, hooks:
            output = region.fn(*args, **kwargs)
        if self._asked is None:
            # Not with its history, whose nodes have this replay's hooks: a circle.
            tensors = (each for each in leaves(output) if isinstance(each, torch.Tensor))
            self.outputs = [each.detach() for each in tensors]

    def _packer(self) -> Callable[[Any], Any]:
        region, targets = self._region, self._targets
        expected = len(region.described)
        last = self._last if self._stops else -1
        before: Any = None  # the tensor saved before, as far as it tells whether to go on

        def pack(tensor: Any) -> Any:
            nonlocal before
            index = self._count
            self._count = index + 1
            if 0 <= last < index:
                self._stop()
            if index >= expected:
                return self._beyond(tensor)
            has_history = tensor.requires_grad
            # Not the parameter itself: ZeRO empties that again before backward uses it.
            if has_history or tensor.__class__ is torch.nn.Parameter:
                tensor = tensor.detach()
            target = targets[index]
            if target is not None and target.held is None:
                self._compare(index, tensor)
                if target is self._asked:
                    self.answer.put(tensor)
                elif target.value is None:
                    target.put(tensor)
            # An operator may save its input and what it fills then, as RReLU its noise, which is
            # as large: let it run.
            now = (not has_history, tensor.shape, tensor.dtype)
            if index == last and before != now:
                self._stop()
            before = (has_history, tensor.shape, tensor.dtype)
            return tensor

        return pack

    def _compare(self, index: int, tensor: Any) -> None:
        was = self._region.described[index]
        now = (tensor.shape, tensor.dtype, tensor.device)
        if self._comparing and was != now:
            self._differ(index, _told(was), _told(now), here())
        elif self._digests is not None:
            self._digests.add(index, tensor, here())

    def _beyond(self, tensor: Any) -> Any:
        """A tensor more than the forward saved, or than it has saved so far."""
        if self._region.finished and not self._stopped and self._extra is None:
            self._extra = here()
        return tensor.detach()

    def _stop(self) -> None:
        self._stopped = True
        raise self._enough

    def _compare_digests(self) -> None:
        known = self._region.digests
        if known is None or self._digests is None:
            return
        expected = known.all()
        for index, (value, place) in self._digests.all().items():
            if index in expected and value != expected[index][0]:
                was = _told(self._region.described[index])
                self._differ(index, was, _OTHER_VALUES, place)

    def _differ(self, index: int, was: str, now: str, place: Place) -> None:
        self._other_values &= now is _OTHER_VALUES
        if len(self._differences) < _MOST_TOLD:
            self._differences.append(
                f"tensor at position {index}, {place.told(self._region.reached)}:\n"
                f"  saved in the forward: {was}\n  recomputed: {now}"
            )

    def _changed(self) -> list[Change]:
        region = self._region
        found = [
            *changes(region.reached.parameters, region.epoch),
            *changes(region.untouched, region.epoch),
        ]
        if region.watched:
            known = {id(change.tensor) for change in found}
            found += [
                Change(item.tensor, "has other values (by digest)")
                for item in (*region.reached.parameters, *region.untouched)
                if id(item.tensor) not in known
                and digest(item.tensor) != region.watched[id(item.tensor)]
            ]
        return found

    def _difference(self, used: Sequence[Change]) -> str:
        """What makes the replay another run than the forward; empty if nothing does."""
        region = self._region
        name = f"region {region.name!r}"
        if used:
            told = "; ".join(f"{self._name_of(change.tensor)} {change.what}" for change in used)
            return (
                f"{name} cannot be replayed as its forward ran. Between forward and backward: "
                f"{told}. The gradients would be wrong. Call backward() first."
            )
        if self._differences:
            how = "other values" if self._other_values else "different metadata"
            text = (
                f"Recomputed values for the following tensors have {how} than during the forward "
                "pass.\n" + "\n".join(self._differences)
            )
        elif self._extra is not None:
            text = (
                "It was trying to save more tensors during recomputation than during the original "
                f"forward pass, {self._extra.told(region.reached)}."
            )
        elif self._count < self._expected():
            text = (
                "A different number of tensors was saved during the original forward and "
                "recomputation.\n"
                f"Number of tensors saved during forward: {len(region.described)}\n"
                f"Number of tensors saved during recomputation: {self._count}."
            )
        else:
            return ""
        log = "" if region.log is None else region.log.told()
        return f"{name} does not do the same thing twice. {text}\n{_TIP}{log}"

    def _name_of(self, tensor: Any) -> str:
        return self._region.reached.name_of(tensor) or _shape(tensor)

    def _expected(self) -> int:
        """How many tensors the replay had to save at least."""
        region = self._region
        if not region.finished:  # backward inside the forward: the rest is still to come
            return 0
        return self._last + 1 if self._stops else len(region.described)


class Rerun(Replay):
    """A replay for the region's result alone: what it saves is counted, and dropped at once."""

    def __init__(self, region: "Region") -> None:
        super().__init__(region, None)
        self._targets = []

    def _packer(self) -> Callable[[Any], Any]:
        expected = len(self._region.described)

        def pack(tensor: Any) -> None:
            index = self._count
            self._count = index + 1
            if index < expected:
                self._compare(index, tensor)
            else:
                self._beyond(tensor)

        return pack


@contextlib.contextmanager
def as_it_ran(region: "Region") -> Iterator[None]:
    """Everything a region's forward ran under; on leaving, everything as it was."""
    with (
        restored(region.surroundings),
        bound(region.bindings),
        region.reached.restored(),
        swapped_in(region.buffers, [*region.reached.parameters, *region.untouched]),
        rewound(region.streams, region.marks),
        region.context,
        torch.enable_grad(),
    ):
        yield


_NOTHING = contextlib.nullcontext()
_OTHER_VALUES = "the same, with other values"
_MOST_TOLD = 3  # the first is the cause, the rest follow from it
_TIP = (
    "A region must depend on nothing but its arguments, its modules' parameters and buffers, and "
    "the random streams holdfast knows: name others with generators=, modules with modules=. It "
    "must not change an object it was given (a key/value cache: switch it off). debug=True shows "
    "where the operators differ, determinism_check='values' the first values that do."
)


def _itself(tensor: Any) -> Any:
    return tensor


def _told(description: tuple[Any, Any, Any]) -> str:
    shape, dtype, device = description
    return f"{{'shape': {tuple(shape)}, 'dtype': {dtype}, 'device': {device}}}"


def _shape(tensor: Any) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"
