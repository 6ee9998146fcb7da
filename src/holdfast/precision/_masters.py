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

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that are changed. Others, as FP64, stay what they are."""


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Pair:
    """A parameter of the model and where its master is.

    ``master`` is in the optimizer's groups, at ``place``: the weight itself if it is not split or
    has a ``remainder``. ``stays``: its dtype is never changed.
    """

    name: str
    weight: nn.Parameter
    place: tuple[int, int]
    stays: bool
    master: torch.Tensor
    remainder: torch.Tensor | None = None

    @property
    def is_split(self) -> bool:
        """Whether the weight must be written when the master is."""
        return self.master is not self.weight

    @property
    def value(self) -> torch.Tensor:
        """The master: the live one, or made of a remainder."""
        if self.remainder is None:
            return self.master
        return joined(self.weight.detach(), self.remainder)

    def cast(self, value: torch.Tensor) -> torch.Tensor:
        """What the weight is if the master is ``value``."""
        if self.remainder is not None:
            return rounded(value)
        return value.to(self.weight.dtype)

    def fill(self, value: torch.Tensor) -> None:
        """Give master and weight this value, in place."""
        with torch.no_grad():
            if self.remainder is not None:
                split_into(
                    torch.empty_like(self.weight, dtype=torch.float32).copy_(value),
                    self.weight,
                    self.remainder,
                )
                return
            self.master.copy_(value)
            if self.is_split:
                self.weight.copy_(self.master)


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
        """Make pairs of the last groups, as many as have names; dtypes are as they were."""
        first = len(self._inner.param_groups) - len(names)
        for index, of_group in enumerate(names, start=first):
            weights = self._inner.param_groups[index]["params"]
            for position, (name, weight) in enumerate(zip(of_group, weights, strict=True)):
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
            source = weight.detach().float()  # the same memory, if it is FP32
            if wanted is not torch.float32 and not is_dense(source):
                source = source.contiguous()  # torch's fused kernels would step the gaps
            state = self._inner.state.pop(weight, None)
            if wanted is torch.float32:
                if weight.dtype is not torch.float32:
                    set_data(weight, source)
            elif self._storage == "remainder":
                upper = torch.empty_like(source, dtype=wanted)
                pair.remainder = torch.empty_like(source, dtype=torch.int16)
                split_into(source.clone(), upper, pair.remainder)
                set_data(weight, upper)
            else:
                pair.master = nn.Parameter(source, requires_grad=weight.requires_grad)
                set_data(weight, source.to(wanted))
            self._put(pair, state)

    def merge(self) -> None:
        """Make every weight FP32 and its own master, without copying a master. Idempotent."""
        for pair in self.pairs:
            if pair.is_split or pair.remainder is not None:
                state = self._inner.state.pop(pair.master, None)
                set_data(pair.weight, pair.value.detach())
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
    parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(getattr(parameter, "grad_dtype", None) or data.dtype)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_fp32(value: Any) -> Any:
    """State of a 16-bit parameter as that of its master: torch's kernels want one dtype."""
    if isinstance(value, torch.Tensor) and value.dtype in FLOATS:
        return value.float()
    return value
