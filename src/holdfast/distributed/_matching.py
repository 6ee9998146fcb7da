"""What was found for a state in a checkpoint: slots to be staged, what fills the state from them,
and what does not fit. Reads no tensor and changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from holdfast.distributed._capture import ParameterName
from holdfast.distributed._options import LoadOptions
from holdfast.distributed._result import Difference, LoadReport
from holdfast.distributed._staging import Slot, Staging
from holdfast.distributed._stored import DICTS, LISTS, join, mapped, refs_in, replaced
from holdfast.distributed._swapping import Action
from holdfast.distributed._tensors import Like, local_of, torch_dtype, unfillable
from holdfast.errors import LoadError
from holdfast.format import LeafRef, PerRank, StoredTensor, dtype_of

Build = Callable[[Staging], Sequence[Action]]
"""Makes what changes the state, once everything is staged."""

CPU: Final = torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class Matching:
    """What was found so far. ``builds`` are in the order in which the state is to be changed.
    ``misfits`` are the stored shapes of parameters that have another, by name; ``filled`` the
    places and leaves of tensors in the state that stand for themselves, by their memory."""

    tensors: Mapping[str, StoredTensor]
    options: LoadOptions
    rank: int
    world_size: int
    parameters: Mapping[int, ParameterName]
    device: torch.device | None = None
    slots: list[Slot] = field(default_factory=list)
    builds: list[Build] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[Difference] = field(default_factory=list)
    dtypes: list[Difference] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    not_restored: list[str] = field(default_factory=list)
    wanted_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stored_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    misfits: dict[str, tuple[int, ...]] = field(default_factory=dict)
    filled: dict[Any, tuple[str, str]] = field(default_factory=dict)
    _fitted: set[str] = field(default_factory=set)

    def report(self) -> LoadReport:
        """What does not fit, on this rank."""
        unfit = [
            f"nothing in the checkpoint or the state fits {pattern!r}"
            for pattern in self.options.include or ()
            if pattern not in self._fitted
        ]
        return LoadReport(
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            shapes=tuple(self.shapes),
            dtypes=tuple(self.dtypes),
            other=(*self.other, *unfit),
        )

    def whole(self, stored: object, place: str = "") -> Callable[[Staging], Any]:
        """Everything that is stored at a place, as new tensors. Returns what makes it once it is
        staged."""
        own = self.own(stored, place, quiet=True)
        slots: dict[int, Slot] = {}
        like = Like(device=self.device or CPU)
        everything = bool(place) and self.is_under(place)
        for steps, ref in refs_in(own):
            at = join(place, ".".join(map(str, steps))) if steps else place
            if everything or self.is_included(at):
                slots[id(ref)] = self.add(Slot(place=at, ref=ref, like=like))
        return lambda staging: replaced(own, slots, staging)

    def slot(
        self, live: torch.Tensor, ref: LeafRef, place: str, *, may_be_direct: bool = True
    ) -> Slot | None:
        """A slot for a live tensor, unless what is stored does not fit it."""
        stored = self.tensors[ref.name]
        if why_not := unfillable(live):
            self.other.append(f"{place} {why_not}")
            return None
        if not self.is_shape(place, stored.shape, tuple(live.shape)):
            return None
        dtype = torch_dtype(stored.dtype)
        if dtype != live.dtype:
            self.dtypes.append(
                Difference(
                    place=place,
                    stored=dtype_of(stored.dtype).torch_name or stored.dtype,
                    wanted=str(live.dtype).removeprefix("torch."),
                )
            )
        direct = None
        if self.options.in_place and may_be_direct and dtype == live.dtype:
            local = local_of(live)
            direct = local if local.device == CPU and local.is_contiguous() else None
        if ref.kind != "tensor":
            ref = LeafRef(kind="tensor", name=ref.name)
        like = Like.of(live)
        if live.is_meta:
            like = replace(like, device=self.device or CPU)
        return self.add(Slot(place=place, ref=ref, like=like, direct=direct, is_kept=live.is_meta))

    def add(self, slot: Slot) -> Slot:
        self.slots.append(slot)
        return slot

    def own(self, stored: Any, place: str, *, quiet: bool = False) -> Any:
        """A stored value as this rank has it: of what each rank has its own of, there is one. It
        stays, and is listed unless ``quiet``, if it was saved by another number of ranks."""
        if isinstance(stored, PerRank):
            return self._of_rank(stored, place, quiet=quiet)
        if type(stored) in DICTS or type(stored) in LISTS:
            return mapped(stored, lambda key, value: self.own(value, join(place, key), quiet=quiet))
        return stored

    def is_shape(self, place: str, stored: Sequence[int], wanted: Sequence[int]) -> bool:
        if tuple(stored) == tuple(wanted):
            return True
        self.shapes.append(
            Difference(place=place, stored=str(tuple(stored)), wanted=str(tuple(wanted)))
        )
        return False

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def unlike(self, place: str, stored: object, wanted: str) -> None:
        """Something of another kind is stored than is wanted."""
        what = "a tensor" if isinstance(stored, LeafRef) else f"a {type(stored).__name__}"
        self.other.append(f"{place} is {what} in the checkpoint, and {wanted} is wanted")

    def miss(self, place: str, live: object) -> None:
        """Something is wanted and not stored."""
        self.missing.append(place)
        if isinstance(live, torch.Tensor):
            self.wanted_shapes[place] = tuple(live.shape)

    def pass_over(self, place: str, stored: object) -> None:
        """Something is stored and not wanted."""
        self.unexpected.append(place)
        if isinstance(stored, LeafRef):
            self.stored_shapes[place] = self.shape_of(stored.name)

    def is_included(self, place: str) -> bool:
        if self.options.include is None:
            return True
        self._fitted.update(self.options.fitting(place))
        return self.options.includes(place)

    def is_under(self, place: str) -> bool:
        """Whether something that is filled as a whole is included: ``x.*`` includes all of x."""
        return self.is_included(place) or self.is_included(f"{place}.")

    def _of_rank(self, stored: PerRank, place: str, *, quiet: bool) -> Any:
        saved = len(stored.values)
        chosen: object = self.rank
        if saved != self.world_size:
            if self.options.remap is None:
                self.not_restored += [] if quiet else [place]
                return stored
            try:
                chosen = self.options.remap(self.rank, self.world_size, saved)
            except Exception as error:
                raise LoadError(
                    f"remap({self.rank}, {self.world_size}, {saved}) raised "
                    f"{type(error).__name__}: {error}. Nothing was changed"
                ) from error
        if not isinstance(chosen, int) or not 0 <= chosen < saved:
            raise LoadError(
                f"remap gave {chosen!r} for rank {self.rank}; it must be one of the saved ranks, 0 "
                f"to {saved - 1}. Nothing was changed"
            )
        return self.own(stored.values[chosen], place, quiet=quiet)
