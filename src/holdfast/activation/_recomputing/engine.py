"""Recomputes activations by calling the functions registered for them. Knows the functions, their
order and how long they take; not what keeps the results, and no threads of its own."""

import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

from holdfast.activation._events import ActivationEvent, Subscribers
from holdfast.activation._layer_ids import layer_id as checked_id
from holdfast.activation._layer_ids import layer_ids as checked_ids
from holdfast.activation._recomputing.engine_stats import Ledger, RecomputationStats
from holdfast.activation._recomputing.graph import DependencyGraph, cycle_in_words
from holdfast.activation._recomputing.passes import Pass
from holdfast.activation._recomputing.profile import RecomputationProfile, profiling
from holdfast.activation._storages import memory_bytes
from holdfast.errors import ClosedError, DependencyCycleError, RecomputationError, UnknownLayerError
from holdfast.resilience._operation import in_words, name_of

_NS_PER_MS: Final = 1_000_000


class RecomputationEngine:
    """Functions that recompute the activations of layers, and how often and how long they ran.

    Thread-safe. A function is called on the thread that asks, outside any lock, so functions run
    side by side, also the same one, and a function may call the engine. Nothing is kept between
    calls: who asks twice computes twice. After ``close()`` every call but ``close`` and ``closed``
    raises ``ClosedError``; what is running then ends as if nothing had happened.

    ``clock_ns`` is monotonic and measures, ``clock_s`` gives seconds of UTC for the stats.
    """

    __slots__ = ("_clock_ns", "_clock_s", "_closed", "_layers", "_lock", "_subscribers")

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._clock_ns = clock_ns
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._layers = _Layers()
        self._subscribers = Subscribers()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def register_recompute_function(
        self, layer_id: str, fn: Callable[..., Any], depends_on: Iterable[str] = ()
    ) -> None:
        """From now on ``recompute(layer_id)`` calls ``fn`` with the results of ``depends_on``, in
        that order; with nothing if it is empty.

        What it depends on may be registered later. ``ValueError`` for a blank or taken id, an
        ``fn`` that cannot be called or is async, and a dependency named twice;
        ``DependencyCycleError`` if the layer would need itself. Then nothing is registered.
        """
        layer_id = checked_id("layer_id", layer_id)
        _check_function(fn)
        needed = checked_ids("depends_on", depends_on)
        if len(set(needed)) < len(needed):
            raise ValueError(f"depends_on must name each layer once, not {needed!r:.200}")
        with self._lock:
            layers = self._open()
            if layer_id in layers.functions:
                raise ValueError(
                    f"layer {layer_id!r} is registered already; its function stays as it was"
                )
            cycle = layers.graph.cycle_with(layer_id, needed)
            if cycle:
                raise DependencyCycleError(
                    f"layer {layer_id!r} cannot be registered, because {cycle_in_words(cycle)}; "
                    "nothing was changed",
                    layer_id=layer_id,
                    layers=cycle,
                )
            # In this order: whoever finds the function without a lock must find what it needs.
            layers.graph.add_dependency(layer_id, needed)
            layers.functions[layer_id] = fn

    def recompute(self, layer_id: str) -> Any:
        """What the layer's function returns, after computing all that it depends on, each once.

        ``UnknownLayerError``, a ``KeyError``, if the layer or one that it needs is not registered;
        then nothing is called. ``RecomputationError`` with its ``layer_id`` if a function raises,
        which is its ``__cause__``, or returns ``None``; the engine can be used as before. What
        only stops a program or task, such as ``KeyboardInterrupt``, is raised as it is and counted
        nowhere.
        """
        layers = self._layers
        try:
            fn = layers.functions[layer_id]
        except (KeyError, TypeError):
            checked_id("layer_id", layer_id)
            self._open()
            raise _unknown(layer_id, None) from None
        if layers.graph.dependencies(layer_id):
            return self.recompute_multiple([layer_id])[layer_id]
        return self._run(layers.ledger, layer_id, fn)

    def recompute_multiple(self, layer_ids: Iterable[str]) -> dict[str, Any]:
        """The results of these layers by id, in the order asked.

        All they depend on is computed before them, and every layer once, also if it is asked for
        twice or several need it; results that are not asked for are let go when the last layer that
        needs them has them. Raises as ``recompute`` does, at the first layer that fails.
        """
        work, layers = self._begin(layer_ids)
        for each in work.order:
            fn = layers.functions[each]
            work.finish(each, self._run(layers.ledger, each, fn, *work.arguments(each)))
        return work.results()

    def run(self, layer_id: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn`` with ``args`` as a recomputation of ``layer_id``, registered or not.

        It is measured, counted and told of, and its failures are raised, exactly as in
        ``recompute``.
        """
        checked_id("layer_id", layer_id)
        return self._run(self._open().ledger, layer_id, fn, *args)

    def has_recompute_function(self, layer_id: str) -> bool:
        """Whether the layer itself is registered; what it depends on may not be."""
        return checked_id("layer_id", layer_id) in self._open().functions

    def clear(self) -> None:
        """Forget all functions, what they depend on and the stats. Subscribers stay.

        What is running ends as if nothing had happened, but is counted nowhere.
        """
        with self._lock:
            self._open()
            self._layers = _Layers()

    def get_stats(self) -> RecomputationStats:
        """What was recomputed since the engine was made or cleared, as of one moment."""
        layers = self._open()
        with self._lock:
            registered = list(layers.functions)
        return layers.ledger.snapshot(registered, self._clock_s())

    def on_event(self, callback: Callable[[ActivationEvent], object]) -> Callable[[], None]:
        """Call ``callback`` with an event ``recomputed`` or ``failed`` after each recomputation, on
        its thread; the function that is returned ends that. An error of the callback is logged."""
        self._open()
        return self._subscribers.add(callback)

    def profile(self) -> contextlib.AbstractContextManager[RecomputationProfile]:
        """A block; what is recomputed in it, by any thread, is in the profile it gives."""
        self._open()
        return profiling(self._subscribers)

    def close(self) -> None:
        """Forget everything and refuse further calls. Idempotent; does not wait for what runs."""
        with self._lock:
            self._closed = True
            self._layers = _Layers()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"layers={len(self._layers.functions)}"
        return f"RecomputationEngine({state})"

    def _open(self) -> "_Layers":
        layers = self._layers
        # Looked at last: closing sets it before the layers are gone.
        if self._closed:
            raise ClosedError("this RecomputationEngine is closed")
        return layers

    def _begin(self, layer_ids: Iterable[str]) -> tuple[Pass, "_Layers"]:
        """A pass over these layers, all of which have functions, or the error that says why not."""
        asked = list(dict.fromkeys(checked_ids("layer_ids", layer_ids)))
        with self._lock:
            layers = self._open()
            order = layers.graph.topological_order(asked)
            work = Pass(asked, order, {each: layers.graph.dependencies(each) for each in order})
            for each in order:
                if each not in layers.functions:
                    raise _unknown(each, work)
        return work, layers

    def _run(self, ledger: Ledger, layer_id: str, fn: Callable[..., Any], *args: Any) -> Any:
        started_ns = self._clock_ns()
        try:
            result = fn(*args)
        except Exception as error:
            self._count_failure(ledger, layer_id, self._clock_ns() - started_ns)
            # It names this layer: a function that calls the engine for itself, or knows better.
            if isinstance(error, RecomputationError) and error.layer_id == layer_id:
                raise
            raise _failure(layer_id, in_words(error)) from error
        elapsed_ns = self._clock_ns() - started_ns
        if result is None:
            self._count_failure(ledger, layer_id, elapsed_ns)
            raise _failure(layer_id, "its function returned None instead of the activation")
        ledger.add(layer_id, elapsed_ns, self._clock_s())
        if self._subscribers:
            self._tell("recomputed", layer_id, elapsed_ns, result)
        return result

    def _count_failure(self, ledger: Ledger, layer_id: str, elapsed_ns: int) -> None:
        ledger.add(layer_id, None, self._clock_s())
        if self._subscribers:
            self._tell("failed", layer_id, elapsed_ns, None)

    def _tell(self, kind: str, layer_id: str, elapsed_ns: int, result: object) -> None:
        self._subscribers.tell(
            ActivationEvent(
                kind=kind,
                layer_id=layer_id,
                size_bytes=memory_bytes(result),
                elapsed_ms=elapsed_ns / _NS_PER_MS,
            )
        )


class _Layers:
    """All that ``clear`` forgets, so that it can be forgotten at once: a call that has begun goes
    on with what it found."""

    __slots__ = ("functions", "graph", "ledger")

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self.graph = DependencyGraph()
        self.ledger = Ledger()


def _check_function(fn: object) -> None:
    if not callable(fn):
        raise ValueError(  # noqa: TRY004 -- as every refusal of an argument
            f"fn must be a function that returns the activation, not {fn!r:.200}"
        )
    if inspect.iscoroutinefunction(fn):
        raise ValueError(
            f"fn must be a plain function: {name_of(fn)} is async and would return no activation"
        )


def _failure(layer_id: str, why: str) -> RecomputationError:
    return RecomputationError(
        f"recomputing layer {layer_id!r} failed: {why}; nothing of the engine was changed, so it "
        "can be tried again",
        layer_id=layer_id,
    )


def _unknown(layer_id: str, work: Pass | None) -> UnknownLayerError:
    users = [] if work is None else [e for e in work.order if layer_id in work.dependencies[e]]
    needed = f", which layer {users[0]!r} depends on" if users else ""
    return UnknownLayerError(
        f"no recompute function is registered for layer {layer_id!r}{needed}; nothing was "
        "recomputed: register it with register_recompute_function first",
        layer_id=layer_id,
    )
