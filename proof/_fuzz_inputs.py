"""Changes bytes a little, at random but by a seed: as bytes, and as the JSON that they are. Knows
no parser."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any, Final

_NUMBERS: Final = (
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    65535,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
)
_TEXTS: Final = (
    "",
    "a",
    "../a",
    "/etc/passwd",
    "\0",
    "\ud800",
    "F32",
    "BF16",
    "$",
    "a" * 70,
    "é",
    "__metadata__",
)
_VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0.0,
    -0.0,
    1.5,
    1e308,
    [],
    {},
    *_NUMBERS,
    *_TEXTS,
)
_TAGS: Final = (
    "int",
    "float",
    "str",
    "bytes",
    "tuple",
    "dict",
    "set",
    "frozenset",
    "complex",
    "path",
    "datetime",
    "date",
    "time",
    "timedelta",
    "deque",
    "defaultdict",
    "counter",
    "ordereddict",
    "per_rank",
    "numpy.scalar",
    "numpy.array",
    "torch.dtype",
    "torch.device",
    "torch.Size",
    "tensor",
    "array",
)
_DEEP: Final = 60


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random, *, is_json: bool) -> bytes:
    """``data`` with a few changes, some of them taken from ``others``."""
    if is_json and rng.random() < 0.7:
        changed = json_mutated(data, rng)
        if changed is not None:
            return changed
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8))):
        _change(made, others, rng)
    return bytes(made)


def _change(made: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    size = len(made)
    at = rng.randrange(size + 1)
    kind = rng.randrange(9)
    if kind == 0 and size:
        made[at - 1] ^= 1 << rng.randrange(8)
    elif kind == 1 and size:
        made[at - 1] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 2:
        del made[at : at + rng.choice((1, 2, 4, 16, 100))]
    elif kind == 3:
        made[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
    elif kind == 4:
        width = rng.choice((1, 2, 4, 8))
        number = rng.choice(_NUMBERS) % 2 ** (8 * width)
        made[at : at + width] = number.to_bytes(width, rng.choice(("little", "little", "big")))
    elif kind == 5:
        end = min(size, at + rng.choice((1, 4, 16, 64)))
        made[at:at] = made[at:end] * rng.choice((1, 1, 2, 50))
    elif kind == 6 and others:
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        made[at : at + rng.choice((0, 4, 32))] = other[start : start + rng.choice((4, 32, 200))]
    elif kind == 7:
        digits = str(rng.choice(_NUMBERS)).encode()
        made[at : at + rng.choice((0, 1, len(digits)))] = digits
    else:
        del made[at:]


def json_mutated(data: bytes, rng: random.Random) -> bytes | None:
    """The same JSON with something in it replaced, added, doubled or left out; ``None`` if it is
    no JSON."""
    try:
        whole = [json.loads(data)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            container, key = _somewhere(whole, rng)
            _replace(container, key, whole, rng)
        text = json.dumps(whole[0], separators=(",", ":"), ensure_ascii=rng.random() < 0.8)
        return text.encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None


def _somewhere(whole: list[Any], rng: random.Random) -> tuple[Any, Any]:
    """A place in it, deep ones as likely as others."""
    container: Any = whole
    key: Any = 0
    for _ in range(_DEEP):
        inner = container[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            break
        container = inner
        key = rng.choice([*inner]) if isinstance(inner, dict) else rng.randrange(len(inner))
    return container, key


def _replace(container: Any, key: Any, whole: list[Any], rng: random.Random) -> None:
    old = container[key]
    kind = rng.randrange(8)
    if kind == 0:
        container[key] = copy.copy(rng.choice(_VALUES))
    elif kind == 1:
        other, place = _somewhere(whole, rng)
        container[key] = json.loads(json.dumps(other[place]))
    elif kind == 2:
        container[key] = {"$": [rng.choice(_TAGS), old]}
    elif kind == 3 and container is not whole:
        del container[key]
    elif kind == 4 and isinstance(old, int):
        container[key] = old + rng.choice((-1, 1, 2, 2**31, 2**62))
    elif kind == 4 and isinstance(old, str):
        container[key] = _text(old, rng)
    elif kind == 5 and isinstance(container, dict):
        container[rng.choice(_TEXTS)] = old
    elif kind == 6:
        container[key] = [copy.deepcopy(old) for _ in range(rng.choice((1, 2, 3, 70)))]
    elif kind == 7 and isinstance(old, list) and old:
        old.insert(rng.randrange(len(old) + 1), copy.deepcopy(rng.choice([*old, *_VALUES])))
    else:
        container[key] = rng.choice(_NUMBERS)


def _text(old: str, rng: random.Random) -> str:
    at = rng.randrange(len(old) + 1)
    return (
        old[:at]
        + rng.choice(("", "0", "A", "/", "..", "-", "\n", "=", ":"))
        + old[at + rng.randrange(3) :]
    )
