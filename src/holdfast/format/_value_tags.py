"""How one tagged value looks in JSON, and the checks that every tag's reader shares.

Knows the wrapping ``{"$": [tag, payload]}`` and plain JSON types; knows no tag's meaning, and not
where in a tree a value stands: ``Malformed`` and ``Unstorable`` are turned into errors for a
person by the walk, which does.
"""

import base64
import binascii
from collections import Counter
from typing import Final

TAG_KEY: Final = "$"

INT64_LEAST: Final = -(2**63)
INT64_MOST: Final = 2**63 - 1

MAX_SAME_HASH: Final = 64
"""Keys of a dict, or members of a set, that have the same hash."""

_QUANTUM = 3
_PADDED = 4


class Unstorable(Exception):  # noqa: N818 -- a finding, not yet an error for a person
    """A value that this format does not hold. The text says what the value is and what to do."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.what = what
        self.instead = instead


class Malformed(Exception):  # noqa: N818 -- a finding, not yet an error for a person
    """A payload that no writer of this format writes. The text says what is wrong with it."""


class Unsupported(Exception):  # noqa: N818 -- a finding, not yet an error for a person
    """A payload that is well formed and names what this machine's libraries do not know."""


def tagged(tag: str, payload: object) -> dict[str, object]:
    return {TAG_KEY: [tag, payload]}


def untagged(encoded: dict[str, object]) -> tuple[str, object]:
    """The tag and the payload of an object that has the key ``$``."""
    inside = encoded[TAG_KEY]
    match inside:
        case [str() as tag, payload] if len(encoded) == 1:
            return tag, payload
    raise Malformed("an object with the key '$' must hold one tag and one payload, and no more")


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def from_base64(text: object, *, size: int | None = None) -> bytes:
    """The bytes, which must be ``size`` many if that is given; checked before they are built."""
    if not isinstance(text, str):
        raise Malformed("base64 text is missing")
    if size is not None and len(text) != (size + _QUANTUM - 1) // _QUANTUM * _PADDED:
        raise Malformed(f"{len(text)} characters of base64 cannot hold exactly {size} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Malformed("the base64 text is damaged") from None
    if size is not None and len(data) != size:
        raise Malformed(f"there are {len(data)} bytes where {size} belong")
    return data


def text_of(payload: object) -> str:
    if not isinstance(payload, str):
        raise Malformed("a text is missing")
    return payload


def whole(payload: object, least: int = INT64_LEAST, most: int = INT64_MOST) -> int:
    if type(payload) is not int or not least <= payload <= most:
        raise Malformed(f"a whole number from {least} to {most} is missing")
    return payload


def items_of(payload: object, count: int | None = None) -> list[object]:
    if not isinstance(payload, list):
        raise Malformed("a list is missing")
    if count is not None and len(payload) != count:
        raise Malformed(f"a list of {count} must not have {len(payload)} items")
    return payload


def crowds(value: object, crowd: Counter[int]) -> bool:
    """Whether more than ``MAX_SAME_HASH`` of the values asked about so far have one hash.

    Looking up such keys takes a time by the square of their number. Texts and bytes have hashes
    that nobody can foresee, and few numbers of 64 bits share one, so these are not counted.
    """
    kind = type(value)
    if kind is str or kind is bytes or kind is float:
        return False
    if isinstance(value, int) and INT64_LEAST <= value <= INT64_MOST:
        return False
    hashed = hash(value)
    crowd[hashed] += 1
    return crowd[hashed] > MAX_SAME_HASH


def kind_of(value: object) -> str:
    """``a foo.Bar``, and ``an int`` without its module."""
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
