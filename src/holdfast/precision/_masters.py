"""Training weights and their FP32 masters, as pairs: split and merged in place. Knows dtypes and an
optimizer's groups and state, and no gradient's value.

A master is the tensor that the optimizer steps. A weight that is FP32 is its own. Where a weight is
split, its former FP32 memory becomes the master and the weight gets memory of its own, so that 6
bytes are held per parameter, and with remainders (``_remainder``) 4.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.precision._blocks import is_dense
from holdfast.precision._options import MasterStorage
from holdfast.precision._remainder import joined, rounded, split_into

NARROW: Final = (torch.float16, torch.bfloat16)
FLOATS: Final = (*NARROW, torch.float32)
"""The dtypes that are changed. Others, as FP64, stay what they are."""


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Pair:
    """A parameter of the model and where its master is.

    ``master`` is in the optimizer's groups, at ``place``: the weight itself if it is not split or
    has a ``remainder``. ``stays``: its dtype is never changed. ``written`` and ``made_of``: what
    the weight and its master looked like when the one was last made of the other.
    """

    name: str
    weight: nn.Parameter
    place: tuple[int, int]
    stays: bool
    master: torch.Tensor
    remainder: torch.Tensor | None = None
    written: tuple[int, int] = (0, 0)
    made_of: int = 0

    @property
    def is_split(self) -> bool:
        """Whether the weight must be written when the master is."""
        return self.master is not self.weight

    @property
    def value(self) -> torch.Tensor:
        """The master: the live one, or a new one, made of a remainder or of what something else has
        written to the weight."""
        if self.remainder is not None:
            changed = self.is_changed
            return joined(self.weight.detach(), self._kept() if changed else self.remainder)
        return self._followed() if self.is_changed else self.master

    @property
    def dtype(self) -> torch.dtype:
        """That of the master's value."""
        return torch.float32 if self.remainder is not None else self.master.dtype

    def fill(self, value: torch.Tensor) -> None:
        """Give master and weight this value, in place."""
        with torch.no_grad():
            if self.remainder is not None:
                split_into(
                    torch.empty_like(self.weight, dtype=torch.float32).copy_(value),
                    self.weight,
                    self.remainder,
                )
                self.note()
                return
            self.master.copy_(value)
            self.cast()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def cast(self) -> None:
        """Make the weight of the master."""
        if self.is_split:
            self.weight.copy_(self.master)
            self.note()

    def note(self) -> None:
        """The weight was made of the master just now."""
        self.written = self._now()
        self.made_of = self.master._version  # noqa: SLF001 -- nothing public tells

    @property
    def is_changed(self) -> bool:
        """Whether something else has written to the weight since, as far as torch counts it."""
        is_apart = self.is_split or self.remainder is not None
        return is_apart and self.written != self._now()

    @property
    def is_behind(self) -> bool:
        """Whether something else has written to the master since, and not to the weight."""
        return self.is_split and not self.is_changed and self.made_of != self.master._version  # noqa: SLF001

    @property
    def training(self) -> torch.Tensor:
        """The weight, or what it becomes at the next step if it is behind."""
        weight = self.weight.detach()
        return self.master.detach().to(weight.dtype) if self.is_behind else weight

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def follow(self) -> None:
        """Have the one take what something else has written to the other. Where a weight that was
        written to is still its master, rounded, that keeps its bits."""
        if self.is_behind:
            self.cast()
            return
        if not self.is_changed:
            return
        if self.remainder is not None:
            self.remainder.copy_(self._kept())
        else:
            self.master.copy_(self._followed())
        self.note()

    def _followed(self) -> torch.Tensor:
        weight, master = self.weight.detach(), self.master.detach()
        return torch.where(master.to(weight.dtype) != weight, weight.to(master.dtype), master)

    def _kept(self) -> torch.Tensor:
        """The remainder of a weight that was written to. It is less than the weight can tell, but
        for numbers that have no lesser bits: with them it would be no number."""
        weight = self.weight.detach()
        assert self.remainder is not None  # noqa: S101 -- for mypy
        return self.remainder.masked_fill((weight == 0) | ~torch.isfinite(weight), 0)

    def _now(self) -> tuple[int, int]:
        return self.weight._version, self.weight.data_ptr()  # noqa: SLF001 -- nothing public tells


@final
class Masters:
    """The pairs of an optimizer, whose groups and state are edited in place."""

    def __init__(self, inner: Optimizer, dtype: torch.dtype, storage: MasterStorage) -> None:
        self._inner = inner
        self._dtype = dtype
        self._storage = storage
        self.pairs: list[Pair] = []

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def adopt(self, names: Sequence[Sequence[str]], stays: Callable[[nn.Parameter], bool]) -> None:
        """Make pairs of the last groups, as many as have names; dtypes are as they were. Raises
        ``ValueError`` for a weight that has a pair already."""
        known = {id(pair.weight): pair.name for pair in self.pairs}
        first = len(self._inner.param_groups) - len(names)
        for index, of_group in enumerate(names, start=first):
            weights = self._inner.param_groups[index]["params"]
            for position, (name, weight) in enumerate(zip(of_group, weights, strict=True)):
                if id(weight) in known:
                    raise ValueError(f"{known[id(weight)]!r} is in the optimizer already")
                self.pairs.append(
                    Pair(
                        name=name,
                        weight=weight,
                        place=(index, position),
                        stays=stays(weight) or weight.dtype not in FLOATS,
                        master=weight,
                    )
                )

    def wanted(self, pair: Pair) -> torch.dtype:
        """The dtype that ``split`` gives the weight."""
        if pair.weight.dtype not in FLOATS:
            return pair.weight.dtype
        return torch.float32 if pair.stays else self._dtype

    def changes(self, pair: Pair) -> bool:
        """Whether ``split`` gives the weight another dtype."""
        return pair.weight.dtype is not self.wanted(pair)

    def split(self) -> None:
        """Give each weight its dtype, and a master beside it if that is not FP32. Idempotent."""
        for pair in self.pairs:
            if pair.is_split or pair.remainder is not None or pair.weight.dtype not in FLOATS:
                continue
            wanted, weight = self.wanted(pair), pair.weight
            # The same memory, if it is FP32, but of the master torch counts writes by themselves.
            source = weight.data.float()
            if wanted is not torch.float32 and not is_dense(source):
                source = source.contiguous()  # torch's fused kernels would step the gaps
            state = self._inner.state.pop(weight, None)
            if wanted is torch.float32:
                gaps = not isinstance(weight, DTensor) and not is_dense(source)
                if gaps or weight.dtype is not torch.float32:
                    set_data(weight, source.contiguous() if gaps else source)
            elif self._storage == "remainder":
                upper = torch.empty_like(source, dtype=wanted)
                pair.remainder = torch.empty_like(source, dtype=torch.int16)
                split_into(source.clone(), upper, pair.remainder)
                set_data(weight, upper)
                pair.note()
            else:
                pair.master = nn.Parameter(source, requires_grad=weight.requires_grad)
                set_data(weight, source.to(wanted))
                pair.note()
            self._put(pair, state)

    def merge(self) -> None:
        """Make every weight FP32 and its own master, without copying a master. Idempotent."""
        for pair in self.pairs:
            if pair.is_split or pair.remainder is not None or pair.weight.dtype in NARROW:
                value = pair.value.detach().float()
                state = self._inner.state.pop(pair.master, None)
                set_data(pair.weight, value)
                pair.master, pair.remainder = pair.weight, None
                self._put(pair, state)

    def _put(self, pair: Pair, state: Any) -> None:
        group, position = pair.place
        self._inner.param_groups[group]["params"][position] = pair.master
        if state:
            self._inner.state[pair.master] = {key: _as_fp32(v) for key, v in state.items()}


def set_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Give a parameter other memory and another dtype; its gradient follows."""
    gradient, parameter.grad = parameter.grad, None
    followed = parameter.grad_dtype is parameter.dtype
    parameter.data = data
    if followed and parameter.grad_dtype is not data.dtype:  # it stays where it was ever set
        parameter.grad_dtype = data.dtype
    if gradient is not None:
        parameter.grad = gradient.to(parameter.grad_dtype or data.dtype)


def set_grad(parameter: torch.Tensor, gradient: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Give a parameter a gradient of this dtype, which may be another than its own."""
    parameter.grad = None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, whose collectives are waited for."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_cast(master: torch.Tensor, weight: torch.Tensor, *, half_up: bool) -> bool:
    """Whether this rank's part of a weight is its master, rounded; ``half_up`` as remainders are,
    or else to even."""
    value, found = local_of(master), local_of(weight)
    if half_up and found.dtype is torch.bfloat16 and value.dtype is torch.float32:
        return bool(torch.equal(rounded(value), found))
    return bool(torch.equal(value.to(found.dtype), found))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all of this rank's part is."""
    value = local_of(tensor)
    # A sum is not finite if anything in it is not, and takes half the time.
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())


def _as_fp32(value: Any) -> Any:
    """State of a 16-bit parameter as that of its master: torch's kernels want one dtype."""
    if isinstance(value, torch.Tensor) and value.dtype in FLOATS:
        return value.float()
    return value
