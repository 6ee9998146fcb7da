"""Everything a MixedPrecisionOptimizer is, as one value keyed by the names of parameters. Knows
what there is; whether it fits together is ``_structure``'s, and a live optimizer ``_state``'s.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from holdfast.precision._options import MixedPrecisionOptions
from holdfast.precision._scaler import ScalerState

SCHEMA: Final = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTree:
    """Everything a ``MixedPrecisionOptimizer`` is. Tensors are the live ones, not copies.

    ``masters``: FP32, whole values; DTensors under FSDP2. ``training``: the weights, or none.
    ``inner``: ``{"class": name, "state": {name: {...}}, "groups": [{..., "params": [names]}]}``.
    """

    version: int
    options: MixedPrecisionOptions
    masters: Mapping[str, torch.Tensor]
    training: Mapping[str, torch.Tensor]
    inner: Mapping[str, Any]
    scaler: ScalerState
    step_count: int
    skipped_steps: int
    has_fallback: bool

    def plain(self) -> dict[str, Any]:
        """As dicts of strings, numbers and tensors; ``from_plain`` makes the same tree of it."""
        return {
            "version": self.version,
            "options": self.options.plain(),
            "masters": dict(self.masters),
            "training": dict(self.training),
            "inner": dict(self.inner),
            "scaler": self.scaler.plain(),
            "step_count": self.step_count,
            "skipped_steps": self.skipped_steps,
            "has_fallback": self.has_fallback,
        }

    @classmethod
    def from_plain(cls, plain: object) -> "StateTree":
        """Raises ``ValueError`` for what is no such tree, as far as its own keys tell."""
        if not isinstance(plain, Mapping) or "version" not in plain:
            raise ValueError("this is no state of a MixedPrecisionOptimizer: it has no version")
        version = plain["version"]
        if isinstance(version, int) and version > SCHEMA:
            raise ValueError(f"its version is {version}, and this holdfast knows {SCHEMA}")
        names = [name for name in cls.__slots__ if name != "training"]
        missing = [name for name in names if name not in plain]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        given = {"training": {}, **plain}
        problems = [
            f"{name} is no dict"
            for name in ("masters", "training", "inner")
            if not isinstance(given[name], Mapping)
        ]
        options = _made(MixedPrecisionOptions.from_plain, given["options"], problems)
        scaler = _made(ScalerState.from_plain, given["scaler"], problems)
        if options is None or scaler is None or problems:
            raise ValueError("; ".join(problems))
        rest = {name: given[name] for name in cls.__slots__}
        return cls(**{**rest, "options": options, "scaler": scaler})


def _made(make: Callable[[object], T], plain: object, problems: list[str]) -> T | None:
    try:
        return make(plain)
    except ValueError as error:
        problems.append(str(error))
        return None
