"""The recomputation engine: what it calls and in which order, what it counts, how it fails, and
that many threads can use it at once."""

import dataclasses
import gc
import itertools
import logging
import pickle
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import torch

from holdfast.activation._events import ActivationEvent, Subscribers
from holdfast.activation._recomputing.engine import RecomputationEngine
from holdfast.errors import ClosedError, DependencyCycleError, RecomputationError, UnknownLayerError

SOON_S = 60
MS = 1_000_000
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class BrokenError(Exception):
    pass


class Time:
    """Both clocks of an engine, moved by hand."""

    def __init__(self):
        self.ns = 5_000
        self.utc = NOON

    def pass_ms(self, ms):
        self.ns += int(ms * MS)
        self.utc += timedelta(milliseconds=ms)

    def seconds(self):
        return self.utc.timestamp()

    def engine(self):
        return RecomputationEngine(clock_ns=lambda: self.ns, clock_s=self.seconds)


class ThreadClock(threading.local):
    """Moves by a microsecond at each look, for each thread on its own."""

    ns = 0

    def __call__(self):
        self.ns += 1000
        return self.ns


@pytest.fixture
def engine():
    with RecomputationEngine() as engine:
        yield engine


@pytest.fixture
def time():
    return Time()


def fails():
    raise BrokenError("on purpose")


def registered(engine, **layers):
    """Layers by name: a value to return, or what they depend on and a function of that."""
    for name, given in layers.items():
        if isinstance(given, tuple):
            depends_on, fn = given
            engine.register_recompute_function(name, fn, depends_on)
        else:
            engine.register_recompute_function(name, lambda given=given: given)
    return engine


def run_threads(count, work):
    """``work(0)`` to ``work(count - 1)`` at the same time, each on its thread; their results."""
    begin = threading.Barrier(count)

    def begun(index):
        begin.wait(SOON_S)
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begun, range(count)))


# What is registered


def test_a_registered_function_recomputes_the_activation(engine):
    x = torch.randn(4, 4)
    assert not engine.has_recompute_function("block 0")
    engine.register_recompute_function("block 0", lambda: torch.relu(x))
    assert engine.has_recompute_function("block 0")
    assert torch.equal(engine.recompute("block 0"), torch.relu(x))


def test_every_call_computes_again(engine):
    engine.register_recompute_function("a", lambda: torch.ones(1))
    assert engine.recompute("a") is not engine.recompute("a")


def test_an_id_that_is_taken_is_refused_and_its_function_stays(engine):
    registered(engine, a=1)
    with pytest.raises(ValueError, match="'a' is registered already"):
        engine.register_recompute_function("a", lambda: 2)
    assert engine.recompute("a") == 1


@pytest.mark.parametrize("blank", ["", " ", "\n\t", None, 7, b"a", ["a"]])
def test_an_id_that_names_nothing_is_refused_everywhere(engine, blank):
    for use in (
        lambda: engine.register_recompute_function(blank, lambda: 1),
        lambda: engine.register_recompute_function("a", lambda b: 1, [blank]),
        lambda: engine.recompute(blank),
        lambda: engine.recompute_multiple([blank]),
        lambda: engine.run(blank, lambda: 1),
        lambda: engine.has_recompute_function(blank),
    ):
        with pytest.raises(ValueError, match="must be a text that is not blank, not"):
            use()
    assert engine.get_stats().layers == ()


@pytest.mark.parametrize("nothing", [None, 3, "relu", torch.zeros(1)])
def test_what_cannot_be_called_is_refused(engine, nothing):
    with pytest.raises(ValueError, match="fn must be a function that returns the activation"):
        engine.register_recompute_function("a", nothing)
    assert not engine.has_recompute_function("a")


def test_an_async_function_is_refused(engine):
    async def forward():
        return 1

    with pytest.raises(ValueError, match="forward is async"):
        engine.register_recompute_function("a", forward)


@pytest.mark.parametrize(
    ("depends_on", "message"),
    [
        ("abc", r"depends_on must be a list of layer ids, not 'abc': give \['abc'\]"),
        (None, "depends_on must be a list of layer ids, not None"),
        (["b", "c", "b"], "depends_on must name each layer once"),
    ],
)
def test_dependencies_that_make_no_sense_are_refused(engine, depends_on, message):
    with pytest.raises(ValueError, match=message):
        engine.register_recompute_function("a", lambda *_: 1, depends_on)
    assert not engine.has_recompute_function("a")


# Dependencies


def test_a_function_gets_what_it_depends_on_in_that_order(engine):
    registered(engine, a="A", b="B", c=(["b", "a"], lambda *args: args))
    assert engine.recompute("c") == ("B", "A")


def test_a_layer_two_others_need_is_computed_once(engine):
    calls = []
    registered(
        engine,
        top=(["left", "right"], lambda a, b: (a, b)),
        left=(["base"], lambda base: base + 1),
        right=(["base"], lambda base: base + 2),
        base=((), lambda: calls.append("base") or 10),
    )
    assert engine.recompute("top") == (11, 12)
    assert calls == ["base"]
    counts = {layer.layer_id: layer.call_count for layer in engine.get_stats().layers}
    assert counts == {"top": 1, "left": 1, "right": 1, "base": 1}


def test_the_same_subgraph_gives_the_same_bits():
    weight, x = torch.randn(64, 64), torch.randn(8, 64)
    layers = {"h": torch.tanh(x @ weight)}
    layers["y"] = torch.softmax(layers["h"] @ weight, -1) + x
    with RecomputationEngine() as engine:
        engine.register_recompute_function("x", lambda: x)
        engine.register_recompute_function("h", lambda x: torch.tanh(x @ weight), ["x"])
        engine.register_recompute_function(
            "y", lambda h, x: torch.softmax(h @ weight, -1) + x, ["h", "x"]
        )
        found = engine.recompute_multiple(["y", "h"])
    assert torch.equal(found["y"], layers["y"])
    assert torch.equal(found["h"], layers["h"])


def test_a_dependency_that_nobody_registered_is_named_with_who_needs_it(engine):
    calls = []
    registered(
        engine, first=((), lambda: calls.append(1) or 1), last=(["first", "gone"], lambda *_: 1)
    )
    with pytest.raises(UnknownLayerError) as caught:
        engine.recompute("last")
    assert isinstance(caught.value, KeyError)
    assert caught.value.layer_id == "gone"
    assert "'gone', which layer 'last' depends on" in str(caught.value)
    assert calls == []
    registered(engine, gone=2)
    assert engine.recompute("last") == 1


def test_a_cycle_is_refused_when_it_would_be_closed(engine):
    registered(engine, a=(["b"], lambda b: b), b=(["c"], lambda c: c))
    with pytest.raises(DependencyCycleError) as caught:
        engine.register_recompute_function("c", lambda x, a: 1, ["x", "a"])
    assert caught.value.layers == ("c", "a", "b")
    assert caught.value.layer_id == "c"
    assert "'c' depends on 'a', which depends on 'b', which depends on 'c'" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert not engine.has_recompute_function("c")
    registered(engine, c=5)
    assert engine.recompute("a") == 5


def test_a_layer_that_needs_itself_is_refused(engine):
    with pytest.raises(DependencyCycleError, match="'a' depends on itself"):
        engine.register_recompute_function("a", lambda a: a, ["a"])
    assert not engine.has_recompute_function("a")


@pytest.mark.parametrize("step", [1, -1], ids=["forwards", "backwards"])
def test_a_chain_may_be_long(engine, step):
    length = 5_000
    for at in range(1, length)[::step]:
        engine.register_recompute_function(f"{at}", lambda below: below + 1, [f"{at - 1}"])
    engine.register_recompute_function("0", lambda: 0)
    assert engine.recompute(f"{length - 1}") == length - 1


def test_results_nobody_needs_any_more_are_let_go(engine):
    alive = {}

    def layer(name, *needed):
        def fn(*args):
            assert len(args) == len(needed)
            alive[name] = [n for n, ref in refs.items() if ref() is not None]
            result = torch.zeros(3)
            refs[name] = weakref.ref(result)
            return result

        engine.register_recompute_function(name, fn, needed)

    refs = {}
    layer("a")
    layer("b", "a")
    layer("c", "b")
    layer("d", "c", "b")
    layer("e", "d")
    results = engine.recompute_multiple(["e", "c"])
    assert alive["c"] == ["b"]
    assert alive["e"] == ["c", "d"]
    assert list(results) == ["e", "c"]
    assert {name for name, ref in refs.items() if ref() is not None} == {"e", "c"}


# Several layers


def test_several_layers_come_back_in_the_order_asked_and_once(engine):
    calls = []
    registered(
        engine,
        **{
            name: ((), lambda name=name: calls.append(name) or name.upper())
            for name in ("a", "b", "c")
        },
    )
    found = engine.recompute_multiple(each for each in ["c", "a", "c", "b", "a"])
    assert list(found.items()) == [("c", "C"), ("a", "A"), ("b", "B")]
    assert calls == ["c", "a", "b"]


def test_what_was_asked_for_after_what_needs_it_keeps_its_place(engine):
    registered(engine, a=1, b=(["a"], lambda a: a + 1))
    assert list(engine.recompute_multiple(["b", "a"]).items()) == [("b", 2), ("a", 1)]
    assert engine.get_stats().total_recomputations == 2


def test_no_layers_give_no_results(engine):
    assert engine.recompute_multiple([]) == {}


@pytest.mark.parametrize("given", [None, 5, "block"])
def test_what_is_no_list_of_layers_is_refused(engine, given):
    with pytest.raises(ValueError, match=f"layer_ids must be a list of layer ids, not {given!r}"):
        engine.recompute_multiple(given)


def test_an_unknown_layer_stops_the_others_before_they_start(engine):
    calls = []
    registered(engine, a=((), lambda: calls.append(1) or 1))
    with pytest.raises(UnknownLayerError, match="for layer 'nowhere'; nothing was recomputed"):
        engine.recompute_multiple(["a", "nowhere"])
    assert calls == []


# Failures


def test_an_unknown_layer_is_a_key_error_that_reads_well(engine):
    with pytest.raises(KeyError) as caught:
        engine.recompute("block 9")
    assert isinstance(caught.value, UnknownLayerError)
    assert caught.value.layer_id == "block 9"
    assert str(caught.value).startswith("no recompute function is registered for layer 'block 9'")


def test_a_failure_names_the_layer_and_keeps_the_original(engine):
    registered(engine, a=((), fails))
    with pytest.raises(RecomputationError) as caught:
        engine.recompute("a")
    assert caught.value.layer_id == "a"
    assert isinstance(caught.value.__cause__, BrokenError)
    assert caught.value.__cause__.__traceback__ is not None
    assert "layer 'a' failed" in str(caught.value)
    assert "BrokenError: on purpose" in str(caught.value)


def test_the_layer_that_failed_is_named_not_the_one_asked_for(engine):
    registered(engine, a=((), fails), b=(["a"], lambda a: a))
    with pytest.raises(RecomputationError) as caught:
        engine.recompute("b")
    assert caught.value.layer_id == "a"


def test_no_result_is_a_failure(engine):
    registered(engine, a=((), lambda: None))
    with pytest.raises(RecomputationError, match="'a' failed: its function returned None") as error:
        engine.recompute("a")
    assert error.value.layer_id == "a"
    assert error.value.__cause__ is None


@pytest.mark.parametrize("false", [0, False, torch.zeros(()), torch.zeros(0), ()])
def test_a_result_may_be_false_or_empty(engine, false):
    engine.register_recompute_function("a", lambda: false)
    assert engine.recompute("a") is false


def test_after_a_failure_the_engine_works(engine):
    attempts = iter([fails, lambda: "worked"])

    def attempt():
        return next(attempts)()

    registered(engine, a=((), attempt), b="fine")
    with pytest.raises(RecomputationError):
        engine.recompute("a")
    assert engine.recompute("b") == "fine"
    assert engine.recompute("a") == "worked"
    layer = engine.get_stats().layer_stats["a"]
    assert (layer.call_count, layer.failure_count) == (1, 1)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_stops_a_program_is_no_failure(engine, stop):
    def interrupted():
        raise stop

    registered(engine, a=((), interrupted), b=1)
    with pytest.raises(stop):
        engine.recompute("a")
    stats = engine.get_stats()
    assert (stats.total_recomputations, stats.total_failures) == (0, 0)
    assert engine.recompute("b") == 1


def test_a_function_may_call_the_engine(engine):
    registered(
        engine,
        a=2,
        b=((), lambda: engine.recompute("a") * 10),
        c=((), lambda: engine.register_recompute_function("d", lambda: 7) or engine.recompute("d")),
    )
    assert engine.recompute_multiple(["b", "c"]) == {"b": 20, "c": 7}


def test_a_failure_below_a_function_that_calls_the_engine_names_both(engine):
    registered(engine, a=((), fails), b=((), lambda: engine.recompute("a")))
    with pytest.raises(RecomputationError) as caught:
        engine.recompute("b")
    assert caught.value.layer_id == "b"
    assert caught.value.__cause__.layer_id == "a"
    assert isinstance(caught.value.__cause__.__cause__, BrokenError)


def test_an_error_that_names_the_layer_already_is_not_wrapped_again(engine):
    known = RecomputationError("parameter 'weight' was changed", layer_id="a")

    def knows():
        raise known

    registered(engine, a=((), knows))
    with pytest.raises(RecomputationError) as caught:
        engine.recompute("a")
    assert caught.value is known
    assert engine.get_stats().total_failures == 1


def test_a_layer_that_calls_itself_for_ever_ends_with_one_error(engine):
    registered(engine, a=((), lambda: engine.recompute("a")))
    with pytest.raises(RecomputationError) as caught:
        engine.recompute("a")
    assert isinstance(caught.value.__cause__, RecursionError)


# Functions that are not registered


def test_any_function_can_be_run_as_a_layer(engine):
    seen = []
    engine.on_event(seen.append)
    assert engine.run("region", lambda a, b: a + b, 1, 2) == 3
    assert engine.run("region", lambda: "other") == "other"
    with pytest.raises(RecomputationError) as caught:
        engine.run("region", fails)
    assert isinstance(caught.value.__cause__, BrokenError)
    with pytest.raises(RecomputationError, match="returned None"):
        engine.run("region", lambda: None)
    stats = engine.get_stats()
    layer = stats.layer_stats["region"]
    assert (layer.call_count, layer.failure_count) == (2, 2)
    assert stats.registered_layer_count == 0
    assert [event.kind for event in seen] == ["recomputed", "recomputed", "failed", "failed"]
    assert not engine.has_recompute_function("region")


# Stats


def test_a_new_engine_has_counted_nothing(time):
    stats = time.engine().get_stats()
    assert stats.total_recomputations == 0
    assert stats.total_recomputation_time_ms == 0
    assert stats.average_recomputation_time_ms == 0
    assert stats.registered_layer_count == 0
    assert stats.layer_stats == {}
    assert stats.timestamp == NOON


def test_calls_and_times_are_counted_by_layer_and_in_total(time):
    engine = registered(
        time.engine(),
        slow=((), lambda: time.pass_ms(30) or 1),
        quick=((), lambda: time.pass_ms(0.25) or 1),
        never=1,
    )
    for layer in ("slow", "quick", "quick", "slow", "quick"):
        engine.recompute(layer)
    time.pass_ms(1000)
    stats = engine.get_stats()
    slow, quick, never = stats.layers
    assert (slow.layer_id, slow.call_count, slow.total_computation_time_ms) == ("slow", 2, 60.0)
    assert slow.average_computation_time_ms == 30.0
    assert (quick.layer_id, quick.call_count, quick.total_computation_time_ms) == ("quick", 3, 0.75)
    assert quick.average_computation_time_ms == 0.25
    assert (never.layer_id, never.call_count, never.average_computation_time_ms) == ("never", 0, 0)
    assert never.last_called_at is None
    assert slow.last_called_at == NOON + timedelta(milliseconds=60.5)
    assert quick.last_called_at == NOON + timedelta(milliseconds=60.75)
    assert stats.timestamp == NOON + timedelta(milliseconds=1060.75)
    assert stats.total_recomputations == 5
    assert stats.total_recomputation_time_ms == 60.75
    assert stats.average_recomputation_time_ms == 60.75 / 5
    assert stats.registered_layer_count == 3


def test_a_function_too_quick_for_the_clock_is_counted(time):
    engine = registered(time.engine(), a=1)
    engine.recompute("a")
    layer = engine.get_stats().layer_stats["a"]
    assert (layer.call_count, layer.failure_count, layer.last_called_at) == (1, 0, NOON)


def test_a_very_slow_function_is_measured(time):
    engine = registered(time.engine(), a=((), lambda: time.pass_ms(3_600_000) or 1))
    engine.recompute("a")
    assert engine.get_stats().total_recomputation_time_ms == 3_600_000.0


def test_failures_are_counted_apart(time):
    def slow_failure():
        time.pass_ms(50)
        fails()

    engine = registered(time.engine(), a=((), slow_failure))
    with pytest.raises(RecomputationError):
        engine.recompute("a")
    layer = engine.get_stats().layer_stats["a"]
    assert (layer.call_count, layer.failure_count) == (0, 1)
    assert layer.total_computation_time_ms == 0
    assert layer.last_called_at is None


def test_the_real_clocks(engine):
    before = datetime.now(UTC)
    registered(engine, a=((), lambda: torch.randn(200, 200) @ torch.randn(200, 200)))
    engine.recompute("a")
    stats = engine.get_stats()
    assert stats.total_recomputation_time_ms > 0
    slack = timedelta(seconds=1)
    last = stats.layer_stats["a"].last_called_at
    assert before - slack <= last <= stats.timestamp + slack
    assert last.utcoffset() == timedelta(0)


def test_stats_are_values(engine):
    registered(engine, a=1)
    stats = engine.get_stats()
    engine.recompute("a")
    assert stats.total_recomputations == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.timestamp = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.layers[0].call_count = 3
    stats.layer_stats.clear()
    assert list(stats.layer_stats) == ["a"]
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert dataclasses.asdict(stats)["layers"][0]["layer_id"] == "a"


def test_rapid_calls_are_all_counted_and_take_no_memory(engine):
    registered(engine, a=1)
    for _ in range(1000):
        engine.recompute("a")
    tracemalloc.start()
    try:
        for _ in range(30_000):
            engine.recompute("a")
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 500_000
    assert engine.get_stats().total_recomputations == 31_000


def test_a_large_activation_is_handed_over_not_copied(engine):
    large = torch.empty(2**30, dtype=torch.uint8)
    registered(engine, a=large, b=(["a"], lambda a: a))
    with engine.profile() as profile:
        assert engine.recompute("b") is large
    assert [event.size_bytes for event in profile.events] == [2**30, 2**30]


# Events and profiles


def test_subscribers_are_told_of_each_recomputation(time):
    engine = registered(
        time.engine(),
        a=((), lambda: time.pass_ms(2) or torch.zeros(4, 5)),
        b=((), lambda: {"x": torch.zeros(3), "y": [torch.zeros(1, dtype=torch.int64), "text"]}),
        sparse=((), lambda: torch.eye(4).to_sparse()),
        view=((), lambda: [part := torch.zeros(1000)[:10], part[:2]]),
        broken=((), lambda: time.pass_ms(3) or fails()),
    )
    seen = []
    unsubscribe = engine.on_event(seen.append)
    engine.recompute_multiple(["a", "b", "sparse", "view"])
    with pytest.raises(RecomputationError):
        engine.recompute("broken")
    unsubscribe()
    unsubscribe()
    engine.recompute("a")
    assert seen == [
        ActivationEvent(kind="recomputed", layer_id="a", size_bytes=80, elapsed_ms=2.0),
        ActivationEvent(kind="recomputed", layer_id="b", size_bytes=20),
        ActivationEvent(kind="recomputed", layer_id="sparse", size_bytes=80),
        ActivationEvent(kind="recomputed", layer_id="view", size_bytes=4000),
        ActivationEvent(kind="failed", layer_id="broken", elapsed_ms=3.0),
    ]


def test_a_subscriber_that_fails_is_logged_and_ends_nothing(engine, caplog):
    def broken(event):
        raise BrokenError("in the subscriber")

    seen = []
    engine.on_event(broken)
    engine.on_event(seen.append)
    registered(engine, a=1)
    with caplog.at_level(logging.ERROR, "holdfast.activation"):
        assert engine.recompute("a") == 1
    assert len(seen) == 1
    (record,) = caplog.records
    assert record.exc_info[0] is BrokenError


def test_a_callback_added_twice_is_told_twice_until_taken_away(engine):
    seen = []
    add = seen.append
    once, again = engine.on_event(add), engine.on_event(add)
    registered(engine, a=1)
    engine.recompute("a")
    assert len(seen) == 2
    once()
    once()
    engine.recompute("a")
    assert len(seen) == 3
    again()
    engine.recompute("a")
    assert len(seen) == 3


def test_the_end_of_an_object_may_unsubscribe_at_any_point():
    """As the garbage collector ends one: inside whatever its thread is doing."""
    subscribers, seen = Subscribers(), []

    class Watcher:
        def __init__(self):
            self.itself = self
            weakref.finalize(self, subscribers.add(seen.append)).atexit = False

    def work():
        for i in range(500):
            gc.set_threshold(1 + i % 40)  # so that the collector comes at every point in turn
            Watcher()
            subscribers.add(seen.append)()
            subscribers.tell(ActivationEvent(kind="recomputed", layer_id="a"))

    threshold = gc.get_threshold()
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(SOON_S)
    finally:
        gc.set_threshold(*threshold)
    assert not thread.is_alive()
    gc.collect()
    assert not subscribers
    assert len(seen) >= 500


def test_what_cannot_be_told_is_refused(engine):
    with pytest.raises(ValueError, match="callback must be a function of an event"):
        engine.on_event("print")


def test_a_profile_has_what_was_recomputed_in_its_block(time):
    engine = registered(
        time.engine(),
        quick=((), lambda: time.pass_ms(1) or torch.zeros(8)),
        slow=((), lambda: time.pass_ms(20) or torch.zeros(2)),
        broken=((), lambda: time.pass_ms(99) or fails()),
    )
    engine.recompute("slow")
    with engine.profile() as profile:
        engine.recompute_multiple(["quick", "slow"])
        engine.recompute("quick")
        with pytest.raises(RecomputationError):
            engine.recompute("broken")
    engine.recompute("slow")
    assert [(e.layer_id, e.kind, e.elapsed_ms, e.size_bytes) for e in profile.events] == [
        ("quick", "recomputed", 1.0, 32),
        ("slow", "recomputed", 20.0, 8),
        ("quick", "recomputed", 1.0, 32),
        ("broken", "failed", 99.0, 0),
    ]
    assert profile.report().splitlines() == [
        "layer   calls  failed  total ms  mean ms  bytes",
        "slow        1       0    20.000   20.000      8",
        "quick       2       0     2.000    1.000     64",
        "broken      0       1     0.000        -      -",
    ]


def test_a_profile_tells_no_bytes_where_none_are_known(time):
    engine = time.engine()
    with engine.profile() as profile:
        engine.run("region", lambda: 3)
    assert profile.report().splitlines()[1].split() == ["region", "1", "0", *["0.000"] * 2, "-"]


def test_an_empty_profile_has_a_report(engine):
    with engine.profile() as profile:
        pass
    assert profile.events == ()
    assert profile.report() == "layer  calls  failed  total ms  mean ms  bytes"


def test_a_profile_ends_with_its_block_also_by_an_error(engine):
    registered(engine, a=1)
    with pytest.raises(BrokenError), engine.profile() as profile:
        fails()
    engine.recompute("a")
    assert profile.events == ()


# Clearing and closing


def test_clear_forgets_functions_dependencies_and_stats(engine):
    seen = []
    engine.on_event(seen.append)
    registered(engine, a=1, b=(["a"], lambda a: a))
    engine.recompute("b")
    engine.clear()
    assert not engine.has_recompute_function("a")
    assert engine.get_stats().layers == ()
    with pytest.raises(UnknownLayerError):
        engine.recompute("b")
    registered(engine, b=2, a=(["b"], lambda b: b + 1))
    assert engine.recompute("a") == 3
    assert [event.layer_id for event in seen] == ["a", "b", "b", "a"]


@pytest.mark.parametrize("end", [RecomputationEngine.clear, RecomputationEngine.close])
def test_clearing_and_closing_let_go_of_the_functions(end):
    class Function:
        def __call__(self):
            return 1

    engine, fn = RecomputationEngine(), Function()
    engine.register_recompute_function("a", fn)
    engine.recompute("a")
    ref = weakref.ref(fn)
    del fn
    assert ref() is not None
    end(engine)
    assert ref() is None


def test_what_runs_during_clear_ends_and_is_counted_nowhere(engine):
    registered(engine, a=((), lambda: engine.clear() or 5), b=(["a"], lambda a: a + 1))
    assert engine.recompute("b") == 6
    assert engine.get_stats().layers == ()


def test_what_runs_during_close_ends(engine):
    registered(engine, a=((), lambda: engine.close() or 5), b=(["a"], lambda a: a + 1))
    assert engine.recompute("b") == 6
    assert engine.closed


def test_after_close_every_call_is_refused():
    engine = registered(RecomputationEngine(), a=1)
    assert not engine.closed
    with engine as same:
        assert same is engine
    assert engine.closed
    engine.close()
    for use in (
        lambda: engine.register_recompute_function("b", lambda: 1),
        lambda: engine.recompute("a"),
        lambda: engine.recompute_multiple(["a"]),
        lambda: engine.recompute_multiple([]),
        lambda: engine.run("a", lambda: 1),
        lambda: engine.has_recompute_function("a"),
        engine.clear,
        engine.get_stats,
        lambda: engine.on_event(print),
        engine.profile,
        engine.__enter__,
    ):
        with pytest.raises(ClosedError, match="this RecomputationEngine is closed"):
            use()


# Threads


def test_many_threads_register(engine):
    def register(thread):
        taken = 0
        for at in range(100):
            engine.register_recompute_function(f"{thread}/{at}", lambda: thread)
            try:
                engine.register_recompute_function(f"shared {at}", lambda: thread)
            except ValueError:
                taken += 1
        return taken

    taken = run_threads(16, register)
    assert sum(taken) == 15 * 100
    stats = engine.get_stats()
    assert stats.registered_layer_count == 16 * 100 + 100
    assert engine.recompute("7/42") == 7


def test_a_cycle_two_threads_race_to_close_is_refused_to_one(engine):
    for round_ in range(200):
        ids = [f"{round_} a", f"{round_} b"]

        def register(thread, ids=ids):
            try:
                engine.register_recompute_function(
                    ids[thread], lambda other: other, [ids[1 - thread]]
                )
            except DependencyCycleError:
                return "refused"
            return "registered"

        assert sorted(run_threads(2, register)) == ["refused", "registered"]


def test_many_threads_recompute(engine):
    registered(
        engine,
        base=((), lambda: torch.ones(8)),
        top=(["base"], lambda base: base + 1),
        broken=((), fails),
    )

    def recompute(thread):
        for _ in range(200):
            assert torch.equal(engine.recompute("top"), torch.full((8,), 2.0))
            with pytest.raises(RecomputationError):
                engine.recompute("broken")
            engine.recompute("base")

    run_threads(8, recompute)
    layers = engine.get_stats().layer_stats
    assert layers["top"].call_count == 8 * 200
    assert layers["base"].call_count == 2 * 8 * 200
    assert layers["broken"].failure_count == 8 * 200


def test_stats_are_of_one_moment_while_many_threads_recompute():
    """Each thread recomputes its first layer, then its second: so whenever one looks, the first is
    ahead by one at most. And by its clock every recomputation takes a microsecond."""
    engine = RecomputationEngine(clock_ns=ThreadClock())
    writers, lookers, looks = 4, 2, 150
    for thread in range(writers):
        registered(engine, **{f"first{thread}": 1, f"second{thread}": 1})
    finished = itertools.count(1)
    seen_enough = threading.Event()

    def write(thread):
        rounds = 0
        while not seen_enough.is_set():
            engine.recompute(f"first{thread}")
            engine.recompute(f"second{thread}")
            rounds += 1
        return rounds

    def look():
        before = engine.get_stats()
        for _ in range(looks):
            before = require_one_moment(engine.get_stats(), before, writers)

    def work(thread):
        if thread < writers:
            return write(thread)
        try:
            look()
        finally:
            if next(finished) == lookers:
                seen_enough.set()
        return 0

    rounds = run_threads(writers + lookers, work)
    layers = engine.get_stats().layer_stats
    for thread in range(writers):
        assert layers[f"first{thread}"].call_count == rounds[thread]
        assert layers[f"second{thread}"].call_count == rounds[thread]


def require_one_moment(stats, before, writers):
    layers = stats.layer_stats
    for thread in range(writers):
        ahead = layers[f"first{thread}"].call_count - layers[f"second{thread}"].call_count
        assert ahead in {0, 1}
    for layer, earlier in zip(stats.layers, before.layers, strict=True):
        assert layer.total_computation_time_ms == pytest.approx(layer.call_count / 1000)
        assert layer.call_count >= earlier.call_count
    assert stats.total_recomputations == sum(layer.call_count for layer in stats.layers)
    return stats


def test_a_function_runs_outside_any_lock(engine):
    inside, leave = threading.Event(), threading.Event()

    def held():
        inside.set()
        assert leave.wait(SOON_S)
        return "held"

    registered(engine, held=((), held), needs_held=(["held"], lambda held: held), other=1)
    with ThreadPoolExecutor(2) as pool:
        try:
            running = pool.submit(engine.recompute, "needs_held")
            assert inside.wait(SOON_S)
            assert engine.recompute("other") == 1
            engine.register_recompute_function("new", lambda other: other, ["other"])
            assert engine.recompute("new") == 1
            assert engine.get_stats().total_recomputations == 3
            assert not running.done()
        finally:
            leave.set()
        assert running.result(SOON_S) == "held"


def test_functions_run_side_by_side(engine):
    """Each waits in the middle for the other: one at a time would never end."""
    meet = threading.Barrier(4)
    registered(engine, a=((), lambda: meet.wait(SOON_S) + 1))
    assert sorted(run_threads(4, lambda _: engine.recompute("a"))) == [1, 2, 3, 4]


def test_clearing_and_registering_while_others_recompute(engine):
    """Nobody ever calls a function without what it depends on, or with somebody else's."""
    stop = threading.Event()

    def register():
        for generation in itertools.count():
            registered(
                engine,
                base=((), lambda generation=generation: generation),
                top=(["base"], lambda base, generation=generation: (base, generation)),
            )
            if stop.is_set():
                return
            engine.clear()

    def recompute():
        found = 0
        while found < 100:
            try:
                base, generation = engine.recompute("top")
            except UnknownLayerError:
                continue
            assert base == generation
            found += 1

    def work(thread):
        if thread == 0:
            register()
            return
        try:
            recompute()
        finally:
            if next(finished) == 3:
                stop.set()

    finished = itertools.count(1)
    run_threads(4, work)
