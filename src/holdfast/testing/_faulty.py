"""A storage that fails where a test says. Knows calls by name and number, not what they are for."""

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final, Literal, TypeVar

from holdfast import _checks
from holdfast.contracts import Clock, Data, ObjectInfo, ObjectWriter, ReadRange, Storage
from holdfast.errors import TransientStorageError
from holdfast.resilience import SystemClock
from holdfast.storage._wrapped import Through, WrappedStorage, WrappedWriter
from holdfast.testing._random import seeded_rng

T = TypeVar("T")

ANY: Final = "any"
_READS: Final = frozenset({"read", "read_into"})
_WITH_PAYLOAD: Final = _READS | {"create", "replace", "write_at"}
_METHODS: Final = _WITH_PAYLOAD | {
    "open_writer", "finish", "abort", "list", "next", "stat", "delete", "free_bytes", "sweep",
}  # fmt: skip
_FLIP_BITS: Final = 2**40


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in the ``nth`` call, the first being 1, of one method (or of ``"any"``).

    Methods are those of ``contracts.Storage`` and ``ObjectWriter``, counted over all writers, and
    ``next``: one step of any listing. ``error`` is raised before the call, or after it took
    effect, as when the answer is lost. ``delay_s`` passes first.

    ``keep_bytes`` and ``flip_bit`` damage the payload silently: of what is read or written only
    that many bytes arrive, or one bit, counted from the first and around the end, is flipped.
    """

    method: str
    nth: int = 1
    error: BaseException | None = None
    when: Literal["before", "after"] = "before"
    _: KW_ONLY
    delay_s: float = 0.0
    keep_bytes: int | None = None
    flip_bit: int | None = None

    def __post_init__(self) -> None:
        if self.method not in {*_METHODS, ANY}:
            known = ", ".join(sorted(_METHODS))
            raise ValueError(f"method must be one of {known} or {ANY}, not {self.method!r}")
        if self.when not in {"before", "after"}:
            raise ValueError(f"when must be 'before' or 'after', not {self.when!r}")
        _checks.count("nth", self.nth, least=1)
        _checks.seconds("delay_s", self.delay_s, zero=True)
        damage = {"keep_bytes": self.keep_bytes, "flip_bit": self.flip_bit}
        for name, value in damage.items():
            if value is None:
                continue
            _checks.count(name, value, least=0)
            if self.method not in _WITH_PAYLOAD:
                raise ValueError(f"{name} needs a method with a payload, not {self.method!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageCall:
    """One call that reached a ``FaultyStorage``, and the fault that it met with."""

    method: str
    key: str | None
    fault: Fault | None


class FaultyStorage(WrappedStorage):
    """``storage``, except for what ``faults`` say, and what chance does. Thread-safe.

    With ``error_rate`` any call but ``abort`` fails that often with a ``TransientStorageError``,
    half of them after they took effect; with ``flip_rate`` a read is that often one bit wrong.
    ``rng`` decides, and its seed is in the error. Delays are slept on ``clock``.

    A fault fires once; of two for the same call the first does. Every call is noted in ``calls``
    for as long as the storage lives, some hundred bytes each: it is for tests, not for a service.
    """

    def __init__(
        self,
        storage: Storage,
        faults: Sequence[Fault] = (),
        *,
        rng: random.Random | None = None,
        error_rate: float = 0.0,
        flip_rate: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(storage)
        self._faults = [_checks.instance("fault", fault, Fault) for fault in faults]
        self._rng = seeded_rng() if rng is None else _checks.instance("rng", rng, random.Random)
        self._error_rate = _checks.between("error_rate", error_rate, 0, 1)
        self._flip_rate = _checks.between("flip_rate", flip_rate, 0, 1)
        self._clock = SystemClock() if clock is None else _checks.clock("clock", clock)
        self._lock = threading.Lock()
        self._calls: list[StorageCall] = []
        self._counts: Counter[str] = Counter()

    @property
    def calls(self) -> tuple[StorageCall, ...]:
        """Every call so far, in the order they began."""
        with self._lock:
            return tuple(self._calls)

    @property
    def unfired(self) -> tuple[Fault, ...]:
        """The faults that no call has met with yet: a test that expects none shows that it
        tested what it says."""
        with self._lock:
            return tuple(self._faults)

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> ObjectWriter:
        fault = self._met("open_writer", key)
        self._begin(fault)
        writer = self._inner.open_writer(key, size_bytes=size_bytes)
        try:
            _end(fault)
        except BaseException:
            writer.abort()
            raise
        return _FaultyWriter(writer, key, self._through, self._damaging)

    def create(self, key: str, data: Data) -> ObjectInfo:
        return self._damaging("create", key, data, lambda sent: self._inner.create(key, sent))

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        return self._damaging(
            "replace", key, data, lambda sent: self._inner.replace(key, sent, expected)
        )

    def read(self, key: str) -> bytes:
        fault = self._met("read", key)
        data = self._around(fault, functools.partial(self._inner.read, key))
        return bytes(_damaged(fault, data))

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        fault = self._met("read_into", key)
        if fault is None or fault.keep_bytes is fault.flip_bit is None:
            self._around(fault, functools.partial(self._inner.read_into, key, ranges))
            return
        whole = bytearray(sum(wanted.into.nbytes for wanted in ranges))
        slots = _slots(ranges)
        private = [
            replace(wanted, into=memoryview(whole)[slot])
            for wanted, slot in zip(ranges, slots, strict=True)
        ]
        self._around(fault, functools.partial(self._inner.read_into, key, private))
        arrived = _damaged(fault, bytes(whole))
        for wanted, slot in zip(ranges, slots, strict=True):
            part = arrived[slot]
            if part:
                wanted.into.cast("B")[: len(part)] = part

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        entries = self._through("list", prefix, functools.partial(self._inner.list, prefix))
        return self._stepping(prefix, entries)

    def _stepping(self, prefix: str, entries: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        step = functools.partial(next, entries, None)
        while (info := self._through("next", prefix, step)) is not None:
            yield info

    def _through(self, method: str, key: str | None, call: Callable[[], T], /) -> T:
        return self._around(self._met(method, key), call)

    def _damaging(self, method: str, key: str, data: Data, call: Callable[[Data], T]) -> T:
        """The result of the call with what arrives of ``data``."""
        fault = self._met(method, key)
        return self._around(fault, lambda: call(_damaged(fault, data)))

    def _around(self, fault: Fault | None, call: Callable[[], T]) -> T:
        self._begin(fault)
        result = call()
        _end(fault)
        return result

    def _begin(self, fault: Fault | None) -> None:
        if fault is None:
            return
        if fault.delay_s:
            self._clock.sleep(fault.delay_s)
        if fault.error is not None and fault.when == "before":
            raise fault.error

    def _met(self, method: str, key: str | None) -> Fault | None:
        """The fault of this call, which is counted and noted."""
        with self._lock:
            self._counts.update((method, ANY))
            fault = self._planned(method) or self._by_chance(method, key)
            self._calls.append(StorageCall(method=method, key=key, fault=fault))
            return fault

    def _planned(self, method: str) -> Fault | None:
        for fault in self._faults:
            if fault.method in {method, ANY} and fault.nth == self._counts[fault.method]:
                self._faults.remove(fault)
                return fault
        return None

    def _by_chance(self, method: str, key: str | None) -> Fault | None:
        nth = self._counts[method]
        if method != "abort" and self._error_rate and self._rng.random() < self._error_rate:
            when: Literal["before", "after"] = self._rng.choice(("before", "after"))
            what = f"injected by {self._rng!r} {when} call {nth} of {method}"
            error = TransientStorageError(what, path=key if key and isinstance(key, str) else None)
            return Fault(method, nth, error, when)
        if method in _READS and self._flip_rate and self._rng.random() < self._flip_rate:
            return Fault(method, nth, flip_bit=self._rng.randrange(_FLIP_BITS))
        return None


class _FaultyWriter(WrappedWriter):
    def __init__(
        self,
        writer: ObjectWriter,
        key: str,
        through: Through,
        damaging: Callable[[str, str, Data, Callable[[Data], None]], None],
    ) -> None:
        super().__init__(writer, key, through)
        self._damaging = damaging

    def write_at(self, offset: int, data: Data) -> None:
        self._damaging(
            "write_at", self._key, data, lambda sent: self._writer.write_at(offset, sent)
        )


def _end(fault: Fault | None) -> None:
    if fault is not None and fault.error is not None and fault.when == "after":
        raise fault.error


def _damaged(fault: Fault | None, data: Data) -> Data:
    if fault is None or fault.keep_bytes is fault.flip_bit is None:
        return data
    arrived = bytearray(memoryview(data).tobytes())
    if fault.flip_bit is not None and arrived:
        byte, bit = divmod(fault.flip_bit % (8 * len(arrived)), 8)
        arrived[byte] ^= 1 << bit
    return bytes(arrived[: fault.keep_bytes])


def _slots(ranges: Sequence[ReadRange]) -> list[slice]:
    """Where each range's bytes are when all are put one after the other."""
    slots = []
    start = 0
    for wanted in ranges:
        slots.append(slice(start, start + wanted.into.nbytes))
        start += wanted.into.nbytes
    return slots
