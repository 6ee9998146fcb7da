"""What decides the last bits of a result besides its operands: threads, libraries, rounding. Knows
how to note it and bring it back.

A tensor that was dropped is made again under what its forward ran under: the sum of many numbers
depends on how many threads share it.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

# Asked for one by one: torch.get_float32_matmul_precision() raises where they differ.
_PRECISE = [("mkldnn", "matmul"), ("mkldnn", "conv")]
if torch.version.cuda is not None:
    _PRECISE += [("cuda", "matmul"), ("cuda", "conv")]
_tiny = 2.0**-1022  # the half of it is there only if numbers that small are not taken for 0


class Arithmetic(NamedTuple):
    """A note of what operations ran under."""

    threads: int
    onednn: bool
    precisions: tuple[str, ...]
    deterministic: bool
    flushes: bool


def arithmetic() -> Arithmetic:
    """What operations run under now, in this thread."""
    return Arithmetic(
        torch.get_num_threads(),
        torch._C._get_mkldnn_enabled(),  # noqa: SLF001 -- torch.backends.mkldnn.enabled, 20 x faster
        tuple([torch._C._get_fp32_precision_getter(*each) for each in _PRECISE]),  # noqa: SLF001 -- torch.backends.mkldnn.matmul.fp32_precision, faster
        torch.are_deterministic_algorithms_enabled(),
        _tiny * 0.5 == 0.0,
    )


@contextlib.contextmanager
def restored(then: Arithmetic, now: Arithmetic) -> Iterator[None]:
    """Within, operations run as they did ``then``. What is so already is left alone."""
    with contextlib.ExitStack() as stack:
        if now.threads != then.threads:
            stack.callback(torch.set_num_threads, now.threads)
            torch.set_num_threads(then.threads)
        if now.onednn != then.onednn:
            stack.callback(torch._C._set_mkldnn_enabled, now.onednn)  # noqa: SLF001 -- as above
            torch._C._set_mkldnn_enabled(then.onednn)  # noqa: SLF001 -- as above
        for (library, what), was, is_now in zip(
            _PRECISE, then.precisions, now.precisions, strict=True
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
