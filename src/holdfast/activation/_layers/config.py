"""What a caller may ask of the checkpointing of layers. Knows values, not models."""

import enum
from dataclasses import dataclass
from typing import Any, Final, Self

from holdfast import _checks


class CheckpointStrategy(enum.Enum):
    """Which of the candidate layers are checkpointed: recomputed in the backward, not kept.

    The first two follow from names. The others need the bytes and times of the layers, which are
    learnt from one forward and backward with every candidate checkpointed.
    """

    INTERVAL = "interval"
    """Every ``interval``-th, beginning with the first."""

    SELECTIVE = "selective"
    """Those that ``layers`` names."""

    SIZE_BASED = "size_based"
    """Those whose activations take ``min_bytes`` or more."""

    MEMORY_AWARE = "memory_aware"
    """The largest, as many as it takes for what the others keep, and the largest replay, to fit
    into ``memory_share`` of the available memory."""

    SMART = "smart"
    """Those that free most bytes for a millisecond of replay, until ``target_share`` of the bytes
    of all candidates is freed."""

    @property
    def learns(self) -> bool:
        """Whether it needs to know the layers' bytes and times."""
        return self not in {CheckpointStrategy.INTERVAL, CheckpointStrategy.SELECTIVE}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Which layers of a model to checkpoint. Immutable; impossible values raise ``ValueError``.

    ``strategy``: how the layers are chosen; its text will do.
    ``layers``: the candidates, as names of modules or ``fnmatch`` patterns of them, of which each
    must match; of what one pattern matches, the outermost modules count. ``None`` takes the
    repeated layers of the model. ``selective`` needs it, and checkpoints all of them.

    The others are each read by one strategy and refused with any other:
    ``interval`` (``interval``): 1, the default, is every layer.
    ``min_bytes`` (``size_based``): must be given.
    ``memory_share`` (``memory_aware``): more than 0, at most 1, by default a half. It is a share
    of what is available after the first step, for each device on its own.
    ``target_share`` (``smart``): more than 0, at most 1, by default a half.
    """

    strategy: CheckpointStrategy = CheckpointStrategy.INTERVAL
    layers: tuple[str, ...] | None = None
    interval: int | None = None
    min_bytes: int | None = None
    memory_share: float | None = None
    target_share: float | None = None

    def __post_init__(self) -> None:
        strategy = _strategy(self.strategy)
        object.__setattr__(self, "strategy", strategy)
        for field, reader in _READER.items():
            checked = _checked(field, getattr(self, field), reader, strategy)
            object.__setattr__(self, field, checked)
        if self.layers is not None:
            object.__setattr__(self, "layers", _patterns(self.layers))
        elif strategy is CheckpointStrategy.SELECTIVE:
            raise ValueError(
                "layers must be given with strategy 'selective': the names of the modules to "
                "checkpoint, or patterns of them such as 'blocks.*'"
            )

    @classmethod
    def every_layer(cls) -> Self:
        """Recompute every repeated layer: least memory, about a third more time."""
        return cls(strategy=CheckpointStrategy.INTERVAL, interval=1)

    @classmethod
    def half(cls) -> Self:
        """Recompute every second of the repeated layers."""
        return cls(strategy=CheckpointStrategy.INTERVAL, interval=2)

    @classmethod
    def fit_memory(cls, share: float = 0.5) -> Self:
        """Recompute only as much as this machine's memory asks for."""
        return cls(strategy=CheckpointStrategy.MEMORY_AWARE, memory_share=share)


_READER: Final = {
    "interval": CheckpointStrategy.INTERVAL,
    "min_bytes": CheckpointStrategy.SIZE_BASED,
    "memory_share": CheckpointStrategy.MEMORY_AWARE,
    "target_share": CheckpointStrategy.SMART,
}

_DEFAULT: Final = {"interval": 1, "memory_share": 0.5, "target_share": 0.5}


def _strategy(value: object) -> CheckpointStrategy:
    try:
        return CheckpointStrategy(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in CheckpointStrategy)
        raise ValueError(f"strategy must be one of {known}, not {value!r}") from None


def _checked(
    field: str, value: Any, reader: CheckpointStrategy, strategy: CheckpointStrategy
) -> float | None:
    if reader is not strategy:
        if value is None:
            return None
        raise ValueError(
            f"{field}={value!r} is refused: strategy {strategy.value!r} does not read it, "
            f"only {reader.value!r} does"
        )
    if value is None:
        value = _DEFAULT.get(field)
    if value is None:
        raise ValueError(f"{field} must be given with strategy {strategy.value!r}")
    if field in {"interval", "min_bytes"}:
        return _checks.count(field, value, least=1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{field} must be more than 0 and at most 1, not {value!r}")
    return float(value)


def _patterns(value: object) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if (
        not isinstance(given, tuple | list)
        or not given
        or not all(isinstance(each, str) and each for each in given)
    ):
        raise ValueError(
            f"layers must be names of modules, or patterns of them such as 'blocks.*', "
            f"not {value!r}"
        )
    return tuple(given)
