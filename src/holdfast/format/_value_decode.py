"""Turns the JSON of a tree of values back into the values. Trusts nothing about it.

Knows containers, depth and where it stands; what a payload of one tag may look like is known by
the modules of the tags. Nothing is ever called, imported or unpickled by a name found in the
JSON, but for torch itself.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, NoReturn

from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.format import _value_numpy, _value_scalars, _value_torch
from holdfast.format._value_model import FACTORIES, MAX_VALUE_DEPTH, LeafRef, PerRank, rank_step
from holdfast.format._value_path import Place, shown
from holdfast.format._value_tags import (
    INT64_LEAST,
    INT64_MOST,
    MAX_SAME_HASH,
    TAG_KEY,
    Malformed,
    Unsupported,
    crowds,
    items_of,
    kind_of,
    text_of,
    untagged,
    whole,
)

_SCALARS: Final[Mapping[str, Callable[[object], object]]] = {
    **_value_scalars.DECODE,
    **_value_numpy.DECODE,
    **_value_torch.DECODE,
}
_REFERENCES: Final[Mapping[str, Literal["tensor", "array"]]] = {
    "tensor": "tensor",
    "array": "array",
}


def decode_value(
    encoded: object, *, leaf: Callable[[LeafRef], object] | None = None, root: str = "state"
) -> object:
    """The value that ``encode_value`` was given, from JSON that need not be trusted.

    ``leaf`` is given every reference and returns what belongs there; without it the ``LeafRef``
    itself does. torch's values come back as ``TorchValue`` where torch is not installed. Raises
    ``CorruptedError`` for what no version writes, and ``IncompatibleVersionError`` for a tag or
    a dtype that this version, or the installed torch, does not know.
    """
    return _Decoder(leaf, root).value(encoded)


class _Decoder:
    def __init__(self, leaf: Callable[[LeafRef], object] | None, root: str) -> None:
        self._leaf = leaf
        self._place = Place(root)
        self._depth = 0
        self._containers: Mapping[str, Callable[[object], object]] = {
            "tuple": lambda payload: tuple(self._items(payload)),
            "dict": lambda payload: self._fill({}, payload),
            "ordereddict": lambda payload: self._fill(OrderedDict(), payload),
            "counter": lambda payload: self._fill(Counter(), payload),
            "defaultdict": self._defaultdict,
            "deque": self._deque,
            "set": self._members,
            "frozenset": lambda payload: frozenset(self._members(payload)),
            "per_rank": self._per_rank,
        }

    def value(self, encoded: object) -> object:
        kind = type(encoded)
        if encoded is None or kind is str or kind is bool:
            return encoded
        try:
            if isinstance(encoded, dict):
                return self._object(encoded)
            if kind is list:
                return self._nested(self._items, encoded)
            if isinstance(encoded, int) and INT64_LEAST <= encoded <= INT64_MOST:
                return encoded
            if isinstance(encoded, float) and math.isfinite(encoded):
                return encoded
            self._fail(f"{shown(encoded)} must not stand there")
        except Malformed as damage:
            self._fail(str(damage))
        except Unsupported as missing:
            raise IncompatibleVersionError(
                f"{self._place} is {missing}; install a version that has it to load this checkpoint"
            ) from None

    def _fail(self, why: str) -> NoReturn:
        raise CorruptedError(
            f"{self._place} is damaged or was not written by holdfast: {why}"
        ) from None

    def _nested(self, build: Callable[[Any], object], payload: object) -> object:
        if self._depth == MAX_VALUE_DEPTH:
            self._fail(f"it is nested more than {MAX_VALUE_DEPTH} deep")
        self._depth += 1
        value = build(payload)
        self._depth -= 1
        return value

    def _object(self, encoded: dict[str, object]) -> object:
        if TAG_KEY not in encoded:
            return self._nested(self._plain, encoded)
        tag, payload = untagged(encoded)
        container = self._containers.get(tag)
        if container is not None:
            return self._nested(container, payload)
        scalar = _SCALARS.get(tag)
        if scalar is not None:
            return scalar(payload)
        if tag in _REFERENCES:
            return self._reference(_REFERENCES[tag], payload)
        raise IncompatibleVersionError(
            f"{self._place} has the type tag {shown(tag)}, which this version does not know; it "
            "was probably written by a newer holdfast: upgrade to load this checkpoint"
        )

    def _reference(self, kind: Literal["tensor", "array"], payload: object) -> object:
        if self._place.is_aside:
            raise Malformed(f"no {kind} can be there")
        try:
            reference = LeafRef(kind=kind, name=text_of(payload))
        except ValueError:
            raise Malformed(f"the name of a {kind} is empty or too long") from None
        return reference if self._leaf is None else self._leaf(reference)

    def _plain(self, encoded: dict[str, object]) -> object:
        steps = self._place.steps
        steps.append(None)
        decoded = {}
        for key, value in encoded.items():
            steps[-1] = key
            if type(key) is not str:
                raise Malformed("a key is not a text")
            decoded[key] = self.value(value)
        steps.pop()
        return decoded

    def _items(self, payload: object) -> list[object]:
        steps = self._place.steps
        steps.append(0)
        decoded = []
        for index, value in enumerate(items_of(payload)):
            steps[-1] = index
            decoded.append(self.value(value))
        steps.pop()
        return decoded

    def _per_rank(self, payload: object) -> object:
        if self._place.is_aside:
            raise Malformed("no value per rank can be there")
        steps = self._place.steps
        steps.append(None)
        decoded = []
        for rank, value in enumerate(items_of(payload)):
            steps[-1] = rank_step(rank)
            decoded.append(self.value(value))
        steps.pop()
        if not decoded:
            raise Malformed("a value per rank has none")
        return PerRank(tuple(decoded))

    def _fill(self, mapping: dict[Any, Any], payload: object) -> object:
        steps = self._place.steps
        crowd: Counter[int] = Counter()
        for pair in items_of(payload):
            encoded_key, encoded_value = items_of(pair, 2)
            with self._place.aside("key"):
                key = self.value(encoded_key)
            if _seen(key, mapping, crowd):
                raise Malformed(f"the key {shown(key)} occurs twice")
            steps.append(key)
            mapping[key] = self.value(encoded_value)
            steps.pop()
        return mapping

    def _defaultdict(self, payload: object) -> object:
        name, pairs = items_of(payload, 2)
        factory = None if name is None else FACTORIES.get(text_of(name))
        if factory is None and name is not None:
            raise Malformed(f"{shown(name)} is no factory of a defaultdict")
        return self._fill(defaultdict(factory), pairs)

    def _deque(self, payload: object) -> object:
        most, items = items_of(payload, 2)
        decoded = self._items(items)
        maxlen = None if most is None else whole(most, 0)
        if maxlen is not None and maxlen < len(decoded):
            raise Malformed("a deque has more items than it may have")
        return deque(decoded, maxlen)

    def _members(self, payload: object) -> set[object]:
        members: set[object] = set()
        crowd: Counter[int] = Counter()
        for encoded in items_of(payload):
            with self._place.aside("member"):
                member = self.value(encoded)
            if _seen(member, members, crowd):
                raise Malformed(f"the member {shown(member)} occurs twice")
            members.add(member)
        return members


def _seen(value: object, among: Collection[object], crowd: Counter[int]) -> bool:
    try:
        hash(value)  # not left to "in", which takes a set for the frozenset it would equal
        crowded = crowds(value, crowd)
    except (TypeError, ValueError):  # ValueError: NumPy's, for a timedelta64 without a unit
        raise Malformed(f"{kind_of(value)} can be no key and no member") from None
    if crowded:
        raise Malformed(f"more than {MAX_SAME_HASH} keys or members have the same hash")
    return value in among
