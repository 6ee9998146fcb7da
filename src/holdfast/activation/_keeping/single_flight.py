"""Lets many threads that want the same thing share one computation of it. Knows keys, threads and
outcomes; not what is computed.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from holdfast.errors import RecomputationError

T = TypeVar("T")


class Flights(Generic[T]):
    """Computations under way, at most one for each key. Thread-safe; no lock is held over one.

    Outcomes are shared only with those who were waiting: the next to ask computes again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight[T]] = {}
        self._waiting: dict[int, _Flight[T]] = {}

    def run(self, key: str, work: Callable[[], T] | None) -> tuple[T, bool] | None:
        """The outcome of the computation under way, else of ``work``, and whether it was ``work``;
        ``None`` if there is neither.

        An ``Exception`` is raised to all who waited. What only stops a thread, such as
        ``KeyboardInterrupt``, is not: one of those who waited computes instead.
        ``RecomputationError`` if the thread would wait for itself, also by way of others.
        """
        while True:
            with self._lock:
                flight = self._flights.get(key)
                if flight is None:
                    if work is None:
                        return None
                    self._flights[key] = _Flight(threading.get_ident())
                    break
                self._refuse_circle(key, flight)
                self._waiting[threading.get_ident()] = flight
            try:
                flight.done.wait()
            finally:
                with self._lock:
                    del self._waiting[threading.get_ident()]
            if flight.results:
                return flight.results[0], False
            if flight.errors:
                error = flight.errors[0]
                try:
                    raise error
                finally:
                    # The error knows this frame: without this they would keep each other alive.
                    del error, flight
        return self._lead(key, work), True

    def _lead(self, key: str, work: Callable[[], T]) -> T:
        flight = self._flights[key]
        try:
            result = work()
        except Exception as error:
            flight.errors.append(error)
            raise
        else:
            flight.results.append(result)
            return result
        finally:
            with self._lock:
                del self._flights[key]
            flight.done.set()
            del flight  # as above

    def _refuse_circle(self, key: str, flight: "_Flight[T]") -> None:
        here = threading.get_ident()
        while flight.thread != here:
            further = self._waiting.get(flight.thread)
            if further is None:
                return
            flight = further
        raise RecomputationError(
            f"recomputing layer {key!r} asks for layer {key!r} itself, and would wait for ever; "
            "nothing was changed",
            layer_id=key,
        )


class _Flight(Generic[T]):
    """One computation. ``results`` or ``errors`` has its outcome; neither, if it was abandoned."""

    __slots__ = ("done", "errors", "results", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.done = threading.Event()
        self.results: list[T] = []
        self.errors: list[Exception] = []
