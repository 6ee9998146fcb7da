"""Fresh memory of tensors in large pages."""

from typing import Final

import torch

from holdfast.storage._pages import ask_for_large_pages

_FROM_BYTES: Final = 4 * 1024 * 1024
"""As NumPy does: large pages for what is large anyway."""


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, whose memory was just made and is in this process's."""
    if tensor.nbytes >= _FROM_BYTES:
        ask_for_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
