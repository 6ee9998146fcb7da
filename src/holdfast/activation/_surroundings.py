"""What code runs under without being told: autocast, default dtype and device, the kernels that
are allowed. Knows how to note it and bring it back, not why.

torch's own checkpoint brings back autocast and the default device. The attention kernels decide
which tensors are saved, the default dtype what new tensors are, oneDNN and the precision of
matrix products their last bits: a replay that runs after their
``with`` block has ended must see them as the forward did.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


class Surroundings(NamedTuple):
    """A note of what a call ran under."""

    autocast: tuple[tuple[str, bool, Any], ...]
    autocast_cache: bool
    dtype: Any
    device: Any
    attention: tuple[bool, ...]
    onednn: bool
    matmul_precision: str


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def surroundings() -> Surroundings:
    """What code called now runs under."""
    return Surroundings(
        tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _device_types()
        ),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        _default_device(),
        _attention(),
        torch._C._get_mkldnn_enabled(),  # noqa: SLF001 -- torch.backends.mkldnn.enabled, 20 x faster
        torch.get_float32_matmul_precision(),
    )


@contextlib.contextmanager
def restored(then: Surroundings) -> Iterator[None]:
    """Within, everything is as it was ``then``. What is so already is left alone."""
    now = surroundings()
    with contextlib.ExitStack() as stack:
        if now.device != then.device:
            stack.enter_context(torch.device(then.device or "cpu"))
        if now.dtype != then.dtype:
            stack.callback(torch.set_default_dtype, now.dtype)
            torch.set_default_dtype(then.dtype)
        if now.onednn != then.onednn:
            stack.callback(torch._C._set_mkldnn_enabled, now.onednn)  # noqa: SLF001
            torch._C._set_mkldnn_enabled(then.onednn)  # noqa: SLF001
        if now.matmul_precision != then.matmul_precision:
            stack.callback(torch.set_float32_matmul_precision, now.matmul_precision)
            torch.set_float32_matmul_precision(then.matmul_precision)
        if now.attention != then.attention:
            stack.enter_context(_attending(then.attention))
        # Autocast is entered even where it is as it was: its cache of cast weights belongs to
        # whoever entered it, and the replay's must be gone when the replay is.
        for kind, enabled, dtype in then.autocast:
            if enabled or (kind, enabled, dtype) not in now.autocast:
                stack.enter_context(
                    torch.autocast(
                        kind, enabled=enabled, dtype=dtype, cache_enabled=then.autocast_cache
                    )
                )
        yield


def _default_device() -> Any:
    if not torch._C._len_torch_function_stack():  # noqa: SLF001 -- 0.05 µs where nothing is set
        return None
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


_kernels = (
    (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.mem_efficient_sdp_enabled),
    (SDPBackend.MATH, torch.backends.cuda.math_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.cudnn_sdp_enabled),
)


def _attention() -> tuple[bool, ...]:
    return tuple(enabled() for _, enabled in _kernels)


def _attending(allowed: tuple[bool, ...]) -> Any:
    return sdpa_kernel([kernel for (kernel, _), on in zip(_kernels, allowed, strict=True) if on])
