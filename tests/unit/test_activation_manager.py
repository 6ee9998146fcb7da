"""The checkpoint manager: what is registered is there, what is missing is computed once, and the
numbers are right."""

import concurrent.futures
import contextlib
import gc
import logging
import os
import threading
import weakref

import pytest
import torch

from holdfast.activation._keeping.cache import RecomputationCache
from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._recomputing.engine import RecomputationEngine
from holdfast.errors import CheckpointNotFoundError, ClosedError, CorruptedError, RecomputationError

WAIT_S = 60
MIB = 1024 * 1024


@pytest.fixture
def manager():
    with CheckpointManager() as manager:
        yield manager


@pytest.fixture(params=["inplace", "disk"])
def any_manager(request, tmp_path):
    folder = tmp_path if request.param == "disk" else None
    with CheckpointManager(request.param, folder=folder) as manager:
        yield manager


def all_at_once(count, function):
    """What ``function(i)`` returned or raised in each of so many threads that start together."""
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait(WAIT_S)
        return function(i)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, i) for i in range(count)]
        return [future.exception() or future.result() for future in futures]


def used(manager):
    return manager.get_memory_stats().current_memory_used


# Registering


def test_what_is_registered_is_there(any_manager):
    activation = torch.randn(300, 300)
    any_manager.register_checkpoint("layer", activation)
    assert any_manager.has_checkpoint("layer")
    assert not any_manager.has_checkpoint("other")
    assert any_manager.checkpoint_count == 1
    for _ in range(2):
        found = any_manager.retrieve_or_recompute("layer")
        assert torch.equal(found, activation)


def test_an_id_is_registered_once_and_the_first_stays(any_manager):
    first = torch.ones(200, 200)
    any_manager.register_checkpoint("layer", first)
    with pytest.raises(ValueError, match="'layer' is registered already"):
        any_manager.register_checkpoint("layer", torch.zeros(200, 200))
    assert torch.equal(any_manager.retrieve_or_recompute("layer"), first)
    assert any_manager.get_memory_stats().checkpoint_count == 1


@pytest.mark.parametrize("layer_id", ["", "  ", None, 3, ["layer"]])
def test_what_can_be_no_id_is_refused(manager, layer_id):
    calls = [
        lambda: manager.register_checkpoint(layer_id, torch.ones(1)),
        lambda: manager.retrieve_or_recompute(layer_id, lambda: torch.ones(1)),
        lambda: manager.has_checkpoint(layer_id),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="layer_id must be a text"):
            call()
    assert manager.checkpoint_count == 0


@pytest.mark.parametrize("activation", [None, 3.0, [torch.ones(1)], "tensor"])
def test_what_is_no_tensor_is_refused(manager, activation):
    with pytest.raises(ValueError, match="activation must be a Tensor"):
        manager.register_checkpoint("layer", activation)
    with pytest.raises(ValueError, match="tensor must be a Tensor"):
        manager.hold(activation)
    assert manager.checkpoint_count == 0


@pytest.mark.parametrize(
    ("argument", "value"), [("engine", object()), ("cache", {}), ("tier", "ssd")]
)
def test_impossible_parts_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be"):
        CheckpointManager(**{argument: value})


def test_what_is_kept_does_not_keep_the_graph(manager):
    weight = torch.ones(10, requires_grad=True)
    between = weight * 2
    graph = weakref.ref(between)
    manager.register_checkpoint("layer", between.exp())
    del between
    assert graph() is None
    assert not manager.retrieve_or_recompute("layer").requires_grad


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: torch.tensor(1.0), 4),
        (lambda: torch.empty(0, 5), 0),
        (lambda: torch.ones(7, dtype=torch.float64), 56),
        (lambda: torch.ones(2, 3, 4, 5), 480),
        (lambda: torch.ones(3, 5, dtype=torch.bfloat16), 30),
        (lambda: torch.ones(9, dtype=torch.bool), 9),
        (lambda: torch.ones(4, dtype=torch.complex128), 64),
        (lambda: torch.ones(1, 4).expand(100, 4), 16),
        (lambda: torch.ones(10, 10)[3], 400),  # all of the storage that it keeps
        (lambda: torch.eye(4).to_sparse(), 4 * (2 * 8 + 4)),
    ],
)
def test_a_size_is_that_of_the_memory_behind_it(manager, make, size):
    manager.register_checkpoint("layer", make())
    stats = manager.get_memory_stats()
    assert stats.current_memory_used == stats.peak_memory_used == size
    assert stats.average_memory_per_checkpoint == size


def test_views_of_one_storage_count_once(any_manager):
    whole = torch.ones(1024, 256)
    for i, view in enumerate([whole, whole.t(), whole[1:], whole.view(-1)]):
        any_manager.register_checkpoint(f"layer {i}", view)
    stats = any_manager.get_memory_stats()
    assert stats.peak_memory_used == whole.nbytes
    assert stats.average_memory_per_checkpoint == whole.nbytes // 4


def test_many_threads_register(any_manager):
    def register(i):
        for j in range(50):
            any_manager.register_checkpoint(f"{i}/{j}", torch.full((100,), i * 50 + j))

    assert all_at_once(8, register) == [None] * 8
    stats = any_manager.get_memory_stats()
    assert stats.checkpoint_count == any_manager.checkpoint_count == 400
    assert stats.current_memory_used == 400 * 800
    for i in range(8):
        for j in range(50):
            assert any_manager.retrieve_or_recompute(f"{i}/{j}")[0] == i * 50 + j


def test_of_many_threads_that_register_one_id_one_does(manager):
    outcomes = all_at_once(16, lambda i: manager.register_checkpoint("layer", torch.full((10,), i)))
    assert outcomes.count(None) == 1
    assert sum(isinstance(outcome, ValueError) for outcome in outcomes) == 15
    assert manager.retrieve_or_recompute("layer")[0] == outcomes.index(None)
    assert used(manager) == 80


# Retrieving


def test_what_is_missing_is_recomputed_and_then_registered(any_manager):
    calls = []

    def recompute():
        calls.append(1)
        return torch.arange(100_000)

    for _ in range(3):
        found = any_manager.retrieve_or_recompute("layer", recompute)
        assert torch.equal(found, torch.arange(100_000))
    assert calls == [1]
    assert any_manager.has_checkpoint("layer")
    assert any_manager.engine.get_stats().total_recomputations == 1


def test_what_was_recomputed_does_not_keep_the_graph_either(manager):
    weight = torch.ones(10, requires_grad=True)
    first = manager.retrieve_or_recompute("layer", lambda: weight * 2)
    assert not first.requires_grad
    assert torch.equal(manager.retrieve_or_recompute("layer"), first)


def test_what_is_missing_and_cannot_be_computed_is_a_key_error(any_manager):
    with pytest.raises(CheckpointNotFoundError, match="'layer' is not kept") as caught:
        any_manager.retrieve_or_recompute("layer")
    assert isinstance(caught.value, KeyError)
    assert any_manager.checkpoint_count == 0


def test_the_engine_is_asked_if_no_function_is_given():
    with RecomputationEngine() as engine, CheckpointManager(engine=engine) as manager:
        engine.register_recompute_function("a", lambda: torch.ones(3))
        engine.register_recompute_function("b", lambda a: a * 2, depends_on=["a"])
        assert manager.engine is engine
        assert manager.retrieve_or_recompute("b").tolist() == [2, 2, 2]
        assert manager.has_checkpoint("b")
        assert not manager.has_checkpoint("a")
        given = manager.retrieve_or_recompute("a", lambda: torch.zeros(3))
        assert given.tolist() == [0, 0, 0]  # a function that is given goes first


def test_what_is_registered_goes_before_every_function(manager):
    manager.register_checkpoint("layer", torch.ones(3))
    manager.engine.register_recompute_function("layer", lambda: torch.zeros(3))
    found = manager.retrieve_or_recompute("layer", lambda: torch.zeros(3))
    assert found.tolist() == [1, 1, 1]


def test_a_function_that_is_none_is_refused(manager):
    with pytest.raises(ValueError, match="recompute must be a function"):
        manager.retrieve_or_recompute("layer", torch.ones(3))


@pytest.mark.parametrize(
    ("recompute", "told"),
    [
        (lambda: None, "returned None"),
        (lambda: 1 / 0, "division by zero"),
        (lambda: [torch.ones(1)], "list instead of a tensor"),
    ],
)
def test_a_recomputation_that_fails_names_the_layer_and_changes_nothing(manager, recompute, told):
    with pytest.raises(RecomputationError, match=told) as caught:
        manager.retrieve_or_recompute("layer", recompute)
    assert caught.value.layer_id == "layer"
    assert not manager.has_checkpoint("layer")
    assert manager.retrieve_or_recompute("layer", lambda: torch.ones(1)).item() == 1


def test_accesses_are_counted_exactly_by_many_threads(manager):
    for i in range(8):
        manager.register_checkpoint(f"layer {i}", torch.ones(1))

    def retrieve(i):
        for _ in range(2000):
            manager.retrieve_or_recompute(f"layer {i % 4}")
            manager.retrieve_or_recompute("layer 5")

    all_at_once(8, retrieve)
    for _ in range(2):  # looking does not count
        stats = manager.get_memory_stats()
        assert stats.most_accessed[0] == ("layer 5", 16_000)
        assert stats.most_accessed[1:] == tuple((f"layer {i}", 4000) for i in range(4))
        assert {count for _, count in stats.least_accessed[:3]} == {0}
        assert [count for _, count in stats.least_accessed[3:]] == [4000, 4000]


def test_many_threads_retrieve_while_others_register_and_clear(any_manager):
    expected = {f"layer {i}": torch.full((30_000,), i) for i in range(6)}

    def work(i):
        for j in range(60):
            layer_id = f"layer {(i + j) % 6}"
            found = any_manager.retrieve_or_recompute(layer_id, expected[layer_id].clone)
            assert torch.equal(found, expected[layer_id])
            if i == 0 and j % 20 == 19:
                any_manager.clear_checkpoints()

    assert all_at_once(6, work) == [None] * 6


# One computation for all who ask


def test_threads_that_ask_for_one_missing_layer_compute_it_once(any_manager):
    calls = []

    def recompute():
        calls.append(threading.get_ident())
        assert asking.wait(WAIT_S)
        return torch.arange(50_000)

    asking = threading.Event()
    arrived = threading.Semaphore(0)

    def ask(_):
        arrived.release()
        return any_manager.retrieve_or_recompute("layer", recompute)

    def open_the_gate():
        for _ in range(12):
            assert arrived.acquire(timeout=WAIT_S)
        asking.set()

    opener = threading.Thread(target=open_the_gate)
    opener.start()
    outcomes = all_at_once(12, ask)
    opener.join()
    assert len(calls) == 1
    assert all(torch.equal(outcome, torch.arange(50_000)) for outcome in outcomes)
    assert any_manager.get_memory_stats().most_accessed == (("layer", 11),)


def wait_until_all_wait(manager, layer_id, count):
    """Until so many threads wait for a computation under way."""
    flights = manager._recovery._flights
    while len(flights._waiting) < count:
        os.sched_yield()
    assert layer_id in flights._flights


def test_those_who_wait_get_the_same_error_and_the_next_tries_again(manager):
    calls = []

    def recompute():
        calls.append(1)
        wait_until_all_wait(manager, "layer", 5)
        raise OSError("the data is gone")

    outcomes = all_at_once(6, lambda _: manager.retrieve_or_recompute("layer", recompute))
    assert len(calls) == 1
    assert {type(outcome) for outcome in outcomes} == {RecomputationError}
    assert len({id(outcome.__cause__) for outcome in outcomes}) == 1
    assert manager.retrieve_or_recompute("layer", lambda: torch.ones(1)).item() == 1


def test_an_interrupt_of_the_one_that_computes_is_not_the_others(manager):
    calls = []

    def recompute():
        calls.append(1)
        if len(calls) == 1:
            wait_until_all_wait(manager, "layer", 3)
            raise KeyboardInterrupt
        return torch.ones(1)

    def ask(_):
        try:
            return manager.retrieve_or_recompute("layer", recompute).item()
        except KeyboardInterrupt:
            return "interrupted"

    assert sorted(map(str, all_at_once(4, ask))) == ["1.0", "1.0", "1.0", "interrupted"]
    assert len(calls) == 2


def test_who_cannot_compute_shares_what_others_do(manager):
    def recompute():
        wait_until_all_wait(manager, "layer", 1)
        return torch.ones(1)

    def ask(i):
        if i:
            while "layer" not in manager._recovery._flights._flights:
                os.sched_yield()
        return manager.retrieve_or_recompute("layer", None if i else recompute).item()

    assert all_at_once(2, ask) == [1, 1]


def test_a_recomputation_may_ask_for_other_layers(manager):
    def third():
        return manager.retrieve_or_recompute("second", second) + 1

    def second():
        return manager.retrieve_or_recompute("first", lambda: torch.ones(1)) + 1

    assert manager.retrieve_or_recompute("third", third).item() == 3
    assert manager.checkpoint_count == 3


def test_a_recomputation_that_asks_for_itself_is_an_error(manager):
    def recompute():
        return manager.retrieve_or_recompute("layer", recompute)

    with pytest.raises(RecomputationError, match="asks for layer 'layer' itself") as caught:
        manager.retrieve_or_recompute("layer", recompute)
    assert caught.value.layer_id == "layer"
    assert manager.retrieve_or_recompute("layer", lambda: torch.ones(1)).item() == 1


def test_two_threads_whose_recomputations_ask_for_each_other_do_not_wait_for_ever(manager):
    both = threading.Barrier(2)

    def recompute(other):
        def run():
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(WAIT_S)
            return manager.retrieve_or_recompute(other, recompute(other)) + 1

        return run

    layers = ["a", "b"]
    outcomes = all_at_once(
        2, lambda i: manager.retrieve_or_recompute(layers[i], recompute(layers[1 - i]))
    )
    assert {type(outcome) for outcome in outcomes} == {RecomputationError}
    assert any("itself" in str(outcome) for outcome in outcomes)


def test_an_error_leaves_no_garbage(manager):
    gc.collect()
    gc.disable()
    try:
        tensor = torch.ones(1000)
        storage = weakref.ref(tensor.untyped_storage())

        def recompute(kept=tensor):
            raise OSError(f"{kept.sum()}")

        del tensor
        with contextlib.suppress(RecomputationError):
            manager.retrieve_or_recompute("layer", recompute)
        del recompute
        assert storage() is None
    finally:
        gc.enable()


# With a cache


def test_with_a_cache_what_is_recomputed_is_cached_not_registered():
    calls = []

    def recompute():
        calls.append(1)
        return torch.ones(100)

    with RecomputationCache(1000) as cache, CheckpointManager(cache=cache) as manager:
        for _ in range(3):
            assert manager.retrieve_or_recompute("layer", recompute).sum() == 100
        assert calls == [1]
        assert "layer" in cache
        assert not manager.has_checkpoint("layer")
        assert cache.get_stats().cache_hits == 2
        stats = manager.get_memory_stats()
        assert stats.checkpoint_count == stats.current_memory_used == 0
        assert stats.most_accessed == (("layer", 2),)


def test_what_the_cache_did_not_keep_is_saved_memory_and_computed_again():
    calls = []

    def recompute(layer_id, size):
        def run():
            calls.append(layer_id)
            return torch.ones(size)

        return run

    with RecomputationCache(1000) as cache, CheckpointManager(cache=cache) as manager:
        for layer_id, size in [("a", 200), ("b", 200), ("huge", 1000), ("a", 200)]:
            manager.retrieve_or_recompute(layer_id, recompute(layer_id, size))
        assert calls == ["a", "b", "huge", "a"]
        assert manager.get_memory_stats().memory_savings == 4 * (200 + 1000)


def test_what_is_cached_and_was_changed_is_computed_again():
    calls = []

    def recompute():
        calls.append(1)
        return torch.ones(100)

    with RecomputationCache(1000) as cache, CheckpointManager(cache=cache) as manager:
        changed = manager.retrieve_or_recompute("layer", recompute).mul_(5)
        assert manager.get_memory_stats().memory_savings == 400  # what is cached is another's
        assert manager.retrieve_or_recompute("layer", recompute).sum() == 100
        assert manager.retrieve_or_recompute("layer", recompute).sum() == 100
        assert changed.sum() == 500
        assert len(calls) == 2


def test_a_cache_that_was_closed_counts_as_empty_and_is_not_written_to():
    cache = RecomputationCache(1000)
    with CheckpointManager(cache=cache) as manager:
        manager.register_checkpoint("kept", torch.ones(10))
        manager.retrieve_or_recompute("layer", lambda: torch.ones(3))
        cache.close()
        stats = manager.get_memory_stats()
        assert (stats.checkpoint_count, stats.memory_savings) == (1, 12)
        assert manager.retrieve_or_recompute("kept").sum() == 10
        with pytest.raises(ClosedError, match="RecomputationCache is closed"):
            manager.retrieve_or_recompute("layer", lambda: torch.ones(3))
        manager.clear_checkpoints()
        assert manager.get_memory_stats().checkpoint_count == 0


def test_clearing_empties_the_cache_too():
    with RecomputationCache(1000) as cache, CheckpointManager(cache=cache) as manager:
        manager.retrieve_or_recompute("layer", lambda: torch.ones(10))
        manager.clear_checkpoints()
        assert "layer" not in cache
        assert manager.get_memory_stats().memory_savings == 0


def test_what_was_given_is_not_closed_with_the_manager():
    with RecomputationEngine() as engine, RecomputationCache(100) as cache:
        CheckpointManager(engine=engine, cache=cache).close()
        assert not engine.closed
        assert cache.get("layer") is None
    with CheckpointManager() as manager:
        engine = manager.engine
    assert engine.closed


# Clearing


def test_clearing_frees_the_memory_and_keeps_the_peak(any_manager):
    gc.collect()
    gc.disable()
    try:
        storages = []
        for i in range(5):
            activation = torch.ones(100_000)
            storages.append(weakref.ref(activation.untyped_storage()))
            any_manager.register_checkpoint(f"layer {i}", activation)
        small = torch.ones(10)
        storages.append(weakref.ref(small.untyped_storage()))
        any_manager.register_checkpoint("small", small)
        del activation, small
        before = any_manager.get_memory_stats()
        any_manager.clear_checkpoints()
        stats = any_manager.get_memory_stats()
        if any_manager.moves:  # the writer may be about to let go of the last one
            any_manager.close()
        else:
            assert (stats.current_memory_used, stats.moved_bytes) == (0, 0)
        assert [ref() for ref in storages] == [None] * 6
    finally:
        gc.enable()
    # A tier that moves may have let go of each before the next came.
    assert before.peak_memory_used >= (400_000 if any_manager.moves else 2_000_040)
    assert stats.peak_memory_used == before.peak_memory_used
    assert (stats.checkpoint_count, stats.average_memory_per_checkpoint) == (0, 0)
    assert stats.most_accessed == stats.least_accessed == ()


def test_after_clearing_ids_are_free_again(any_manager):
    any_manager.register_checkpoint("layer", torch.ones(50_000))
    any_manager.clear_checkpoints()
    assert not any_manager.has_checkpoint("layer")
    any_manager.register_checkpoint("layer", torch.zeros(50_000))
    assert any_manager.retrieve_or_recompute("layer").sum() == 0


def test_what_is_computed_while_all_is_cleared_is_not_kept(manager):
    def recompute():
        manager.clear_checkpoints()
        return torch.ones(10)

    assert manager.retrieve_or_recompute("layer", recompute).sum() == 10
    assert not manager.has_checkpoint("layer")
    assert used(manager) == 0


# Numbers


def test_an_empty_manager(any_manager):
    stats = any_manager.get_memory_stats()
    assert stats.current_memory_used == stats.peak_memory_used == stats.checkpoint_count == 0
    assert stats.average_memory_per_checkpoint == stats.memory_savings == stats.moved_bytes == 0
    assert stats.most_accessed == stats.least_accessed == ()
    any_manager.clear_checkpoints()
    any_manager.reset_peak()
    with pytest.raises(AttributeError):
        stats.checkpoint_count = 3


def test_current_peak_and_average(manager):
    manager.register_checkpoint("a", torch.ones(100))
    held = manager.hold(torch.ones(300))
    manager.register_checkpoint("b", torch.ones(50))
    stats = manager.get_memory_stats()
    assert stats.current_memory_used == stats.peak_memory_used == 4 * 450
    assert stats.average_memory_per_checkpoint == 300
    assert held.size_bytes == 1200
    del held
    stats = manager.get_memory_stats()
    assert (stats.current_memory_used, stats.peak_memory_used) == (600, 1800)
    manager.reset_peak()
    assert manager.get_memory_stats().peak_memory_used == 600


def test_ten_thousand_layers(manager):
    for i in range(10_000):
        manager.register_checkpoint(f"layer {i}", torch.full((4,), i))
    assert all(manager.retrieve_or_recompute(f"layer {i}")[0] == i for i in range(10_000))
    stats = manager.get_memory_stats()
    assert stats.checkpoint_count == 10_000
    assert stats.current_memory_used == 320_000
    assert len(stats.most_accessed) == len(stats.least_accessed) == 5


def test_what_was_moved_is_saved_memory(tmp_path):
    moved = threading.Semaphore(0)
    with CheckpointManager("disk", folder=tmp_path) as manager:
        manager.on_event(lambda event: event.kind == "moved" and moved.release())
        for i in range(3):
            manager.register_checkpoint(f"layer {i}", torch.ones(MIB))
        for _ in range(3):
            assert moved.acquire(timeout=WAIT_S)
        stats = manager.get_memory_stats()
        assert stats.moved_bytes == stats.memory_savings == 12 * MIB
        assert stats.current_memory_used == 0
        assert stats.average_memory_per_checkpoint == 4 * MIB
        assert manager.moves


class Region:
    """Drops activations, as a checkpointed call does."""

    name = "block"
    forward_ms = 2.5

    def __init__(self, size):
        self._size = size

    def dropped_bytes(self):
        return self._size


def test_regions_count_while_they_live(manager):
    gc.disable()
    try:
        regions = [Region(100), Region(20)]
        for region in regions:
            manager.watch(region)
        del region
        assert manager.get_memory_stats().memory_savings == 120
        regions.pop()
        assert manager.get_memory_stats().memory_savings == 100
        regions.clear()
        assert manager.get_memory_stats().memory_savings == 0
        for _ in range(1000):
            manager.watch(Region(1))
        assert manager.get_memory_stats().memory_savings == 0
        assert manager._regions._regions == {}
    finally:
        gc.enable()


# Events


def test_every_event_is_told(manager):
    told = []
    unsubscribe = manager.on_event(told.append)
    manager.register_checkpoint("a", torch.ones(10))
    manager.retrieve_or_recompute("a")
    manager.retrieve_or_recompute("b", lambda: torch.ones(20))
    region = Region(7)
    manager.watch(region)
    manager.clear_checkpoints()
    assert [(event.kind, event.layer_id, event.size_bytes) for event in told] == [
        ("registered", "a", 40),
        ("retrieved", "a", 40),
        ("recomputed", "b", 80),
        ("region", "block", 7),
        ("cleared", "", 120),
    ]
    assert told[2].elapsed_ms > 0
    assert told[3].elapsed_ms == 2.5
    unsubscribe()
    unsubscribe()
    manager.register_checkpoint("c", torch.ones(10))
    assert len(told) == 5


def test_manager_and_engine_tell_one_size_of_one_recomputation(manager):
    told = []
    manager.on_event(lambda event: told.append(("manager", event.kind, event.size_bytes)))
    manager.engine.on_event(lambda event: told.append(("engine", event.kind, event.size_bytes)))
    manager.retrieve_or_recompute("layer", lambda: torch.ones(1000)[:10])
    assert told == [("engine", "recomputed", 4000), ("manager", "recomputed", 4000)]


def test_a_subscriber_that_fails_is_logged_and_nothing_else(manager, caplog):
    told = []

    def fail(event):
        raise OSError("no dashboard")

    manager.on_event(fail)
    manager.on_event(told.append)
    manager.register_checkpoint("a", torch.ones(10))
    assert len(told) == 1
    assert manager.checkpoint_count == 1
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_events_of_moving(tmp_path):
    told = []
    moved = threading.Event()
    with CheckpointManager("disk", folder=tmp_path) as manager:
        manager.on_event(lambda event: (told.append(event), event.kind == "moved" and moved.set()))
        manager.register_checkpoint("a", torch.ones(100_000))
        assert moved.wait(WAIT_S)
        assert manager.retrieve_or_recompute("a").sum() == 100_000
    assert [(event.kind, event.layer_id, event.size_bytes) for event in told] == [
        ("registered", "a", 400_000),
        ("moved", "a", 400_000),
        ("retrieved", "a", 400_000),
    ] or [event.kind for event in told] == ["moved", "registered", "retrieved"]


# What was lost


def corrupt(manager):
    """Change every byte that a manager has on the disk."""
    fd = manager._tier._store._file._fd
    size = os.fstat(fd).st_size
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:  # noqa: PTH123
        content = file.read(size)
        file.seek(0)
        file.write(bytes(byte ^ 255 for byte in content))
        os.fsync(file.fileno())


def test_what_cannot_be_read_back_is_recomputed_if_it_can_be(tmp_path):
    moved = threading.Semaphore(0)
    with CheckpointManager("disk", folder=tmp_path) as manager:
        manager.on_event(lambda event: event.kind == "moved" and moved.release())
        manager.register_checkpoint("layer", torch.ones(50_000))
        assert moved.acquire(timeout=WAIT_S)
        corrupt(manager)
        with pytest.raises(RecomputationError, match="'layer' cannot be read back") as caught:
            manager.retrieve_or_recompute("layer")
        assert isinstance(caught.value.__cause__, CorruptedError)
        assert manager.has_checkpoint("layer")
        found = manager.retrieve_or_recompute("layer", lambda: torch.ones(50_000))
        assert found.sum() == 50_000
        assert moved.acquire(timeout=WAIT_S)
        assert manager.retrieve_or_recompute("layer").sum() == 50_000
        assert manager.checkpoint_count == 1


def test_what_was_changed_is_not_recomputed_behind_the_users_back(manager):
    activation = torch.ones(10)
    manager.register_checkpoint("layer", activation)
    activation.add_(1)
    with pytest.raises(RecomputationError, match="'layer' was modified in place"):
        manager.retrieve_or_recompute("layer", lambda: torch.ones(10))


# The end


def test_after_closing_every_call_says_so(any_manager):
    any_manager.register_checkpoint("layer", torch.ones(50_000))
    held = any_manager.hold(torch.ones(50_000))
    small = any_manager.hold(torch.ones(5))
    any_manager.close()
    any_manager.close()
    calls = [
        lambda: any_manager.register_checkpoint("other", torch.ones(1)),
        lambda: any_manager.retrieve_or_recompute("layer"),
        lambda: any_manager.retrieve_or_recompute("layer", lambda: torch.ones(1)),
        lambda: any_manager.has_checkpoint("layer"),
        any_manager.clear_checkpoints,
        lambda: any_manager.checkpoint_count,
        any_manager.get_memory_stats,
        any_manager.reset_peak,
        lambda: any_manager.on_event(print),
        lambda: any_manager.hold(torch.ones(1)),
        lambda: any_manager.watch(Region(1)),
        any_manager.__enter__,
        held.get,
        small.get,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="CheckpointManager is closed"):
            call()


def test_closing_frees_the_memory(manager):
    activation = torch.ones(10)
    storage = weakref.ref(activation.untyped_storage())
    manager.register_checkpoint("layer", activation)
    del activation
    manager.close()
    assert storage() is None


def test_what_is_computed_while_the_manager_is_closed_is_given_to_who_asked(manager):
    def recompute():
        manager.close()
        return torch.ones(10)

    assert manager.retrieve_or_recompute("layer", recompute).sum() == 10
