"""FP32 values as BF16 values and the 16 bits these lack, and back. Knows bits.

Round-to-nearest-even sends 65,537 FP32 patterns to one even BF16 value, one more than 16 bits can
tell apart; so the BF16 value here is rounded half up, away from 0. Then

    bits of FP32 = (bits of BF16 << 16) + remainder

with a signed remainder, for every pattern but NaN. A NaN stays a NaN, with other bits.
"""

from typing import Final

import torch

_HALF: Final = 1 << 15
_NAN: Final = 0x7FC0


def split_into(values: torch.Tensor, upper: torch.Tensor, remainder: torch.Tensor) -> None:
    """Fill ``upper`` (BF16) and ``remainder`` (int16) from FP32 ``values``, which are used up."""
    bits, upper_bits = values.view(torch.int32), upper.view(torch.int16)
    nan = values.isnan()
    remainder.copy_(bits)  # the lower 16 bits: torch casts integers as C does
    # Past the largest pattern this wraps around, which only NaNs are near to.
    upper_bits.copy_(bits.add_(_HALF).bitwise_right_shift_(16))
    if nan.any():
        upper_bits.masked_fill_(nan, _NAN)
        remainder.masked_fill_(nan, 0)


def join_into(values: torch.Tensor, upper: torch.Tensor, remainder: torch.Tensor) -> None:
    """Fill FP32 ``values`` from what ``split_into`` made."""
    bits = values.view(torch.int32)
    bits.copy_(upper.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)


def joined(upper: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """New FP32 values, laid out as ``upper``."""
    values = torch.empty_like(upper, dtype=torch.float32)
    join_into(values, upper, remainder)
    return values


def rounded(values: torch.Tensor) -> torch.Tensor:
    """The BF16 values that ``split_into`` makes."""
    upper = torch.empty_like(values, dtype=torch.bfloat16)
    split_into(values.clone(), upper, torch.empty_like(values, dtype=torch.int16))
    return upper
