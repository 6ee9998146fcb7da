"""What mixed precision is asked to do. Knows the options and their limits, and no tensor."""

import dataclasses
import enum
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, Self, TypeVar, get_args

import msgspec
import torch

from holdfast import _checks

__all__ = ["GradAccumulation", "MasterStorage", "MixedPrecisionOptions", "Precision"]

T = TypeVar("T")

GradAccumulation = Literal["training", "fp32"]
MasterStorage = Literal["fp32", "remainder"]

LEAST_SCALE: Final = 2.0**-126
"""The least that is an FP32 number with all its digits: gradients are divided by it."""

NORMS: Final = (
    *("*LayerNorm", "*RMSNorm", "*GroupNorm", "*BatchNorm", "*BatchNorm?d"),
    *("*InstanceNorm", "*InstanceNorm?d", "LocalResponseNorm"),
)
"""The classes of layers that stay FP32 unless ``fp32_layer_patterns`` says otherwise."""


class Precision(enum.Enum):
    """The dtype that a model is trained in."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]


_DTYPES: Final = {
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.FP32: torch.float32,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionOptions:
    """How to train with 16-bit weights and FP32 masters. Checked when made, with ``ValueError``.

    ``precision``: of the training weights, or its name ("bf16").
    ``dynamic_scaling``: whether the loss scale follows overflows; else it stays ``initial_scale``.
    ``growth_factor``, ``growth_interval``: after so many applied steps in a row the scale grows.
    ``backoff_factor``, ``hysteresis``: how it shrinks at an overflow, and how many in a row there
    must be before it does.
    ``min_scale``, ``max_scale``: it never leaves these.
    ``max_consecutive_overflows``: after so many skipped steps in a row the model goes on in FP32,
    from its masters. ``None``: never.
    ``max_grad_norm``: clip the norm of all gradients together to this.
    ``fp32_layer_patterns``: layers that stay FP32, by the names of modules or of their classes
    ("head", "blocks.*.norm?", "*LayerNorm"). ``None``: normalisation layers, if the model is given.
    ``cast_inputs``: cast the floating tensors a model is called with to its dtype.
    ``grad_accumulation``: add gradients up in the dtype of the weights, or in FP32.
    ``master_storage``: FP32 masters beside the weights, or only the 16 bits of each that a BF16
    weight lacks ("remainder").
    """

    precision: Precision = Precision.BF16
    dynamic_scaling: bool = False
    initial_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    max_consecutive_overflows: int | None = None
    max_grad_norm: float | None = None
    fp32_layer_patterns: tuple[str, ...] | None = None
    cast_inputs: bool = True
    grad_accumulation: GradAccumulation = "training"
    master_storage: MasterStorage = "fp32"

    def __post_init__(self) -> None:
        self._set("precision", _precision(self.precision))
        for name in ("dynamic_scaling", "cast_inputs"):
            _checks.instance(name, getattr(self, name), bool)
        _positive("min_scale", self.min_scale)
        self._set("min_scale", _checks.between("min_scale", self.min_scale, LEAST_SCALE))
        self._set("max_scale", _checks.between("max_scale", self.max_scale, self.min_scale))
        scale = _checks.between("initial_scale", self.initial_scale, self.min_scale, self.max_scale)
        self._set("initial_scale", scale)
        self._set("growth_factor", _checks.between("growth_factor", self.growth_factor, 1.0))
        self._set("backoff_factor", _positive("backoff_factor", self.backoff_factor, most=1.0))
        _checks.count("growth_interval", self.growth_interval, least=1)
        _checks.count("hysteresis", self.hysteresis, least=1)
        if self.max_consecutive_overflows is not None:
            _checks.count("max_consecutive_overflows", self.max_consecutive_overflows, least=1)
        if self.max_grad_norm is not None:
            self._set("max_grad_norm", _positive("max_grad_norm", self.max_grad_norm))
        self._set("fp32_layer_patterns", _patterns(self.fp32_layer_patterns))
        _one_of("grad_accumulation", self.grad_accumulation, GradAccumulation)
        _one_of("master_storage", self.master_storage, MasterStorage)
        if self.master_storage == "remainder" and self.precision is not Precision.BF16:
            raise ValueError(
                "master_storage 'remainder' is for BF16 weights, which are the upper 16 bits of "
                f"FP32; with precision {self.precision.value!r} use 'fp32'"
            )

    @classmethod
    def for_fp16(cls, **changes: Any) -> Self:
        """FP16 with a loss scale that is searched from 2¹⁶, and FP32 after 25 overflows in a row:
        enough for the search to reach the smallest scale first."""
        words = {
            "precision": Precision.FP16,
            "dynamic_scaling": True,
            "initial_scale": 2.0**16,
            "max_consecutive_overflows": 25,
        }
        return cls(**{**words, **changes})

    @classmethod
    def for_bf16(cls, **changes: Any) -> Self:
        """BF16, which has the range of FP32 and needs no loss scale."""
        return cls(**{"precision": Precision.BF16, **changes})

    @classmethod
    def conservative(cls, **changes: Any) -> Self:
        """FP16 for training that overflows easily: a smaller scale that grows seldom and slowly,
        clipped gradients, and gradients added up in FP32."""
        words = {
            "initial_scale": 2.0**12,
            "max_scale": 2.0**16,
            "growth_interval": 5000,
            "hysteresis": 2,
            "max_grad_norm": 1.0,
            "grad_accumulation": "fp32",
        }
        return cls.for_fp16(**{**words, **changes})

    def keeps_fp32(self, name: str, kind: str) -> bool:
        """Whether a module of this name and class stays FP32."""
        patterns = NORMS if self.fp32_layer_patterns is None else self.fp32_layer_patterns
        names = (kind,) if self.fp32_layer_patterns is None else (name, kind)
        return any(fnmatch.fnmatchcase(each, pattern) for pattern in patterns for each in names)

    def plain(self) -> dict[str, Any]:
        """As a dict of what JSON has; ``from_plain`` makes the same options of it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_plain(cls, plain: object) -> Self:
        """Raises ``ValueError`` for what is no such dict."""
        return converted(plain, cls, "these are no MixedPrecisionOptions")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def converted(plain: object, kind: type[T], refusal: str) -> T:
    """A dict of plain values as a dataclass. Raises ``ValueError``, which begins as told."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{refusal}: it is no dict")  # noqa: TRY004 -- it is the value that is wrong
    for name, value in plain.items():  # msgspec would take one for something that has items
        if isinstance(value, torch.Tensor):
            raise ValueError(f"{refusal}: {name} is a tensor")  # noqa: TRY004
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{refusal}: {error}") from error


def _precision(value: object) -> Precision:
    try:
        return Precision(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in Precision)
        raise ValueError(f"precision must be one of {known}, not {value!r}") from None


def _positive(name: str, value: object, most: float = float("inf")) -> float:
    given = _checks.between(name, value, 0.0, most)
    if given == 0:
        raise ValueError(f"{name} must be more than 0, not {value!r}")
    return given


def _patterns(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"fp32_layer_patterns must be several patterns or None, not {value!r}"
        )
    return tuple(_checks.instance("each of fp32_layer_patterns", each, str) for each in value)


def _one_of(name: str, value: object, kind: Any) -> None:
    known = get_args(kind)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")
