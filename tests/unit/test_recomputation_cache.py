"""The cache of recomputed activations: what it keeps, what it drops first, and that its bytes are
the memory it really holds."""

import concurrent.futures
import gc
import itertools
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.activation._keeping.cache import RecomputationCache
from holdfast.errors import ClosedError, RecomputationError

KIB = 1024


def of_bytes(size_bytes):
    return torch.zeros(size_bytes, dtype=torch.uint8)


def names_in(cache, names):
    return {name for name in names if cache.contains(name)}


def size(cache):
    return cache.get_stats().current_size_bytes


def test_what_is_added_is_what_comes_back():
    cache = RecomputationCache(KIB)
    tensor = torch.randn(4, 4)
    assert cache.add("a", tensor) is True
    assert cache.get("a") is tensor
    assert cache.get("b") is None
    assert cache.contains("a")
    assert "a" in cache
    assert not cache.contains("b")


def test_hits_and_misses_are_counted_and_looking_is_neither():
    cache = RecomputationCache(KIB)
    assert cache.get_stats().hit_rate == 0.0
    cache.add("a", of_bytes(10))
    for name in ("a", "a", "a", "b"):
        cache.get(name)
    cache.contains("a")
    cache.contains("b")
    stats = cache.get_stats()
    assert (stats.cache_hits, stats.cache_misses) == (3, 1)
    assert stats.hit_rate == 0.75
    assert (stats.cached_items_count, stats.current_size_bytes) == (1, 10)
    assert stats.max_size_bytes == KIB


def test_the_least_recently_used_goes_first():
    cache = RecomputationCache(300)
    for name in "abc":
        cache.add(name, of_bytes(100))
    cache.get("a")
    cache.contains("b")
    cache.add("d", of_bytes(100))
    assert names_in(cache, "abcd") == {"a", "c", "d"}
    assert cache.get_stats().evictions == 1
    cache.add("e", of_bytes(200))
    assert names_in(cache, "abcde") == {"d", "e"}
    assert cache.get_stats().evictions == 3
    assert size(cache) == 300


def test_the_least_frequently_used_goes_first_and_of_those_the_oldest():
    cache = RecomputationCache(300, "lfu")
    for name in "abc":
        cache.add(name, of_bytes(100))
    for name in "aaabbccb":
        cache.get(name)
    cache.add("d", of_bytes(100))
    assert names_in(cache, "abcd") == {"a", "b", "d"}
    cache.get("d")
    cache.get("d")
    cache.get("d")
    cache.add("e", of_bytes(100))
    assert names_in(cache, "abcde") == {"b", "d", "e"}, "a and b were used as often; b later"


def test_what_was_evicted_or_replaced_starts_with_no_uses():
    cache = RecomputationCache(200, "lfu")
    cache.add("a", of_bytes(100))
    for _ in range(9):
        cache.get("a")
    cache.add("a", of_bytes(100))
    cache.add("b", of_bytes(100))
    cache.get("b")
    cache.add("c", of_bytes(100))
    assert names_in(cache, "abc") == {"b", "c"}


class NaiveOrder:
    """Recency and frequency by looking at everything, to compare with."""

    def __init__(self, kind):
        self.kind = kind
        self.uses = {}
        self.clock = itertools.count()

    def added(self, key, size_bytes):
        self.uses[key] = (0, next(self.clock))

    def used(self, key):
        self.uses[key] = (self.uses[key][0] + 1, next(self.clock))

    def removed(self, key):
        del self.uses[key]

    def victim(self):
        by = (lambda k: self.uses[k][1]) if self.kind == "lru" else (lambda k: self.uses[k])
        return min(self.uses, key=by)


@given(
    kind=st.sampled_from(["lru", "lfu"]),
    calls=st.lists(
        st.tuples(st.sampled_from("ggga"), st.sampled_from("abcdefg"), st.integers(0, 60)),
        max_size=80,
    ),
)
def test_the_policies_agree_with_naive_ones(kind, calls):
    ours, naive = RecomputationCache(100, kind), RecomputationCache(100, NaiveOrder(kind))
    for call, name, size_bytes in calls:
        for cache in (ours, naive):
            if call == "a":
                cache.add(name, of_bytes(size_bytes))
            else:
                cache.get(name)
        assert ours.get_stats() == naive.get_stats()
        assert names_in(ours, "abcdefg") == names_in(naive, "abcdefg")


@given(
    calls=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.integers(0, 9)), max_size=60
    )
)
def test_the_bytes_are_those_of_the_distinct_storages_held(calls):
    bases = [of_bytes(each) for each in (40, 70, 100, 130)]
    cache = RecomputationCache(200)
    kept = {}
    for name, base, start in calls:
        assert cache.add(name, bases[base][start : start + 1])
        kept[name] = base
        kept = {each: of for each, of in kept.items() if cache.contains(each)}
        assert name in kept
        stats = cache.get_stats()
        assert stats.current_size_bytes == sum(len(bases[of]) for of in set(kept.values()))
        assert stats.current_size_bytes <= 200
        assert stats.cached_items_count == len(kept)
    cache.clear()
    assert size(cache) == 0


def test_a_small_view_counts_as_the_storage_it_keeps_alive():
    cache = RecomputationCache(KIB)
    assert cache.add("view", of_bytes(900)[:10])
    assert size(cache) == 900
    assert not cache.add("view of too much", of_bytes(KIB + 1)[:1])


def test_a_view_of_what_is_held_evicts_nothing():
    cache = RecomputationCache(1000)
    base = of_bytes(900)
    cache.add("base", base)
    cache.add("other", of_bytes(100))
    assert cache.add("view", base.view(30, 30).t())
    stats = cache.get_stats()
    assert (stats.cached_items_count, stats.current_size_bytes, stats.evictions) == (3, 1000, 0)
    cache.add("new", of_bytes(900))
    left = names_in(cache, ["base", "other", "view", "new"])
    assert left == {"new"}, "the storage is free only when its last view is gone"
    assert size(cache) == 900


def test_an_activation_that_shares_with_its_only_victim_still_fits():
    cache = RecomputationCache(100)
    base = of_bytes(80)
    cache.add("a", base[:10])
    cache.add("b", of_bytes(20))
    assert cache.add("c", base[10:])
    assert size(cache) == 100
    assert cache.add("d", of_bytes(40))
    assert size(cache) <= 100
    assert cache.contains("d")


def test_exactly_the_limit_fits_and_one_byte_more_is_refused():
    cache = RecomputationCache(100)
    cache.add("old", of_bytes(60))
    assert cache.add("exact", of_bytes(100)) is True
    assert cache.add("more", of_bytes(101)) is False
    stats = cache.get_stats()
    assert (stats.refused, stats.evictions, stats.current_size_bytes) == (1, 1, 100)
    assert cache.contains("exact")
    assert not cache.contains("more")


def test_a_refused_activation_leaves_no_past_value_under_its_id():
    cache = RecomputationCache(100)
    cache.add("a", of_bytes(50))
    cache.add("b", of_bytes(50))
    assert cache.add("a", of_bytes(101)) is False
    assert cache.get("a") is None
    assert cache.contains("b")
    assert size(cache) == 50


def test_adding_an_id_again_replaces_it_and_is_no_eviction():
    cache = RecomputationCache(100)
    cache.add("a", of_bytes(90))
    new = of_bytes(100)
    assert cache.add("a", new)
    assert cache.get("a") is new
    stats = cache.get_stats()
    assert (stats.cached_items_count, stats.current_size_bytes, stats.evictions) == (1, 100, 0)


def test_a_storage_that_grew_is_counted_anew_when_it_is_added_again():
    cache = RecomputationCache(1000)
    tensor = of_bytes(100)
    cache.add("a", tensor)
    tensor.resize_(400)
    cache.add("b", tensor.view(20, 20))
    assert size(cache) == 400
    cache.add("a", of_bytes(1))
    assert size(cache) == 401
    cache.add("b", of_bytes(1))
    assert size(cache) == 2


@pytest.mark.parametrize("change", ["the tensor", "what came back", "a view of it"])
def test_what_is_changed_in_place_is_not_cached_any_more(change):
    cache = RecomputationCache(1000)
    tensor = torch.zeros(10)
    cache.add("a", tensor)
    cache.add("b", torch.zeros(10))
    changed = {"the tensor": tensor, "what came back": cache.get("a"), "a view of it": tensor[3:]}
    changed[change].add_(1)
    assert "a" not in cache
    assert cache.get("a") is None
    stats = cache.get_stats()
    assert (stats.cached_items_count, stats.current_size_bytes, stats.evictions) == (1, 40, 0)
    assert (stats.cache_misses, stats.cache_hits) == (1, 1)
    assert cache.add("a", tensor)
    assert cache.get("a") is tensor
    assert "b" in cache


def test_an_inference_tensor_has_no_version_and_stays_cached():
    cache = RecomputationCache(1000)
    with torch.inference_mode():
        tensor = torch.zeros(10)
        cache.add("a", tensor)
        tensor.add_(1)
        assert cache.get("a") is tensor


def test_a_tensor_made_to_point_elsewhere_does_not_spoil_the_account():
    cache = RecomputationCache(1000)
    tensor = of_bytes(300)
    cache.add("a", tensor)
    tensor.set_(of_bytes(500).untyped_storage())
    others = [of_bytes(100) for _ in range(7)]
    for index, other in enumerate(others):
        cache.add(str(index), other)
    assert size(cache) == 1000
    cache.clear()
    assert size(cache) == 0


def test_empty_tensors_take_nothing():
    cache = RecomputationCache(1)
    for index in range(100):
        assert cache.add(str(index), torch.empty(0))
    stats = cache.get_stats()
    assert (stats.cached_items_count, stats.current_size_bytes) == (100, 0)


class Scaled(torch.Tensor):
    """A wrapper with two inner tensors, as quantised and distributed tensors are."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Scaled(inner["values_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_a_wrapper_counts_its_inner_tensors():
    cache = RecomputationCache(KIB)
    values = torch.zeros(100, dtype=torch.int8)
    cache.add("scaled", Scaled(values, torch.ones(1)))
    assert size(cache) == 104
    cache.add("values", values)
    assert size(cache) == 104


def sparse_tensors():
    rows, values = torch.arange(5), torch.ones(5)
    whole = torch.arange(6)
    return {
        "coo": (torch.sparse_coo_tensor(torch.stack((rows, rows)), values), (10 * 8) + 5 * 4),
        "csr": (torch.sparse_csr_tensor(whole, rows, values), (6 + 5) * 8 + 5 * 4),
        "csc": (torch.sparse_csc_tensor(whole, rows, values), (6 + 5) * 8 + 5 * 4),
    }


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_a_sparse_tensor_counts_its_parts(layout):
    cache = RecomputationCache(KIB)
    sparse, size_bytes = sparse_tensors()[layout]
    cache.add("sparse", sparse)
    assert size(cache) == size_bytes


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_what_is_dropped_is_freed_at_once(policy):
    gc.disable()
    try:
        cache = RecomputationCache(200, policy)

        def added(name):
            tensor = of_bytes(100)
            cache.add(name, tensor)
            return weakref.ref(tensor.untyped_storage())

        first, second = added("a"), added("b")
        third = added("c")
        assert first() is None, "evicted"
        assert second() is not None
        assert cache.get("b") is not None
        fourth = added("b")
        assert second() is None, "replaced"
        cache.clear()
        assert third() is None
        assert fourth() is None
        fifth = added("e")
        cache.close()
        assert fifth() is None, "closed"
    finally:
        gc.enable()


def test_clearing_keeps_the_counts():
    cache = RecomputationCache(100)
    cache.add("a", of_bytes(100))
    cache.add("b", of_bytes(100))
    cache.get("b")
    cache.get("a")
    cache.add("c", of_bytes(101))
    cache.clear()
    stats = cache.get_stats()
    assert (stats.cached_items_count, stats.current_size_bytes) == (0, 0)
    assert (stats.cache_hits, stats.cache_misses, stats.evictions, stats.refused) == (1, 1, 1, 1)
    assert cache.add("a", of_bytes(100))


def test_after_close_every_call_is_refused_but_close():
    with RecomputationCache(100) as cache:
        cache.add("a", of_bytes(1))
    for call in (
        lambda: cache.get("a"),
        lambda: cache.add("a", of_bytes(1)),
        lambda: cache.contains("a"),
        lambda: "a" in cache,
        cache.clear,
        cache.get_stats,
        cache.__enter__,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    cache.close()


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1", None])
def test_impossible_limits_are_refused(limit):
    with pytest.raises(ValueError, match="max_size_bytes"):
        RecomputationCache(limit)


@pytest.mark.parametrize("policy", ["fifo", "", None, object(), NaiveOrder, 3])
def test_impossible_policies_are_refused(policy):
    with pytest.raises(ValueError, match="policy must be"):
        RecomputationCache(100, policy)


@pytest.mark.parametrize("name", ["", "  \n", None, 3, b"a"])
def test_impossible_ids_are_refused(name):
    cache = RecomputationCache(100)
    for call in (cache.get, cache.contains, lambda name: cache.add(name, of_bytes(1))):
        with pytest.raises(ValueError, match="layer_id"):
            call(name)
    assert cache.get_stats().cache_misses == 0


@pytest.mark.parametrize("activation", [None, [1.0], 3, "tensor", torch.empty(3, device="meta")])
def test_what_is_no_tensor_with_memory_is_refused(activation):
    cache = RecomputationCache(100)
    cache.add("a", of_bytes(1))
    with pytest.raises(ValueError, match="activation must be"):
        cache.add("a", activation)
    assert cache.contains("a")


class Faulty(NaiveOrder):
    """A policy that does as it should until told otherwise."""

    def __init__(self):
        super().__init__("lru")
        self.fault = {}

    def _maybe(self, name):
        if name in self.fault:
            fault = self.fault[name]
            if isinstance(fault, BaseException):
                raise fault
            return fault()
        return None

    def added(self, key, size_bytes):
        self._maybe("added")
        super().added(key, size_bytes)

    def used(self, key):
        self._maybe("used")
        super().used(key)

    def removed(self, key):
        super().removed(key)
        self._maybe("removed")

    def victim(self):
        return self._maybe("victim") if "victim" in self.fault else super().victim()


@pytest.fixture
def policy():
    return Faulty()


@pytest.fixture
def cache(policy):
    cache = RecomputationCache(300, policy)
    for name in "abc":
        cache.add(name, of_bytes(100))
    return cache


@pytest.mark.parametrize("named", ["nowhere", "new", None, 7, ["a"]])
def test_a_policy_that_names_what_is_not_cached(named, policy, cache):
    policy.fault["victim"] = lambda: named
    with pytest.raises(RecomputationError, match=r"Faulty would evict .* not cached") as caught:
        cache.add("new", of_bytes(100))
    assert caught.value.layer_id == "new"
    assert names_in(cache, ["a", "b", "c", "new"]) == {"a", "b", "c"}
    stats = cache.get_stats()
    assert (stats.current_size_bytes, stats.cached_items_count, stats.evictions) == (300, 3, 0)
    policy.fault.clear()
    assert cache.add("new", of_bytes(100))
    assert names_in(cache, ["a", "b", "c", "new"]) == {"b", "c", "new"}


@pytest.mark.parametrize(
    ("method", "call", "left"),
    [
        ("used", lambda cache: cache.get("a"), "abc"),
        ("added", lambda cache: cache.add("new", of_bytes(100)), "bc"),
        ("victim", lambda cache: cache.add("new", of_bytes(100)), "abc"),
        ("removed", lambda cache: cache.add("new", of_bytes(100)), "bc"),
        ("removed", lambda cache: cache.add("a", of_bytes(10)), "bc"),
        ("removed", lambda cache: cache.clear(), ""),
    ],
)
def test_a_policy_that_raises(method, call, left, policy, cache):
    problem = ZeroDivisionError("by design")
    policy.fault[method] = problem
    with pytest.raises(RecomputationError, match=rf"Faulty failed in {method}\(\).*by design") as e:
        call(cache)
    assert e.value.__cause__ is problem
    policy.fault.clear()
    assert names_in(cache, ["a", "b", "c", "new"]) == set(left)
    stats = cache.get_stats()
    assert stats.current_size_bytes == 100 * len(left)
    assert stats.cached_items_count == len(left)
    assert stats.cache_hits == 0
    assert not names_in(cache, ["new"])


def test_a_policy_that_calls_its_cache_is_told_so_instead_of_waiting_for_ever(policy, cache):
    policy.fault["victim"] = lambda: cache.get("a")
    with pytest.raises(RecomputationError) as caught:
        cache.add("new", of_bytes(100))
    assert "must not call the cache" in str(caught.value.__cause__)
    policy.fault.clear()
    assert cache.add("new", of_bytes(100))


def test_a_policy_is_told_sizes():
    told = []

    class Largest(NaiveOrder):
        def added(self, key, size_bytes):
            told.append((key, size_bytes))
            self.uses[key] = (0, -size_bytes)

        def used(self, key):
            pass

    cache = RecomputationCache(300, Largest("lru"))
    for name, size_bytes in (("small", 50), ("large", 200), ("middle", 50), ("new", 100)):
        cache.add(name, of_bytes(size_bytes))
    assert told == [("small", 50), ("large", 200), ("middle", 50), ("new", 100)]
    assert names_in(cache, dict(told)) == {"small", "middle", "new"}


def test_freeing_what_is_evicted_may_use_the_cache():
    cache = RecomputationCache(100)
    seen = []
    tensor = of_bytes(100)
    weakref.finalize(tensor.untyped_storage(), lambda: seen.append(cache.contains("b")))
    cache.add("a", tensor)
    del tensor
    other = threading.Thread(target=cache.add, args=("b", of_bytes(100)))
    other.start()
    other.join(60)
    assert seen == [True]


THREADS = 64


def together(work):
    """Run ``work(index)`` in 64 threads that start at once and are interrupted all the time, so
    that what is not guarded is torn; what each returned."""
    start = threading.Barrier(THREADS)
    interval = sys.getswitchinterval()

    def one(index):
        start.wait(60)
        return work(index)

    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(one, range(THREADS)))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_64_threads_that_evict_each_other_are_counted_exactly(policy):
    rounds, limit = 60, 20 * 64
    cache = RecomputationCache(limit, policy)
    base = [torch.zeros(64, dtype=torch.uint8) for _ in range(8)]
    over = []

    def work(index):
        hits = 0
        for turn in range(rounds):
            shared = base[(index + turn) % 8]
            activation = shared[1:] if turn % 3 == 0 else of_bytes(64)
            assert cache.add(f"{index}/{turn}", activation)
            hits += cache.get(f"{index}/{turn}") is not None
            hits += cache.get(f"{(index + 1) % THREADS}/{turn}") is not None
            stats = cache.get_stats()
            if stats.current_size_bytes > limit:
                over.append(stats)
        return hits

    hits = sum(together(work))
    stats = cache.get_stats()
    assert over == []
    assert stats.cache_hits == hits
    assert stats.cache_hits + stats.cache_misses == 2 * rounds * THREADS
    assert stats.evictions == rounds * THREADS - stats.cached_items_count
    names = [f"{index}/{turn}" for index in range(THREADS) for turn in range(rounds)]
    left = [cache.get(name) for name in names if cache.contains(name)]
    assert len(left) == stats.cached_items_count
    distinct = {tensor.untyped_storage()._cdata for tensor in left}
    assert stats.current_size_bytes == 64 * len(distinct)


def test_64_threads_that_replace_and_refuse_one_id():
    cache = RecomputationCache(100)

    def work(index):
        for turn in range(50):
            cache.add("one", of_bytes(101 if (index + turn) % 2 else 1 + index))

    together(work)
    stats = cache.get_stats()
    assert stats.refused == 50 * THREADS // 2
    assert stats.evictions == 0
    last = cache.get("one")
    assert stats.current_size_bytes == (0 if last is None else len(last))


def test_clearing_and_closing_under_64_threads():
    cache = RecomputationCache(10 * KIB)

    def work(index):
        try:
            for turn in range(200):
                cache.add(f"{index}", of_bytes(64))
                if index == 0 and turn % 20 == 0:
                    cache.clear()
                if index == 1 and turn == 150:
                    cache.close()
        except ClosedError:
            return "closed"
        return "done"

    ends = together(work)
    assert ends[1] == "closed"
    with pytest.raises(ClosedError):
        cache.get("0")
