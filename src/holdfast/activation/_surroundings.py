"""What code runs under without being told: autocast, default dtype and device, the kernels that
are allowed, what decides the last bits. Knows how to note it and bring it back, not why.

torch's own checkpoint brings back autocast and the default device. The attention kernels decide
which tensors are saved, the default dtype what new tensors are, threads and libraries and their
precision the last bits: what is computed again after their ``with`` block has ended must see them
as the forward did.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# Asked for one by one: torch.get_float32_matmul_precision() raises where they differ.
_PRECISE = [("mkldnn", "matmul"), ("mkldnn", "conv")]
if torch.version.cuda is not None:
    _PRECISE += [("cuda", "matmul"), ("cuda", "conv")]
_tiny = 2.0**-1022  # the half of it is there only if numbers that small are not taken for 0


class Arithmetic(NamedTuple):
    """A note of what decides the last bits of a result besides its operands: the sum of many
    numbers depends on how many threads share it."""

    threads: int
    onednn: bool
    deterministic: bool
    flushes: bool
    matmul: str | None
    precisions: tuple[str, ...]


class Surroundings(NamedTuple):
    """A note of what a call ran under."""

    autocast: tuple[tuple[str, bool, Any], ...]
    autocast_cache: bool
    dtype: Any
    device: Any
    attention: tuple[bool, ...]
    arithmetic: Arithmetic


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def arithmetic() -> Arithmetic:
    """What operations are computed under now, in this thread."""
    return Arithmetic(
        torch.get_num_threads(),
        torch._C._get_mkldnn_enabled(),  # noqa: SLF001 -- torch.backends.mkldnn.enabled, 20 x faster
        torch.are_deterministic_algorithms_enabled(),
        _tiny * 0.5 == 0.0,
        _matmul(),
        _precisions(),
    )


def _matmul() -> str | None:
    """The one setting for all libraries, or ``None`` where they were set one by one: it cannot be
    asked for then."""
    try:
        return torch.get_float32_matmul_precision()  # type: ignore[no-any-return]
    except RuntimeError:
        return None


def _precisions() -> tuple[str, ...]:
    precision = torch._C._get_fp32_precision_getter  # noqa: SLF001 -- torch.backends.mkldnn.matmul.fp32_precision, faster
    return tuple([precision(library, what) for library, what in _PRECISE])


@contextlib.contextmanager
def as_computed(then: Arithmetic, now: Arithmetic) -> Iterator[None]:
    """Within, operations are computed as they were ``then``. What is so already is left alone."""
    with contextlib.ExitStack() as stack:
        if now.threads != then.threads:
            stack.callback(torch.set_num_threads, now.threads)
            torch.set_num_threads(then.threads)
        if now.onednn != then.onednn:
            stack.callback(torch._C._set_mkldnn_enabled, now.onednn)  # noqa: SLF001 -- as above
            torch._C._set_mkldnn_enabled(then.onednn)  # noqa: SLF001 -- as above
        if None not in (now.matmul, then.matmul) and now.matmul != then.matmul:
            # As it was set: once libraries are set one by one, a user cannot ask for it any more.
            stack.callback(torch.set_float32_matmul_precision, now.matmul)
            torch.set_float32_matmul_precision(then.matmul)
        for (library, what), was, is_now in zip(
            _PRECISE, then.precisions, _precisions(), strict=True
        ):
            if is_now != was:
                set_precision = torch._C._set_fp32_precision_setter  # noqa: SLF001 -- as above
                stack.callback(set_precision, library, what, is_now)
                set_precision(library, what, was)
        if now.deterministic != then.deterministic:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, now.deterministic, warn_only=warns)
            torch.use_deterministic_algorithms(then.deterministic, warn_only=True)
        if now.flushes != then.flushes:
            stack.callback(torch.set_flush_denormal, now.flushes)
            torch.set_flush_denormal(then.flushes)
        yield


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
        arithmetic(),
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
        if now.arithmetic != then.arithmetic:
            stack.enter_context(as_computed(then.arithmetic, now.arithmetic))
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
