"""Recomputes layers side by side for asyncio. Knows threads and cancelling; what a recomputation
is, in which order layers come and what is counted, the engine it uses knows."""

import asyncio
import concurrent.futures
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from holdfast import _checks
from holdfast.activation._layer_ids import layer_id as checked_id
from holdfast.activation._recomputing.engine import RecomputationEngine
from holdfast.activation._recomputing.engine_stats import RecomputationStats
from holdfast.activation._recomputing.passes import Pass
from holdfast.activation._surroundings import restored, surroundings
from holdfast.errors import ClosedError

_Running = dict["asyncio.Future[Any]", tuple[str, "concurrent.futures.Future[Any]"]]


class AsyncRecomputationEngine:
    """Recomputes layers on threads, those that do not need each other at the same time.

    At most ``max_parallelism`` functions run at once over all calls, by default as many as there
    are processors. Thread-safe; calls may come from several event loops. Functions run under the
    grad mode, autocast, default device and context variables of the call. torch's number of
    threads within an operation is left alone: with more than one each, layers that run side by
    side compete for the processors, and ``torch.set_num_threads(1)`` may make them faster.

    ``engine`` is the one whose functions are called and which counts them, for events, profiles
    and everything else that it can do. One that is given stays open when this is closed.

    A function may use ``engine``. It may also run an event loop of its own that awaits this object:
    the layers are then recomputed one by one on the function's own thread. But it must not wait for
    another thread's event loop that does, or all threads may come to wait for each other.
    """

    def __init__(
        self, max_parallelism: int | None = None, *, engine: RecomputationEngine | None = None
    ) -> None:
        limit = os.cpu_count() or 1 if max_parallelism is None else max_parallelism
        self._max_parallelism = _checks.count("max_parallelism", limit, least=1)
        self._owns_engine = engine is None
        self._engine = (
            RecomputationEngine()
            if engine is None
            else _checks.instance("engine", engine, RecomputationEngine)
        )
        self._thread = threading.local()
        self._workers = concurrent.futures.ThreadPoolExecutor(
            self._max_parallelism,
            thread_name_prefix="holdfast-recompute",
            initializer=functools.partial(setattr, self._thread, "is_worker", True),
        )
        self._closed = False

    @property
    def engine(self) -> RecomputationEngine:
        """The engine whose functions are called."""
        return self._engine

    @property
    def max_parallelism(self) -> int:
        return self._max_parallelism

    @property
    def closed(self) -> bool:
        return self._closed

    def register_recompute_function(
        self, layer_id: str, fn: Callable[..., Any], depends_on: Iterable[str] = ()
    ) -> None:
        """As ``RecomputationEngine.register_recompute_function``. ``fn`` is called on a thread of
        this object, so it is a plain function."""
        self._require_open()
        self._engine.register_recompute_function(layer_id, fn, depends_on)

    async def recompute_async(self, layer_id: str) -> Any:
        """The layer's result, after computing all that it depends on, each once and as much as
        possible at the same time. Raises, and can be cancelled, as ``recompute_multiple_async``."""
        layer_id = checked_id("layer_id", layer_id)
        return (await self.recompute_multiple_async([layer_id]))[layer_id]

    async def recompute_multiple_async(self, layer_ids: Iterable[str]) -> dict[str, Any]:
        """The results of these layers by id, in the order asked, as much as possible computed at
        the same time. Every layer runs once, after all that it depends on.

        Raises as ``RecomputationEngine.recompute_multiple`` does. When a layer fails or the task
        that awaits this is cancelled, layers that have not started never start, those that run are
        waited for, as nothing can interrupt them, and counted, and their results are dropped; then
        the first error or the cancellation is raised. ``ClosedError`` if the engine is closed
        before all layers have started.
        """
        self._require_open()
        if getattr(self._thread, "is_worker", False):
            # It has its place among those that run; waiting for another one could be for ever.
            return self._engine.recompute_multiple(layer_ids)
        work, layers = self._engine._begin(layer_ids)  # noqa: SLF001 -- two halves of one core
        run = _under_the_same(
            functools.partial(self._engine._run, layers.ledger)  # noqa: SLF001
        )
        running: _Running = {}
        # The last is taken first, so that what was just computed is used up soon.
        ready = work.ready()[::-1]
        try:
            while ready or running:
                while ready and len(running) < self._max_parallelism:
                    layer_id = ready.pop()
                    fn, arguments = layers.functions[layer_id], work.arguments(layer_id)
                    self._start(running, layer_id, run, fn, arguments)
                    del fn, arguments
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ready += _collect(running, work)[::-1]
        except BaseException as error:
            for _, call in running.values():
                call.cancel()
            # If the event loop is gone there is nothing left that could wait.
            if not isinstance(error, GeneratorExit):
                await _ended(running)
            raise
        return work.results()

    def get_stats(self) -> RecomputationStats:
        """As ``RecomputationEngine.get_stats``."""
        self._require_open()
        return self._engine.get_stats()

    def close(self) -> None:
        """Start no more layers and wait for those that run. Idempotent.

        Blocks the thread it is called on. In a coroutine use ``async with`` or ``close_async``, and
        in a recompute function neither: it would wait for itself.
        """
        self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        if self._owns_engine:
            self._engine.close()

    async def close_async(self) -> None:
        """As ``close``, while the event loop goes on."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"AsyncRecomputationEngine({self._engine!r}, {self._max_parallelism} at once{state})"

    def _start(
        self, running: _Running, layer_id: str, run: Callable[..., Any], fn: Any, args: list[Any]
    ) -> None:
        context = contextvars.copy_context()
        try:
            call = self._workers.submit(context.run, run, layer_id, fn, *args)
        except RuntimeError:
            self._require_open()
            raise
        running[asyncio.wrap_future(call)] = (layer_id, call)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this AsyncRecomputationEngine is closed")


def _collect(running: _Running, work: Pass) -> list[str]:
    """Take what has ended out of ``running``; the layers that can start now."""
    freed = []
    for future in [each for each in running if each.done()]:
        layer_id = running.pop(future)[0]
        if future.cancelled():
            raise ClosedError(
                f"this AsyncRecomputationEngine was closed before layer {layer_id!r} started"
            )
        try:
            freed += work.finish(layer_id, future.result())
        finally:
            # Its error knows this frame: without this they would keep each other alive, and all
            # results of the pass.
            del future
    return freed


async def _ended(running: _Running) -> None:
    """Return when none of them runs, however often this is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in running if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for future in running:
        if not future.cancelled():
            future.exception()  # or asyncio would complain that nobody looked at it
    if cancelled is not None:
        try:
            raise cancelled
        finally:
            del cancelled  # as above


def _under_the_same(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` for another thread, where torch is set up as on this one.

    torch keeps grad mode, autocast and the default device for each thread. The default dtype and
    the attention kernels are everybody's: setting them here would disturb the other threads.
    """
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    here = surroundings()

    def called(*args: Any) -> Any:
        there = surroundings()
        same = there._replace(
            autocast=here.autocast, autocast_cache=here.autocast_cache, device=here.device
        )
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), restored(same):
            return call(*args)

    return called
