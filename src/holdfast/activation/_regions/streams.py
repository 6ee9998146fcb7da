"""Rewinds the random streams a region draws from. Knows torch's, Python's and NumPy's, and any
generator it is given; knows nothing of regions.

Reading must be cheap, for it happens around every checkpointed call: ``random.getstate`` takes
9 µs and ``numpy.random.get_state`` 44 µs, a copy of the same memory 1 µs. Where that memory lies
is found out by trying it on a generator of our own; where the trial fails the slow way is taken.
"""

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.activation._regions.found import same_memory

_HEADER_BYTES = object.__basicsize__
_PYTHON_STATE = struct.Struct("i624I")
_NUMPY_STATE = struct.Struct("624Ii")
_NUMPY_GAUSS = struct.Struct("=i4xd")  # whether there is one, and it


class Stream(Protocol):
    """A source of randomness whose state can be read, written, and compared with what it is now."""

    def read(self) -> Any: ...

    def write(self, state: Any) -> None: ...

    def has_left(self, state: Any) -> bool: ...


class Mark(NamedTuple):
    """Where a stream stood."""

    stream: Stream
    state: Any


class TorchStream:
    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def read(self) -> Any:
        return self._generator.get_state()

    def write(self, state: Any) -> None:
        self._generator.set_state(state)

    def has_left(self, state: Any) -> bool:
        return not same_memory(self._generator.get_state(), state)


class DeviceStream:
    """The default generator of an accelerator."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def read(self) -> Any:
        return self._module.get_rng_state(self._device).cpu()

    def write(self, state: Any) -> None:
        self._module.set_rng_state(state, self._device)

    def has_left(self, state: Any) -> bool:
        return not same_memory(self.read(), state)


class PythonStream:
    """A ``random.Random``; by default the one behind the functions of ``random``."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source: Any = random._inst if source is None else source  # noqa: SLF001
        plain = type(self._source) is random.Random  # a subclass may have a state of its own
        known = plain and _python_memory_is_known()
        self._address = id(self._source) + _HEADER_BYTES if known else 0

    def read(self) -> Any:
        if self._address:
            raw = ctypes.string_at(self._address, _PYTHON_STATE.size)
            return raw, self._source.gauss_next
        return self._source.getstate()

    def write(self, state: Any) -> None:
        if self._address:
            raw, gauss = state
            index, *words = _PYTHON_STATE.unpack(raw)
            state = (3, (*words, index), gauss)
        self._source.setstate(state)

    def has_left(self, state: Any) -> bool:
        return bool(self.read() != state)


class NumpyStream:
    """NumPy's global ``RandomState``, as long as it draws from a Mersenne twister."""

    def __init__(self, source: Any, gauss_offset: int) -> None:
        self._source = source
        self._words = source._bit_generator.ctypes.state_address  # noqa: SLF001
        self._gauss = id(source) + gauss_offset

    def read(self) -> bytes:
        return ctypes.string_at(self._words, _NUMPY_STATE.size) + ctypes.string_at(
            self._gauss, _NUMPY_GAUSS.size
        )

    def write(self, state: bytes) -> None:
        *words, position = _NUMPY_STATE.unpack(state[: _NUMPY_STATE.size])
        has_gauss, gauss = _NUMPY_GAUSS.unpack(state[_NUMPY_STATE.size :])
        self._source.set_state(("MT19937", words, position, has_gauss, gauss))

    def has_left(self, state: bytes) -> bool:
        return self.read() != state


class SlowStream:
    """Any source with a getter and a setter."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._get = get
        self._put = put

    def read(self) -> Any:
        return self._get()

    def write(self, state: Any) -> None:
        self._put(state)

    def has_left(self, state: Any) -> bool:
        return bool(_told(self._get()) != _told(state))


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _told(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_told(item) for item in value)
    return value.tobytes() if hasattr(value, "tobytes") else value


@functools.cache
def _python_memory_is_known() -> bool:
    trial = random.Random(7)  # noqa: S311 -- not for secrets
    trial.random()
    raw = ctypes.string_at(id(trial) + _HEADER_BYTES, _PYTHON_STATE.size)
    index, *words = _PYTHON_STATE.unpack(raw)
    version, known, _ = trial.getstate()
    return bool(version == 3 and (*words, index) == known)  # noqa: PLR2004


@functools.cache
def _numpy_gauss_offset() -> int | None:
    """Where a ``RandomState`` keeps the second number of a pair it has drawn."""
    from numpy.random import RandomState  # noqa: PLC0415 -- only where it is in use

    trial = RandomState(7)
    trial.standard_normal()
    known: Any = trial.get_state()
    if known[0] != "MT19937" or known[3] != 1:
        return None
    size = RandomState.__basicsize__
    memory = ctypes.string_at(id(trial), size)
    offset = memory.find(struct.pack("d", known[4])) - 8
    if offset < _HEADER_BYTES or memory.count(struct.pack("d", known[4])) != 1:
        return None
    stream = NumpyStream(trial, offset)
    before = stream.read()
    drawn = [trial.standard_normal() for _ in range(3)]
    stream.write(before)
    again = [trial.standard_normal() for _ in range(3)]
    return offset if drawn == again and stream.has_left(before) else None


_python = PythonStream()
_torch = TorchStream(torch.default_generator)


@functools.lru_cache(maxsize=4)
def _numpy_stream(source: Any, bits: Any) -> Stream:
    del bits  # a new bit generator in the same source lies elsewhere
    offset = _numpy_gauss_offset()
    if offset is not None and type(source._bit_generator).__name__ == "MT19937":  # noqa: SLF001
        return NumpyStream(source, offset)
    return SlowStream(lambda: source.get_state(legacy=False), source.set_state)


def default_streams(devices: Iterable[Any]) -> list[Stream]:
    """The streams any code may draw from unasked: torch's, Python's, NumPy's if it is in use,
    and those of the accelerators among ``devices``."""
    streams: list[Stream] = [_torch, _python]
    mtrand = sys.modules.get("numpy.random.mtrand")
    if mtrand is not None:
        source = mtrand._rand  # noqa: SLF001 -- the one behind numpy.random's functions
        streams.append(_numpy_stream(source, source._bit_generator))  # noqa: SLF001
    streams += [DeviceStream(device) for device in devices]
    return streams


def stream_of(generator: Any) -> Stream:
    """The stream of a generator the caller names. ``ValueError`` if it is of no known kind."""
    if isinstance(generator, torch.Generator):
        return TorchStream(generator)
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return PythonStream(generator)
    bits = getattr(generator, "bit_generator", None) or getattr(generator, "_bit_generator", None)
    if hasattr(generator, "get_state") and hasattr(generator, "set_state") and bits is not None:
        return SlowStream(lambda: generator.get_state(legacy=False), generator.set_state)
    if bits is not None and hasattr(bits, "state"):
        return SlowStream(lambda: bits.state, lambda state: setattr(bits, "state", state))
    raise ValueError(
        "generators must be torch.Generator, random.Random, numpy.random.Generator or "
        f"numpy.random.RandomState objects, not {generator!r}"
    )


def marks(streams: Sequence[Stream]) -> list[Mark]:
    """Where the streams stand now."""
    return [Mark(stream, stream.read()) for stream in streams]


def advanced(before: Sequence[Mark]) -> list[Mark]:
    """Of these marks, those whose stream has moved since."""
    return [mark for mark in before if mark.stream.has_left(mark.state)]


@contextmanager
def rewound(streams: Sequence[Stream], to: Sequence[Mark]) -> Iterator[None]:
    """Within, the streams stand at ``to``; afterwards all ``streams`` stand where they did."""
    now = marks(streams)
    try:
        for mark in to:
            mark.stream.write(mark.state)
        yield
    finally:
        for mark in now:
            if mark.stream.has_left(mark.state):
                mark.stream.write(mark.state)
