"""A captured state as named leaves and an encoded tree in pieces: what a rank brings to a save.

Knows names and this rank's memory; knows nothing of what other ranks have. Pure but for reading
tensors to digest them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, Literal

import numpy as np
import torch

from holdfast.catalog._shard_write import ArraySource, Source
from holdfast.catalog._writing import storable_array
from holdfast.distributed._capture import Captured, Place
from holdfast.distributed._kept_source import KeptSource
from holdfast.distributed._snapshot import Kept
from holdfast.distributed._tensor_source import TensorSource, box_of
from holdfast.distributed._tensors import (
    Like,
    Unstorable,
    check_storable,
    code_of,
    global_shape,
    identity,
    memory_of,
)
from holdfast.errors import SaveError
from holdfast.format import (
    DType,
    LeafRef,
    ShardEntry,
    ValuePath,
    digest,
    digest_of,
    dtype_of_numpy,
    encode_value,
)
from holdfast.reshard import Box, Layout, Leaf, LeafList, Part

_NAME_CHARS: Final = 1000
_PIECES: Final = 1000
_SAMPLE: Final = 64
_CUT_LEVELS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A leaf of this rank: what it is as a whole, and the memory of the part that is here.

    ``is_agreed`` if it is of a module or an optimizer; ``is_checked`` if ranks that hold the same
    of it are to compare their copies.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    memory: Any
    like: Like | None
    is_agreed: bool
    is_checked: bool

    @property
    def is_plain(self) -> bool:
        """Whether every rank that has it is to have all of it."""
        return self.like is None or self.like.mesh is None

    def shard_coordinate(self) -> tuple[int, ...]:
        """Equal for ranks that hold the same part of it."""
        return () if self.like is None else self.like.shard_coordinate()

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).size * self.dtype.itemsize

    def source(self, entry: ShardEntry, part: Part) -> Source:
        """The bytes of a part of it, for a shard."""
        if isinstance(self.memory, Kept):
            return KeptSource(entry=entry, kept=self.memory, part=part)
        if isinstance(self.memory, torch.Tensor):
            return TensorSource(entry=entry, tensor=box_of(self.memory, part.local))
        where = tuple(map(slice, part.local.start, part.local.stop))
        return ArraySource(entry=entry, array=self.memory[where])

    def version(self) -> int | None:
        """Goes up when torch changes the values in place. NumPy's changes, and those by fused
        optimizers or ``.data``, are not counted."""
        if not isinstance(self.memory, torch.Tensor) or self.memory.is_inference():
            return None
        return int(self.memory._version)  # noqa: SLF001 -- nothing public tells

    def sample(self) -> bytes:
        """A digest of its first and last few bytes: enough to tell two trainings apart."""
        if isinstance(self.memory, Kept):
            return self._sample_kept(self.memory)
        if isinstance(self.memory, np.ndarray) or not self.memory.is_contiguous():
            return b""
        flat = self.memory.reshape(-1)
        ends = torch.cat([flat[:_SAMPLE], flat[-_SAMPLE:]]).cpu()
        return digest(memory_of(ends))

    def digest(self) -> bytes:
        if isinstance(self.memory, Kept):
            return digest_of(self.memory.read(0, self.memory.nbytes))
        if isinstance(self.memory, np.ndarray):
            return digest(np.ascontiguousarray(self.memory).reshape(-1).view(np.uint8).data)
        return digest(memory_of(self.memory.contiguous().cpu()))

    def _sample_kept(self, kept: Kept) -> bytes:
        if self.like is None or not kept.is_contiguous:
            return b""
        count = min(kept.nbytes, _SAMPLE * self.dtype.itemsize)
        ends = chain(kept.read(0, count), kept.read(kept.nbytes - count, kept.nbytes))
        return digest_of(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """``pieces`` are the encoded tree, cut by place; ``shared`` the leaves of the job, ``own``
    those of this rank alone, both by name. ``agreed`` is as in ``Captured``; ``model`` names the
    leaves of the module that ``Naming`` names."""

    pieces: Mapping[Place, object]
    shared: Mapping[str, Held]
    own: Mapping[str, Held]
    agreed: frozenset[Place]
    model: frozenset[str]

    def versions(self) -> list[int | None]:
        """How often each leaf was changed, as far as torch counts that."""
        return [held.version() for held in (*self.shared.values(), *self.own.values())]

    def changed_since(self, versions: Sequence[int | None]) -> list[str]:
        """Leaves that were changed since ``versions``."""
        names = (*self.shared, *self.own)
        now = self.versions()
        return [name for name, old, new in zip(names, versions, now, strict=True) if old != new]

    def without(self, names: Collection[str]) -> "Flat":
        """The same, but that this rank has nothing of these leaves."""
        kept = {name: held for name, held in self.shared.items() if name not in names}
        return replace(self, shared=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What leaves are called. ``model`` is the place of the module whose leaves go without it, as
    in files for others; ``differing`` are leaves that turned out to be each rank's own."""

    rank: int
    model: Place | None = None
    differing: frozenset[str] = frozenset()

    def is_in_model(self, place: Place) -> bool:
        return self.model is not None and place[: len(self.model)] == self.model


def flatten(captured: Captured, naming: Naming, kept: Mapping[int, Kept] | None = None) -> Flat:
    """``SaveError`` for what cannot be stored, with its place and type. ``kept`` has what a
    snapshot kept of each tensor and array, by its ``id``; without it they are the live ones."""
    walk = _Leaves(captured=captured, naming=naming, kept=kept)
    cut = dict(_cut(captured.tree, captured.agreed))
    # A tensor that is seen several times is called after its place in the model.
    encoded = {
        place: encode_value(
            cut[place],
            leaf=walk.at(place),
            root=_dotted(place) or "state",
            depth=len(place) + 1,  # one more, in case each rank turns out to have its own
        )
        for place in sorted(cut, key=lambda place: not naming.is_in_model(place))
    }
    return Flat(
        pieces={place: encoded[place] for place in cut},
        shared=walk.shared,
        own=walk.own,
        agreed=captured.agreed,
        model=frozenset(walk.model),
    )


def list_leaves(held: Iterable[Held], rank_of: Callable[[int], int]) -> LeafList:
    """What this rank says of its leaves to the others."""
    layouts: dict[Layout, int] = {}
    known: dict[tuple[Any, ...], int | None] = {}
    leaves = []
    for one in held:
        index = None
        if one.like is not None and one.like.mesh is not None:
            key = (one.like.mesh, one.like.placements, len(one.shape))
            if key not in known:
                try:
                    layout = one.like.layout(len(one.shape), rank_of)
                except Unstorable as refusal:
                    raise _refused(one.name, refusal) from None
                known[key] = None if layout is None else layouts.setdefault(layout, len(layouts))
            index = known[key]
        leaves.append(
            Leaf(
                name=one.name,
                dtype=one.dtype.code,
                itemsize=one.dtype.itemsize,
                shape=one.shape,
                layout=index,
            )
        )
    return LeafList(leaves=tuple(leaves), layouts=tuple(layouts))


def _cut(tree: object, agreed: frozenset[Place]) -> Iterator[tuple[Place, object]]:
    """The tree in pieces, so that what differs between ranks is a small part of it."""
    todo: list[tuple[Place, object]] = [((), tree)]
    while todo:
        place, value = todo.pop(0)
        if (
            type(value) is dict
            and len(place) < _CUT_LEVELS
            and place not in agreed
            and 0 < len(value) <= _PIECES
            and all(type(key) is str and key != "$" and _text(key) == key for key in value)
        ):
            todo += [((*place, key), inner) for key, inner in value.items()]
        else:
            yield place, value


@dataclass(slots=True, kw_only=True)
class _Leaves:
    captured: Captured
    naming: Naming
    kept: Mapping[int, Kept] | None
    shared: dict[str, Held] = field(default_factory=dict)
    own: dict[str, Held] = field(default_factory=dict)
    model: set[str] = field(default_factory=set)
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def at(self, base: Place) -> Callable[[ValuePath, object], LeafRef | None]:
        def leaf(path: ValuePath, value: object) -> LeafRef | None:
            kept = None if self.kept is None else self.kept.get(id(value))
            shown = value if kept is None else kept.leaf.shown
            if isinstance(shown, torch.Tensor):
                return self._leaf("tensor", (*base, *path), shown, kept)
            array = storable_array(shown)
            return None if array is None else self._leaf("array", (*base, *path), array, kept)

        return leaf

    def _leaf(
        self, kind: Literal["tensor", "array"], place: Place, value: Any, kept: Kept | None
    ) -> LeafRef:
        own_at = self._own_step(place)
        key = (own_at is None, *(identity(value) if kept is None else (id(kept.leaf),)))
        name = self._seen.get(key)
        if name is not None:
            return LeafRef(kind=kind, name=name)
        name = self._name(place, own_at)
        is_own = own_at is not None or name in self.naming.differing
        if is_own and own_at is None:
            name = self._free(f"{name}.@{self.naming.rank}")
        held = self._held(name, place, value, kept)
        self._seen[key] = name
        if self.naming.is_in_model(place):
            self.model.add(name)
        mesh = None if held.like is None else held.like.mesh
        if is_own and mesh is not None:
            raise SaveError(
                f"{name} is a DTensor, which cannot be one rank's own; nothing was saved"
            )
        if is_own:
            self.own[name] = held
        elif mesh is None or mesh.get_coordinate() is not None:
            self.shared[name] = held
        return LeafRef(kind=kind, name=name)

    def _held(self, name: str, place: Place, value: Any, kept: Kept | None) -> Held:
        is_agreed = self._is_agreed(place)
        if kept is not None:
            kept.leaf.name = name
        if isinstance(value, np.ndarray):
            return Held(
                name=name,
                dtype=dtype_of_numpy(value.dtype),
                shape=value.shape,
                memory=value if kept is None else kept,
                like=None,
                is_agreed=is_agreed,
                is_checked=not is_agreed,
            )
        try:
            memory = check_storable(value) if kept is None else kept
            dtype = code_of(value.dtype)
            like = Like.of(value)
        except Unstorable as refusal:
            raise _refused(name, refusal) from None
        return Held(
            name=name,
            dtype=dtype,
            shape=global_shape(value),
            memory=memory,
            like=like,
            is_agreed=is_agreed,
            is_checked=like.mesh is None and (not is_agreed or place in self.captured.buffers),
        )

    def _is_agreed(self, place: Place) -> bool:
        agreed = self.captured.agreed
        return bool(agreed) and any(place[:length] in agreed for length in range(len(place) + 1))

    def _own_step(self, place: Place) -> int | None:
        """Which step of a place is the number of a rank, if it is in a value of this rank's own."""
        if not self.captured.own:
            return None
        return next((n for n in range(len(place)) if place[:n] in self.captured.own), None)

    def _name(self, place: Place, own_at: int | None) -> str:
        # No name of a place has one "@" alone, so that none is that of a rank's own leaf.
        steps = [str(step).replace("@", "@@") for step in place]
        if own_at is not None:
            steps[own_at] = f"@{self.naming.rank}"
        if self.naming.is_in_model(place):
            steps = [str(step) for step in place[len(self.naming.model or ()) :]]
        return self._free(_text(".".join(steps) or "state"))

    def _free(self, name: str) -> str:
        free, n = name, 2
        while free in self._taken:
            free, n = f"{name}~{n}", n + 1
        self._taken.add(free)
        return free


def _text(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()[:_NAME_CHARS]


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _refused(name: str, refusal: Unstorable) -> SaveError:
    return SaveError(f"{name} {refusal}; nothing was saved")
