"""What the parts of the suite share: the storage, sizes, and threads that start together."""

# ruff: noqa: S101 -- tests, though they are shipped

import functools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from holdfast.contracts import ObjectInfo, Storage
from holdfast.errors import ObjectNotFoundError

T = TypeVar("T")

THREADS = 8


class Tests:
    """The storage under test, and how much of everything there is in a test."""

    large_bytes: ClassVar[int] = 20 * 1024 * 1024 + 4095
    many_objects: ClassVar[int] = 1100
    many_ranges: ClassVar[int] = 5000
    random_examples: ClassVar[int] = 30

    def make_storage(self, tmp_path: Path) -> Storage:
        """An empty storage that nobody else uses; ``tmp_path`` is an empty folder for it."""
        raise NotImplementedError(f"{type(self).__name__} must define make_storage")

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return self.make_storage(tmp_path)

    def some_examples(self) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """hypothesis settings for a test of a storage, which may be slow."""
        return settings(
            max_examples=self.random_examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )


@functools.cache
def _block(seed: int) -> bytes:
    numbers = (seed * 1_000_003 + n * 40503 & 0xFFFFFF for n in range(4099))
    return b"".join(number.to_bytes(3, "big") for number in numbers)


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that differ from place to place, so that misplaced ones show."""
    block = _block(seed)
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def put(storage: Storage, key: str, data: bytes) -> ObjectInfo:
    """Write an object through a writer."""
    with storage.open_writer(key) as writer:
        writer.write_at(0, data)
        return writer.finish()


def require_bytes(found: bytes | bytearray, expected: bytes | bytearray) -> None:
    """They are equal. For large ones, of which pytest would print every byte."""
    if found != expected:
        first = next(
            (n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), -1
        )
        pytest.fail(f"{len(found)} of {len(expected)} bytes, the first wrong one at {first}")


def require_same(info: ObjectInfo, other: ObjectInfo) -> None:
    """Both tell of the same object. A time may be cut to whole seconds in one of them."""
    assert (info.key, info.size_bytes, info.version) == (other.key, other.size_bytes, other.version)
    assert abs(info.modified_s - other.modified_s) <= 1


def require_absent(storage: Storage, key: str) -> None:
    """No method sees the object."""
    with pytest.raises(ObjectNotFoundError):
        storage.stat(key)
    with pytest.raises(ObjectNotFoundError):
        storage.read(key)
    assert key not in [info.key for info in storage.list(key)]


def at_once(works: Iterable[Callable[[], Any]]) -> list[Any]:
    """The result of each, or the exception it raised, when all are started at one moment."""
    todo = list(works)
    results: list[Any] = [None] * len(todo)
    start = threading.Barrier(len(todo))

    def work(n: int) -> None:
        start.wait()
        try:
            results[n] = todo[n]()
        except Exception as error:  # noqa: BLE001 -- handed to the test
            results[n] = error

    # Daemons, so that a storage that never answers fails its test and not the whole run.
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(todo))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def while_others(disturb: Callable[[int], Any], look: Callable[[], Any], times: int) -> None:
    """Call ``look`` in two threads while a third calls ``disturb`` with 0, 1, 2 and so on, each
    at least so many times. Raises what one of them raised."""
    disturbed = 0
    looking = 2
    lock = threading.Lock()
    over = threading.Event()

    def go_on() -> None:
        nonlocal disturbed
        try:
            while looking:
                disturb(disturbed)
                disturbed += 1
        finally:
            over.set()

    def keep_looking() -> None:
        nonlocal looking
        try:
            looks = 0
            while not over.is_set() and min(looks, disturbed) < times:
                look()
                looks += 1
        finally:
            with lock:
                looking -= 1

    for result in at_once([go_on, keep_looking, keep_looking]):
        if isinstance(result, Exception):
            raise result


def shared_out(items: Iterable[T], work: Callable[[T], Any]) -> None:
    """Do ``work`` for all items in a few threads, and raise what one of them raised."""
    todo = list(items)

    def some(n: int) -> None:
        for item in todo[n::THREADS]:
            work(item)

    for result in at_once([lambda n=n: some(n) for n in range(THREADS)]):  # type: ignore[misc]
        if isinstance(result, Exception):
            raise result
