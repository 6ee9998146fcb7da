"""What a caller may ask of a save, of a load and of a checkpointer. Knows values, does nothing.

Everything here is valid once it is built: a value that cannot be meant is a ``ValueError`` that
names its field. Where a field is an enum its text will do, as a configuration file has it.
"""

import enum
import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args

from holdfast import _checks
from holdfast.catalog import Retention
from holdfast.catalog._catalog import checked_metrics, checked_step
from holdfast.catalog._names import check_prefix
from holdfast.contracts import Storage
from holdfast.distributed._pool import LEAST_BYTES
from holdfast.distributed._progress import ProgressCallback
from holdfast.distributed._save_record import OnSave
from holdfast.distributed._validation import (
    CompatibilityChecker,
    IntegrityChecker,
    checked_checkers,
)
from holdfast.format import CompressionLevel
from holdfast.resilience import RetryPolicy
from holdfast.storage import StorageOptions

ReshardingStrategy = Literal["parallel", "broadcast", "simple"]
"""How ranks share the reading; see ``LoadOptions``."""

SnapshotMode = Literal["live", "copy"]
WhenBusy = Literal["wait", "refuse"]

RankRemap = Callable[[int, int, int], int]
"""``(rank, world_size, saved_world_size)`` to the saved rank to take after."""

DEFAULT_STORAGE: Final = "./checkpoints"

V = TypeVar("V")
Member = TypeVar("Member", bound=enum.Enum)


class CheckpointFormat(enum.Enum):
    """How the tensors of a checkpoint are laid out in files. All load on any number of ranks."""

    SINGLE_FILE = "single_file"
    """One data file, for states that are small or are to be handed on."""

    MULTI_SHARD = "multi_shard"
    """Every rank writes its own, at the same time."""

    CONSOLIDATED = "consolidated"
    """The model as whole tensors in the files of Hugging Face, the rest of the state beside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save. The same on every rank, but for ``progress``.

    ``checkpoint_prefix``: its name; ``None`` has one made. With ``overwrite`` a checkpoint of that
    name is replaced in one step.
    ``step``, ``metrics``, ``custom_metadata``: kept in its record; the first two are listed.
    ``timeout_s``: how long the ranks wait for each other; ``None`` is the checkpointer's default.
    ``check_replicas``: compare every replicated tensor between ranks, not only buffers.
    ``replicas_from``: where replicas differ, store this rank's; ``None`` refuses
    (``ReplicaMismatchError``).
    ``incremental``: tensors whose bytes an earlier checkpoint of this storage has, as the digests
    say, are referred to there, not written again. The checkpoint then needs that one's files, which
    stay when that one is deleted. Only for ``MULTI_SHARD``.
    ``progress``: told how far this rank is; what it raises ends the save.

    For ``save_async`` only:
    ``snapshot``: how the state is kept as it is while training goes on. ``"live"`` copies what
    torch optimizers own in the background and, before one steps, what is left; ``"copy"`` copies
    all of it before ``save_async`` returns.
    ``when_busy``: while the last save is under way, ``"wait"`` for it or ``"refuse"``
    (``SaveInProgressError``).
    """

    checkpoint_prefix: str | None = None
    format: CheckpointFormat = CheckpointFormat.MULTI_SHARD
    compression_level: CompressionLevel = CompressionLevel.NONE
    include_optimizer: bool = True
    include_rng_state: bool = True
    timeout_s: float | None = None
    custom_metadata: Mapping[str, object] = field(default_factory=dict)
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    overwrite: bool = False
    check_replicas: bool = False
    replicas_from: int | None = None
    incremental: bool = False
    progress: ProgressCallback | None = None
    snapshot: SnapshotMode = "live"
    when_busy: WhenBusy = "wait"

    def __post_init__(self) -> None:
        _one_of("snapshot", self.snapshot, SnapshotMode)
        _one_of("when_busy", self.when_busy, WhenBusy)
        _flags(self, "include_optimizer", "include_rng_state", "overwrite", "check_replicas")
        _flags(self, "incremental")
        _common(self)
        _set(self, "format", _member("format", self.format, CheckpointFormat))
        level = _member("compression_level", self.compression_level, CompressionLevel)
        _set(self, "compression_level", level)
        if self.format is CheckpointFormat.CONSOLIDATED and level is not CompressionLevel.NONE:
            raise ValueError(
                f"compression_level {level.value!r} is refused: Hugging Face files cannot be "
                "compressed; use MULTI_SHARD or compression_level=NONE"
            )
        if self.incremental and self.format is not CheckpointFormat.MULTI_SHARD:
            raise ValueError(
                f"incremental=True is refused with format {self.format.value!r}: its files are to "
                "be handed on, and would lack what is in other checkpoints; use MULTI_SHARD"
            )
        _set(self, "custom_metadata", _custom(self.custom_metadata))
        _set(self, "metrics", _Frozen(checked_metrics(self.metrics)))
        if self.step is not None:
            _set(self, "step", checked_step(self.step))
        if self.replicas_from is not None:
            _checks.count("replicas_from", self.replicas_from, least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load. The same on every rank, but for ``progress``.

    ``checkpoint_prefix``: which. It must be given.
    ``include``: load only the places that fit one of these patterns (``"model.*"``), or are inside
    of one that they name. Optimizers and other statefuls are loaded as a whole.
    ``strict``: whatever is missing, unexpected or of another shape or dtype refuses the load;
    without it, what fits is loaded and the result says what did not.
    ``skip_validation``: leave out the checks beforehand. Digests are compared all the same.
    ``resharding_strategy``: each rank reads just its ranges (``"parallel"``), one rank of those
    that want the same reads it and sends it to them (``"broadcast"``), or each rank reads whole
    stored boxes (``"simple"``).
    ``in_place``: read into the tensors themselves. Saves a copy of the rank's part; after an
    error they hold anything.
    ``remap``: with another number of ranks, the saved rank whose per-rank values (random number
    generators, say) this rank takes, from ``(rank, world_size, saved_world_size)``. ``None``
    restores none of them.
    ``timeout_s``, ``progress``: as in ``SaveOptions``.
    """

    checkpoint_prefix: str | None = None
    load_optimizer: bool = True
    load_rng_state: bool = True
    resharding_strategy: ReshardingStrategy = "parallel"
    timeout_s: float | None = None
    skip_validation: bool = False
    strict: bool = True
    include: Sequence[str] | None = None
    in_place: bool = False
    remap: RankRemap | None = None
    progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        _flags(self, "load_optimizer", "load_rng_state", "skip_validation", "strict", "in_place")
        _common(self)
        _one_of("resharding_strategy", self.resharding_strategy, ReshardingStrategy)
        if self.include is not None:
            _set(self, "include", _patterns(self.include))
        _callable("remap", self.remap)

    def includes(self, place: str) -> bool:
        """Whether ``place`` is to be loaded."""
        return self.include is None or bool(self.fitting(place))

    def fitting(self, place: str) -> tuple[str, ...]:
        """Those patterns of ``include`` that are ``place`` or one around it, or match all of it."""
        return tuple(
            pattern
            for pattern in self.include or ()
            if place == pattern
            or place.startswith(f"{pattern}.")
            or fnmatch.fnmatchcase(place, pattern)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """What a checkpointer is made of.

    ``storage``: one, or its URL, path or options. ``retry_policy`` is for what may pass: any
    request to a storage that is opened here, and the writing of a file to one that is given.
    ``integrity_checkers`` and ``compatibility_checkers`` are asked before every load.
    ``default_timeout_s``: how long ranks wait for each other unless a call says otherwise.
    ``retention``: which checkpoints of the storage stay after each save; ``None`` deletes none.
    ``staging_bytes``: the most memory that ``save_async`` holds for copies of this rank's state.
    ``None`` is as much as the state takes, if that is at most half of what is free.
    ``on_save``: told what each save took, and how it ended, by whichever thread saved.
    """

    storage: StorageOptions | Storage | str | os.PathLike[str] = DEFAULT_STORAGE
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    integrity_checkers: Sequence[IntegrityChecker] = ()
    compatibility_checkers: Sequence[CompatibilityChecker] = ()
    default_timeout_s: float = 600.0
    retention: Retention | None = None
    staging_bytes: int | None = None
    on_save: OnSave | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.storage, StorageOptions | str | os.PathLike) or not self.storage:
            _storage(self.storage)
        _checks.instance("retry_policy", self.retry_policy, RetryPolicy)
        for name in ("integrity_checkers", "compatibility_checkers"):
            _set(self, name, checked_checkers(name, getattr(self, name)))
        timeout_s = _checks.seconds("default_timeout_s", self.default_timeout_s)
        _set(self, "default_timeout_s", timeout_s)
        if self.retention is not None:
            _checks.instance("retention", self.retention, Retention)
        checked_staging(self.staging_bytes)
        _callable("on_save", self.on_save)


class _Frozen(Mapping[str, V]):
    """A copy of a mapping that stays as it is. Unlike ``MappingProxyType`` it can be pickled and
    copied."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


def _set(options: object, name: str, value: object) -> None:
    object.__setattr__(options, name, value)


def _flags(options: object, *names: str) -> None:
    for name in names:
        _checks.instance(name, getattr(options, name), bool)


def _common(options: SaveOptions | LoadOptions) -> None:
    if options.checkpoint_prefix is not None:
        check_prefix("checkpoint_prefix", options.checkpoint_prefix)
    if options.timeout_s is not None:
        _set(options, "timeout_s", _checks.seconds("timeout_s", options.timeout_s))
    _callable("progress", options.progress)


def _one_of(name: str, value: object, kind: Any) -> None:
    known = get_args(kind)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")


def checked_staging(staging_bytes: object) -> int | None:
    """``staging_bytes``, or ``ValueError`` unless a state can be copied through so much memory."""
    if staging_bytes is None:
        return None
    checked = _checks.count("staging_bytes", staging_bytes, least=0)
    if checked < LEAST_BYTES:
        raise ValueError(f"staging_bytes must be at least {LEAST_BYTES}, not {checked}")
    return checked


def _callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, not {value!r}")


def _member(name: str, value: object, kind: type[Member]) -> Member:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{name} must be one of {known}, not {value!r}") from None


def _custom(value: object) -> _Frozen[object]:
    if not isinstance(value, Mapping):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"custom_metadata must be a dict of values by name, not {value!r}"
        )
    for key in value:
        _checks.instance("each name in custom_metadata", key, str)
    return _Frozen(value)


def _patterns(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"include must be several patterns, as [{value!r}], not one text"
        )
    if not isinstance(value, Sequence):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"include must be a list of patterns such as 'model.*', not {value!r}"
        )
    return tuple(_checks.instance("each pattern in include", pattern, str) for pattern in value)


def _storage(value: object) -> None:
    if not hasattr(value, "open_writer"):
        raise ValueError(f"storage must be a Storage, a path or a URL, not {value!r}")
    _checks.storage("storage", value)
