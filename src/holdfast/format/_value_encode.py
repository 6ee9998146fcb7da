"""Turns a tree of Python values into plain JSON from which each comes back with its own type.

Knows containers, depth and where it stands; what one number, date or dtype looks like is known by
the modules of their tags. Never pickle: what has no tag is refused. Shared and cyclic structure
is not kept: a list that occurs twice is stored twice, and one that contains itself is refused.
"""

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from holdfast.errors import SaveError
from holdfast.format import _value_numpy, _value_scalars, _value_torch
from holdfast.format._value_decode import decode_value
from holdfast.format._value_model import FACTORIES, MAX_VALUE_DEPTH, LeafRef, PerRank, rank_step
from holdfast.format._value_path import Place, ValuePath, shown
from holdfast.format._value_tags import MAX_SAME_HASH, TAG_KEY, Unstorable, crowds, kind_of, tagged


def encode_value(
    value: object,
    *,
    leaf: Callable[[ValuePath, object], LeafRef | None] | None = None,
    root: str = "state",
    depth: int = 0,
) -> object:
    """``value`` as dicts, lists, texts, numbers, bools and ``None`` that JSON can hold exactly.

    ``leaf`` is asked for everything that has no tag of its own (tensors, arrays), with its path
    from the root: it returns the name under which the caller stores the thing, or ``None``.
    Small NumPy arrays are then stored here, the rest is refused. Keys and members of sets are
    never leaves. What is in the value of rank 2 of a ``PerRank`` has the step ``"@2"`` in its path.
    The same value always gives the same JSON. Raises ``SaveError`` saying what
    cannot be stored and where; ``root`` is what the value is called there, ``depth`` in how many
    containers it will stand. Nothing is changed.
    """
    return _Encoder(leaf, root, depth).value(value)


def per_rank_node(values: Sequence[object]) -> object:
    """The JSON of a ``PerRank`` from that of its values, one of every rank. ``ValueError`` if
    there are none."""
    if not values:
        raise ValueError("values must have one for every rank, and are none")
    return tagged("per_rank", [*values])


class _Encoder:
    def __init__(
        self, leaf: Callable[[ValuePath, object], LeafRef | None] | None, root: str, depth: int
    ) -> None:
        self._leaf = leaf
        self._place = Place(root)
        self._depth = depth
        self._converted = 0  # values stored as something that is not equal to them
        self._containers: Mapping[type, Callable[[Any], object]] = {
            list: self._items,
            tuple: lambda value: tagged("tuple", self._items(value)),
            dict: self._dict,
            OrderedDict: lambda value: tagged("ordereddict", self._pairs(value)),
            Counter: lambda value: tagged("counter", self._pairs(value)),
            defaultdict: self._defaultdict,
            deque: lambda value: tagged("deque", [value.maxlen, self._items(value)]),
            set: lambda value: tagged("set", self._members(value)),
            frozenset: lambda value: tagged("frozenset", self._members(value)),
            PerRank: self._per_rank,
        }

    def value(self, value: object) -> object:
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        try:
            scalar = _value_scalars.ENCODE.get(kind)
            if scalar is not None:
                return scalar(value)
            container = self._containers.get(kind)
            if container is None:
                return self._other(value)
            if self._depth == MAX_VALUE_DEPTH:
                raise SaveError(
                    f"{self._place.start()} is nested more than {MAX_VALUE_DEPTH} deep, so that it "
                    "cannot be stored; it may contain itself. Nothing was saved."
                )
            self._depth += 1
            encoded = container(value)
            self._depth -= 1
        except Unstorable as refusal:
            raise SaveError(
                f"{self._place} is {refusal.what}, which cannot be stored; {refusal.instead}"
            ) from None
        return encoded

    def _other(self, value: Any) -> object:
        if isinstance(value, enum.Enum):
            self._converted += 1
            return self.value(value.value)
        if isinstance(value, np.generic):
            return _value_numpy.encode_scalar(value)
        if isinstance(value, int):
            self._converted += 1
            return _value_scalars.encode_int(int.__int__(value))
        small = _value_torch.encode_torch(value)
        if small is not None:
            return small
        reference = self._reference(value)
        if reference is not None:
            return tagged(reference.kind, reference.name)
        if type(value) is np.ndarray:
            return _value_numpy.encode_array(value)
        raise Unstorable(kind_of(value), _instead_of(value))

    def _reference(self, value: object) -> LeafRef | None:
        if self._place.is_aside:
            return None
        if type(value) is LeafRef:
            return value
        reference = None if self._leaf is None else self._leaf(self._place.path(), value)
        if reference is not None and type(reference) is not LeafRef:
            raise TypeError(f"leaf must return a LeafRef or None, not {reference!r}")
        return reference

    def _items(self, values: Iterable[object]) -> list[object]:
        steps = self._place.steps
        steps.append(0)
        encoded = []
        for index, value in enumerate(values):
            steps[-1] = index
            encoded.append(self.value(value))
        steps.pop()
        return encoded

    def _per_rank(self, value: PerRank) -> object:
        if self._place.is_aside:
            raise Unstorable("a PerRank", "keys and members of sets are the same on every rank")
        steps = self._place.steps
        steps.append(None)
        encoded = []
        for rank, own in enumerate(value.values):
            steps[-1] = rank_step(rank)
            encoded.append(self.value(own))
        steps.pop()
        return per_rank_node(encoded)

    def _values(self, mapping: Mapping[Any, object]) -> list[object]:
        steps = self._place.steps
        steps.append(None)
        encoded = []
        for key, value in mapping.items():
            steps[-1] = key
            encoded.append(self.value(value))
        steps.pop()
        return encoded

    def _pairs(self, mapping: Mapping[Any, object]) -> list[object]:
        keys = self._hashed(mapping, "key")
        return [list(pair) for pair in zip(keys, self._values(mapping), strict=True)]

    def _dict(self, mapping: Mapping[Any, object]) -> object:
        keys = self._hashed(mapping, "key")
        values = self._values(mapping)
        texts = [key for key in keys if isinstance(key, str)]
        if len(texts) < len(keys) or TAG_KEY in texts:
            return tagged("dict", [list(pair) for pair in zip(keys, values, strict=True)])
        return dict(zip(texts, values, strict=True))

    def _defaultdict(self, mapping: defaultdict[Any, object]) -> object:
        factory = mapping.default_factory
        name = None if factory is None else getattr(factory, "__name__", None)
        if factory is not None and FACTORIES.get(name or "") is not factory:
            raise Unstorable(
                f"a defaultdict whose factory is {shown(factory)}",
                f"its factory must be None or one of {', '.join(FACTORIES)}",
            )
        return tagged("defaultdict", [name, self._pairs(mapping)])

    def _members(self, values: Collection[object]) -> list[object]:
        return sorted(self._hashed(values, "member"), key=msgspec.json.encode)

    def _hashed(self, values: Collection[Any], what: Literal["key", "member"]) -> list[object]:
        converted = self._converted
        crowd: Counter[int] = Counter()
        if any(crowds(value, crowd) for value in values):
            raise SaveError(
                f"{self._place} has more than {MAX_SAME_HASH} {what}s with the same hash, so that "
                "it would take very long to load; store it as a list"
            )
        with self._place.aside(what):
            encoded = [self.value(value) for value in values]
        if self._converted != converted:
            stored = {decode_value(each) for each in encoded}
            if len(stored) < len(encoded):
                raise SaveError(
                    f"{self._place} has two {what}s that would be stored alike, since an Enum is "
                    "stored by its value; use the values themselves"
                )
        return encoded


def _instead_of(value: object) -> str:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "store it as a tuple or a dict instead, as by value._asdict()"
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return "convert it first, with .detach().cpu().numpy()"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return "convert it to a plain NumPy array first, with numpy.asarray"
    return "store its state_dict or plain values instead"
