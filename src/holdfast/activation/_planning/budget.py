"""A budget as people write it. Pure: text and numbers in, bytes out."""

import math
import re
from numbers import Integral
from typing import Final

import numpy as np

LEAST_BYTES: Final = 1 << 14  # less was meant as something else: percents, or MiB
_MOST_BYTES: Final = 1 << 50

_UNITS: Final = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_WRITTEN: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]+|%)\s*")
_HINT: Final = (
    "Write bytes as an int, '1.5GiB' or '800 MB'; or a share of what the step takes when it keeps "
    "everything, as '40%' or 0.4"
)


def share_or_bytes(budget: object) -> float | int:
    """A float in (0, 1] for a share of the save-everything peak, an int for bytes. Refuses what is
    neither with ``ValueError``."""
    if isinstance(budget, bool):
        raise ValueError(f"budget must not be {budget!r}. {_HINT}")  # noqa: TRY004 -- as every refusal
    if isinstance(budget, str):
        return _parsed(budget)
    if isinstance(budget, Integral):
        return _bytes(int(budget), repr(budget))
    if isinstance(budget, float | np.floating):
        return _share(float(budget), repr(budget))
    raise ValueError(f"budget must be an int, a float or a text, not {budget!r:.200}. {_HINT}")


def _parsed(text: str) -> float | int:
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError(f"budget {text!r:.200} is no number with a unit. {_HINT}")
    number, unit = float(found[1]), found[2].lower()
    if unit == "%":
        return _share(number / 100, repr(text))
    if unit not in _UNITS:
        raise ValueError(f"budget {text!r:.200} has the unknown unit {found[2]!r}. {_HINT}")
    return _bytes(number * _UNITS[unit], repr(text))


def _share(share: float, told: str) -> float:
    if not (math.isfinite(share) and 0 < share <= 1):
        raise ValueError(f"budget {told:.200} must be more than 0 and at most all of it. {_HINT}")
    return share


def _bytes(count: float, told: str) -> int:
    if count < LEAST_BYTES:
        raise ValueError(f"budget {told:.200} is less than 16 KiB. {_HINT}")
    if count > _MOST_BYTES:
        raise ValueError(f"budget {told:.200} is more than 1024 TiB. {_HINT}")
    return int(count)
