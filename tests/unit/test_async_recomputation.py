"""The async recomputation engine: what runs side by side, how many at most, and what is left
running when a call is cancelled, fails or the engine is closed."""

import asyncio
import contextvars
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from holdfast.activation._recomputing.async_engine import AsyncRecomputationEngine
from holdfast.activation._recomputing.engine import RecomputationEngine
from holdfast.errors import ClosedError, DependencyCycleError, RecomputationError, UnknownLayerError

SOON_S = 60


class BrokenError(Exception):
    pass


class Held:
    """A function that stays inside until it is let go, and what it returns or raises then."""

    def __init__(self, result=1):
        self.result = result
        self.inside = threading.Event()
        self.leave = threading.Event()
        self.calls = 0

    def __call__(self, *_):
        self.calls += 1
        self.inside.set()
        assert self.leave.wait(SOON_S)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def entered(self):
        assert await asyncio.to_thread(self.inside.wait, SOON_S)


class Crowd:
    """Counts how many are inside at the same time."""

    def __init__(self):
        self._lock = threading.Lock()
        self.now = self.most = self.ever = 0

    def __enter__(self):
        with self._lock:
            self.now += 1
            self.ever += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_):
        with self._lock:
            self.now -= 1


def fails():
    raise BrokenError("on purpose")


async def turns():
    """Let the event loop do whatever it has to do."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition):
    """Let the event loop go round until it is so: nothing tells of it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def counts(engine):
    return {layer.layer_id: layer.call_count for layer in engine.get_stats().layers}


# What is computed


def test_a_layer_is_recomputed_on_another_thread():
    async def main():
        x = torch.randn(8, 8)
        threads = set()
        async with AsyncRecomputationEngine() as engine:
            engine.register_recompute_function(
                "a", lambda: threads.add(threading.current_thread()) or torch.relu(x)
            )
            assert torch.equal(await engine.recompute_async("a"), torch.relu(x))
            assert threading.current_thread() not in threads
            assert engine.get_stats().total_recomputations == 1

    asyncio.run(main())


def test_several_layers_come_back_in_the_order_asked():
    async def main():
        async with AsyncRecomputationEngine(4) as engine:
            for name in "abcdef":
                engine.register_recompute_function(name, lambda name=name: name.upper())
            found = await engine.recompute_multiple_async(iter("fbdbf"))
            assert list(found.items()) == [("f", "F"), ("b", "B"), ("d", "D")]
            assert await engine.recompute_multiple_async([]) == {}
            assert engine.get_stats().total_recomputations == 3

    asyncio.run(main())


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_dependencies_come_before_and_shared_ones_once(limit):
    async def main():
        async with AsyncRecomputationEngine(limit) as engine:
            engine.register_recompute_function("top", lambda a, b, c: (a, b, c), ["x", "y", "base"])
            engine.register_recompute_function("x", lambda base: base + 1, ["base"])
            engine.register_recompute_function("y", lambda x, base: (x, base), ["x", "base"])
            engine.register_recompute_function("base", lambda: 10)
            found = await engine.recompute_multiple_async(["top", "x"])
            assert found == {"top": (11, (11, 10), 10), "x": 11}
            assert counts(engine) == {"top": 1, "x": 1, "y": 1, "base": 1}
            assert await engine.recompute_async("y") == (11, 10)

    asyncio.run(main())


def test_many_layers_in_a_chain_and_beside_each_other():
    async def main():
        async with AsyncRecomputationEngine(3) as engine:
            engine.register_recompute_function("0", lambda: 0)
            for at in range(1, 300):
                engine.register_recompute_function(str(at), lambda b: b + 1, [str(at - 1)])
                engine.register_recompute_function(f"leaf {at}", lambda at=at: at)
            leaves = [f"leaf {at}" for at in range(1, 300)]
            found = await engine.recompute_multiple_async([*leaves, "299"])
            assert list(found.values()) == [*range(1, 300), 299]

    asyncio.run(main())


def test_results_nobody_needs_any_more_are_let_go():
    async def main():
        refs, alive = {}, {}

        def layer(name, *needed):
            def fn(*args):
                alive[name] = {n for n, ref in refs.items() if ref() is not None}
                result = torch.zeros(3)
                refs[name] = weakref.ref(result)
                return result

            engine.register_recompute_function(name, fn, needed)

        # With one thread, which lets go of a layer's arguments before it begins the next.
        async with AsyncRecomputationEngine(1) as engine:
            layer("a")
            layer("b", "a")
            layer("c", "b")
            layer("d", "c")
            found = await engine.recompute_async("d")
            assert alive["d"] == {"c"}
        assert {name for name, ref in refs.items() if ref() is not None} == {"d"}
        assert refs["d"]() is found

    asyncio.run(main())


def test_it_counts_in_the_engine_it_is_given():
    async def main():
        with RecomputationEngine() as engine:
            engine.register_recompute_function("a", lambda: 1)
            async with AsyncRecomputationEngine(1, engine=engine) as both:
                assert both.engine is engine
                with engine.profile() as profile:
                    await both.recompute_async("a")
                both.register_recompute_function("b", lambda a: a + 1, ["a"])
                assert both.get_stats().layer_stats.keys() == {"a", "b"}
            assert [event.layer_id for event in profile.events] == ["a"]
            assert engine.recompute("b") == 2

    asyncio.run(main())


# Side by side, up to the limit


def test_independent_layers_run_at_the_same_time():
    """Each waits in the middle for the others: one after the other would never end."""

    async def main():
        meet = threading.Barrier(4)
        async with AsyncRecomputationEngine(4) as engine:
            for name in "abcd":
                engine.register_recompute_function(name, lambda: meet.wait(SOON_S) + 1)
            found = await engine.recompute_multiple_async(["a", "b", "c", "d"])
            assert sorted(found.values()) == [1, 2, 3, 4]

    asyncio.run(main())


def test_what_one_layer_depends_on_runs_at_the_same_time():
    async def main():
        meet = threading.Barrier(2)
        async with AsyncRecomputationEngine(2) as engine:
            for name in ("left", "right"):
                engine.register_recompute_function(name, lambda: meet.wait(SOON_S) + 1)
            engine.register_recompute_function("sum", lambda a, b: a + b, ["left", "right"])
            assert await engine.recompute_async("sum") == 3

    asyncio.run(main())


def test_the_limit_holds_over_all_calls_and_is_reached():
    async def main():
        crowd, meet = Crowd(), threading.Barrier(2)

        def work():
            with crowd:
                meet.wait(SOON_S)
                return 1

        async with AsyncRecomputationEngine(2) as engine:
            assert engine.max_parallelism == 2
            for at in range(40):
                engine.register_recompute_function(str(at), work)
            await asyncio.gather(
                engine.recompute_multiple_async(map(str, range(20))),
                engine.recompute_multiple_async(map(str, range(20, 30))),
                *(engine.recompute_async(str(at)) for at in range(30, 40)),
            )
        assert (crowd.most, crowd.ever) == (2, 40)

    asyncio.run(main())


def test_the_limit_holds_over_several_event_loops():
    crowd, meet = Crowd(), threading.Barrier(3)

    def work():
        with crowd:
            meet.wait(SOON_S)
            return 1

    with AsyncRecomputationEngine(3) as engine:
        for at in range(12):
            engine.register_recompute_function(str(at), work)

        def loop(thread):
            layers = [str(at) for at in range(12) if at % 4 == thread]
            return asyncio.run(engine.recompute_multiple_async(layers))

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(loop, range(4)))
        assert [list(each) for each in found] == [
            ["0", "4", "8"],
            ["1", "5", "9"],
            ["2", "6", "10"],
            ["3", "7", "11"],
        ]
        assert (crowd.most, crowd.ever) == (3, 12)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_an_impossible_limit_is_refused(wrong):
    with pytest.raises(ValueError, match="max_parallelism must be a whole number, at least 1"):
        AsyncRecomputationEngine(wrong)


def test_the_limit_is_the_processors_unless_given():
    with AsyncRecomputationEngine() as engine:
        assert engine.max_parallelism == os.cpu_count()


def test_an_engine_that_is_none_is_refused():
    with pytest.raises(ValueError, match="engine must be a RecomputationEngine"):
        AsyncRecomputationEngine(1, engine="engine")


# Cancelling


def test_cancelling_waits_for_what_runs_and_starts_nothing_more():
    async def main():
        first, second, after = Held(), Held(), Held()
        async with AsyncRecomputationEngine(2) as engine:
            for name, fn in (("first", first), ("second", second), ("third", after)):
                engine.register_recompute_function(name, fn)
            engine.register_recompute_function("next", after, ["first"])
            task = asyncio.create_task(
                engine.recompute_multiple_async(["first", "second", "third", "next"])
            )
            await first.entered()
            await second.entered()
            task.cancel()
            await turns()
            assert not task.done()
            first.leave.set()
            await turns()
            task.cancel()
            await turns()
            assert not task.done()
            second.leave.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert counts(engine) == {"first": 1, "second": 1, "third": 0, "next": 0}
            assert after.calls == 0
            after.leave.set()
            assert await engine.recompute_multiple_async(["next"]) == {"next": 1}

    asyncio.run(main())


def test_a_cancelled_call_that_waits_for_its_turn_never_starts():
    async def main():
        held, waiting = Held(), Held()
        async with AsyncRecomputationEngine(1) as engine:
            engine.register_recompute_function("held", held)
            engine.register_recompute_function("waiting", waiting)
            running = asyncio.create_task(engine.recompute_async("held"))
            await held.entered()
            queued = asyncio.create_task(engine.recompute_async("waiting"))
            await turns()
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            held.leave.set()
            assert await running == 1
        assert waiting.calls == 0

    asyncio.run(main())


def test_a_timeout_is_raised_when_what_runs_has_ended():
    async def main():
        held = Held()
        async with AsyncRecomputationEngine(1) as engine:
            engine.register_recompute_function("held", held)
            limit = asyncio.timeout(None)
            task = asyncio.create_task(within(limit, engine))
            await held.entered()
            limit.reschedule(asyncio.get_running_loop().time())
            await until(task.cancelling)
            await turns()
            assert not task.done()
            held.leave.set()
            with pytest.raises(TimeoutError):
                await task
            assert engine.get_stats().total_recomputations == 1

    async def within(limit, engine):
        async with limit:
            await engine.recompute_async("held")

    asyncio.run(main())


def test_a_function_that_fails_after_the_cancel_is_counted_and_says_no_more(caplog):
    async def main():
        held = Held(BrokenError("late"))
        async with AsyncRecomputationEngine(1) as engine:
            engine.register_recompute_function("held", held)
            task = asyncio.create_task(engine.recompute_async("held"))
            await held.entered()
            task.cancel()
            await turns()
            held.leave.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.get_stats().total_failures == 1

    asyncio.run(main())
    gc.collect()
    assert caplog.records == []


# Failing


def test_a_failure_names_the_layer_and_keeps_the_original():
    async def main():
        async with AsyncRecomputationEngine() as engine:
            engine.register_recompute_function("a", fails)
            engine.register_recompute_function("b", lambda a: a, ["a"])
            engine.register_recompute_function("none", lambda: None)
            engine.register_recompute_function("fine", lambda: 1)
            with pytest.raises(RecomputationError) as caught:
                await engine.recompute_async("b")
            assert caught.value.layer_id == "a"
            assert isinstance(caught.value.__cause__, BrokenError)
            with pytest.raises(RecomputationError, match="returned None"):
                await engine.recompute_async("none")
            assert await engine.recompute_async("fine") == 1
            assert engine.get_stats().total_failures == 2

    asyncio.run(main())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_that_failed_leaves_no_garbage(cancelled):
    storages = []
    leave, inside = threading.Event(), threading.Event()

    def first():
        tensor = torch.ones(1000)
        storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def second(_):
        inside.set()
        assert leave.wait(SOON_S)
        raise BrokenError("on purpose")

    async def run():
        async with AsyncRecomputationEngine(2) as engine:
            engine.register_recompute_function("first", first)
            engine.register_recompute_function("second", second, depends_on=["first"])
            call = asyncio.ensure_future(engine.recompute_multiple_async(["first", "second"]))
            assert await asyncio.to_thread(inside.wait, SOON_S)
            if cancelled:
                for _ in range(2):  # the second time while it waits for what runs
                    call.cancel()
                    await turns()
            leave.set()
            await asyncio.wait([call])  # raised here, the error would know the task that has it
            assert call.cancelled() if cancelled else call.exception().layer_id == "second"

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert [storage() for storage in storages] == [None]
    finally:
        gc.enable()


def test_after_a_failure_nothing_starts_and_what_runs_is_waited_for(caplog):
    async def main():
        broken, slow, after = Held(BrokenError("first")), Held(BrokenError("second")), Held()
        async with AsyncRecomputationEngine(2) as engine:
            for name, fn in (("broken", broken), ("slow", slow), ("after", after)):
                engine.register_recompute_function(name, fn)
            task = asyncio.create_task(engine.recompute_multiple_async(["broken", "slow", "after"]))
            await broken.entered()
            await slow.entered()
            broken.leave.set()
            await until(lambda: engine.get_stats().total_failures)
            await turns()
            assert not task.done()
            slow.leave.set()
            with pytest.raises(RecomputationError) as caught:
                await task
            assert caught.value.layer_id == "broken"
            assert engine.get_stats().total_failures == 2
        assert after.calls == 0

    asyncio.run(main())
    gc.collect()
    assert caplog.records == []


def test_a_cancel_while_a_failed_call_waits_is_not_lost():
    async def main():
        broken, slow = Held(BrokenError("first")), Held()
        async with AsyncRecomputationEngine(2) as engine:
            engine.register_recompute_function("broken", broken)
            engine.register_recompute_function("slow", slow)
            task = asyncio.create_task(engine.recompute_multiple_async(["broken", "slow"]))
            await slow.entered()
            broken.leave.set()
            await until(lambda: engine.get_stats().total_failures)
            await turns()
            task.cancel()
            await turns()
            assert not task.done()
            slow.leave.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_what_stops_a_program_is_raised_as_it_is():
    def interrupted():
        raise KeyboardInterrupt

    async def main(engine):
        await engine.recompute_async("a")

    with AsyncRecomputationEngine(1) as engine:
        engine.register_recompute_function("a", interrupted)
        engine.register_recompute_function("b", lambda: 1)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main(engine))
        assert engine.get_stats().total_failures == 0
        assert asyncio.run(engine.recompute_async("b")) == 1


def test_bad_arguments_are_refused():
    async def main():
        async with AsyncRecomputationEngine() as engine:
            engine.register_recompute_function("a", lambda b: b, ["b"])
            with pytest.raises(DependencyCycleError):
                engine.register_recompute_function("b", lambda a: a, ["a"])
            with pytest.raises(ValueError, match="'a' is registered already"):
                engine.register_recompute_function("a", lambda: 1)
            with pytest.raises(UnknownLayerError, match="'b', which layer 'a' depends on"):
                await engine.recompute_async("a")
            with pytest.raises(ValueError, match="layer_id must be a text that is not blank"):
                await engine.recompute_async(" ")
            with pytest.raises(ValueError, match="not None"):
                await engine.recompute_multiple_async(None)
            with pytest.raises(ValueError, match="give"):
                await engine.recompute_multiple_async("abc")

    asyncio.run(main())


# Closing


def test_after_close_every_call_is_refused():
    async def main():
        async with AsyncRecomputationEngine() as engine:
            engine.register_recompute_function("a", lambda: 1)
            assert not engine.closed
        assert engine.closed
        engine.close()
        await engine.close_async()
        with pytest.raises(ClosedError):
            await engine.recompute_async("a")
        with pytest.raises(ClosedError):
            await engine.recompute_multiple_async(["a"])
        with pytest.raises(ClosedError):
            await engine.__aenter__()
        for use in (
            lambda: engine.register_recompute_function("b", lambda: 1),
            engine.get_stats,
            engine.__enter__,
        ):
            with pytest.raises(ClosedError, match="this AsyncRecomputationEngine is closed"):
                use()
        assert engine.engine.closed

    asyncio.run(main())


def test_close_waits_for_what_runs_and_the_rest_never_starts():
    async def main():
        held, after = Held("kept"), Held()
        engine = AsyncRecomputationEngine(1)
        engine.register_recompute_function("held", held)
        engine.register_recompute_function("after", after, ["held"])
        engine.register_recompute_function("queued", after)
        only_held = asyncio.create_task(engine.recompute_async("held"))
        await held.entered()
        needs_held = asyncio.create_task(engine.recompute_async("queued"))
        await turns()
        closing = asyncio.create_task(engine.close_async())
        await until(lambda: engine.closed)
        with pytest.raises(ClosedError, match="closed before layer 'queued' started"):
            await needs_held
        assert not closing.done()
        held.leave.set()
        assert await only_held == "kept"
        await closing
        assert after.calls == 0

    asyncio.run(main())


def test_a_call_whose_next_layer_is_due_after_close_is_told():
    async def main():
        held, after = Held(), Held()
        engine = AsyncRecomputationEngine(1)
        engine.register_recompute_function("held", held)
        engine.register_recompute_function("after", after, ["held"])
        task = asyncio.create_task(engine.recompute_async("after"))
        await held.entered()
        closing = asyncio.create_task(engine.close_async())
        await until(lambda: engine.closed)
        held.leave.set()
        with pytest.raises(ClosedError):
            await task
        await closing
        assert after.calls == 0

    asyncio.run(main())


def test_closing_on_the_thread_of_the_event_loop_ends_as_well():
    async def main():
        held = Held("kept")
        engine = AsyncRecomputationEngine(1)
        engine.register_recompute_function("held", held)
        engine.register_recompute_function("queued", Held())
        running = asyncio.create_task(engine.recompute_multiple_async(["held", "queued"]))
        await held.entered()
        held.leave.set()
        engine.close()
        with pytest.raises(ClosedError):
            await running

    asyncio.run(main())


def test_an_engine_that_is_closed_below_refuses():
    async def main():
        below = RecomputationEngine()
        async with AsyncRecomputationEngine(engine=below) as engine:
            below.close()
            with pytest.raises(ClosedError, match="this RecomputationEngine is closed"):
                await engine.recompute_async("a")

    asyncio.run(main())


# The surroundings of the call


def test_functions_run_under_the_grad_mode_of_the_call():
    async def main():
        x = torch.ones(2, requires_grad=True)
        async with AsyncRecomputationEngine(1) as engine:
            engine.register_recompute_function("a", lambda: x * 2)
            assert (await engine.recompute_async("a")).requires_grad
            with torch.no_grad():
                assert not (await engine.recompute_async("a")).requires_grad
            with torch.inference_mode():
                assert (await engine.recompute_async("a")).is_inference()
            again = await engine.recompute_async("a")
            assert again.requires_grad
            assert not again.is_inference()

    asyncio.run(main())


def test_functions_run_under_the_autocast_and_device_of_the_call():
    async def main():
        x = torch.ones(2, 2)
        async with AsyncRecomputationEngine(1) as engine:
            engine.register_recompute_function("product", lambda: x @ x)
            engine.register_recompute_function("new", lambda: torch.empty(3))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert (await engine.recompute_async("product")).dtype is torch.bfloat16
            assert (await engine.recompute_async("product")).dtype is torch.float32
            with torch.device("meta"):
                assert (await engine.recompute_async("new")).device.type == "meta"
            assert (await engine.recompute_async("new")).device.type == "cpu"

    asyncio.run(main())


def test_functions_see_the_context_variables_of_the_call():
    step = contextvars.ContextVar("step")

    async def call(engine, value):
        step.set(value)
        return await engine.recompute_multiple_async(["a", "b"])

    async def main():
        async with AsyncRecomputationEngine(2) as engine:
            engine.register_recompute_function("a", step.get)
            engine.register_recompute_function("b", step.get)
            found = await asyncio.gather(call(engine, 1), call(engine, 2))
            assert found == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]

    asyncio.run(main())


def test_torch_keeps_its_number_of_threads():
    async def main():
        async with AsyncRecomputationEngine(1) as engine:
            engine.register_recompute_function("threads", torch.get_num_threads)
            assert await engine.recompute_async("threads") == torch.get_num_threads()

    asyncio.run(main())


# Functions that use the engine


def test_a_function_may_use_the_engine_also_where_one_runs_at_a_time():
    async def main():
        async with AsyncRecomputationEngine(1) as engine:
            engine.register_recompute_function("a", lambda: 5)
            engine.register_recompute_function("plain", lambda: engine.engine.recompute("a"))
            engine.register_recompute_function(
                "looped", lambda: asyncio.run(engine.recompute_async("a")) + 1
            )
            found = await engine.recompute_multiple_async(["plain", "looped"])
            assert found == {"plain": 5, "looped": 6}
            assert counts(engine) == {"a": 2, "plain": 1, "looped": 1}

    asyncio.run(main())


def test_the_event_loop_goes_on_while_layers_run():
    async def main():
        held = Held()
        async with AsyncRecomputationEngine(1) as engine:
            engine.register_recompute_function("held", held)
            task = asyncio.create_task(engine.recompute_async("held"))
            await held.entered()
            await turns()
            assert not task.done()
            held.leave.set()
            assert await task == 1

    asyncio.run(main())
