"""Which layers are checkpointed: what may be asked for, what is a candidate, what is chosen."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.activation._layers.available import available_bytes, host_bytes
from holdfast.activation._layers.candidates import Part, named, part_of, repeated
from holdfast.activation._layers.config import CheckpointConfig, CheckpointStrategy
from holdfast.activation._layers.layer_report import LayerRow, table
from holdfast.activation._layers.strategies import (
    LayerCost,
    choose_by_cost,
    choose_by_name,
    missing_bytes,
)

MIB = 1024 * 1024


# What may be asked for.


@pytest.mark.parametrize("strategy", list(CheckpointStrategy))
def test_a_strategy_is_known_by_its_text(strategy):
    needed = {"selective": {"layers": "a"}, "size_based": {"min_bytes": 1}}.get(strategy.value, {})
    by_text = CheckpointConfig(strategy=strategy.value, **needed)
    assert by_text.strategy is strategy
    assert by_text == CheckpointConfig(strategy=strategy, **needed)


def test_the_defaults_are_told():
    assert CheckpointConfig() == CheckpointConfig(strategy="interval", interval=1)
    assert CheckpointConfig(strategy="smart").target_share == 0.5
    assert CheckpointConfig(strategy="memory_aware").memory_share == 0.5
    assert CheckpointConfig(strategy="smart").interval is None


def test_the_presets():
    assert CheckpointConfig.every_layer() == CheckpointConfig(interval=1)
    assert CheckpointConfig.half() == CheckpointConfig(interval=2)
    assert CheckpointConfig.fit_memory() == CheckpointConfig(strategy="memory_aware")
    assert CheckpointConfig.fit_memory(0.9).memory_share == 0.9


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy": "clever"}, "strategy must be one of 'interval', 'selective', 'size_based'"),
        ({"strategy": None}, "strategy must be one of"),
        ({"strategy": []}, "strategy must be one of"),
        ({"interval": 0}, "interval must be a whole number, at least 1, not 0"),
        ({"interval": 2.0}, "interval must be a whole number"),
        ({"interval": True}, "interval must be a whole number"),
        ({"strategy": "size_based"}, "min_bytes must be given"),
        ({"strategy": "size_based", "min_bytes": -1}, "min_bytes must be"),
        ({"strategy": "memory_aware", "memory_share": 0}, "memory_share must be more than 0"),
        (
            {"strategy": "memory_aware", "memory_share": 1.01},
            "memory_share must be more than 0 and at most 1",
        ),
        ({"strategy": "memory_aware", "memory_share": "1"}, "memory_share must be"),
        ({"strategy": "smart", "target_share": math.nan}, "target_share must be"),
        ({"strategy": "smart", "target_share": 0.0}, "target_share must be more than 0"),
        ({"strategy": "selective"}, "layers must be given with strategy 'selective'"),
        ({"layers": ()}, "layers must be names of modules"),
        ({"layers": ("a", "")}, "layers must be names of modules"),
        ({"layers": ("a", 1)}, "layers must be names of modules"),
        ({"layers": 3}, "layers must be names of modules.* not 3"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        CheckpointConfig(**options)


@pytest.mark.parametrize("strategy", list(CheckpointStrategy))
@pytest.mark.parametrize(
    ("field", "value"),
    [("interval", 2), ("min_bytes", 5), ("memory_share", 0.25), ("target_share", 0.25)],
)
def test_an_option_that_nobody_would_read_is_refused(strategy, field, value):
    options = {"strategy": strategy, "layers": ("a",), field: value}
    reader = {
        "interval": "interval",
        "min_bytes": "size_based",
        "memory_share": "memory_aware",
        "target_share": "smart",
    }[field]
    if strategy is CheckpointStrategy.SIZE_BASED:
        options.setdefault("min_bytes", 1)
    if strategy.value == reader:
        assert getattr(CheckpointConfig(**options), field) == value
        return
    with pytest.raises(ValueError, match=f"{field}={value} is refused.*only '{reader}' does"):
        CheckpointConfig(**options)


def test_layers_may_be_one_pattern_or_a_list():
    assert CheckpointConfig(layers="blocks.*").layers == ("blocks.*",)
    assert CheckpointConfig(layers=["a", "b.*"]).layers == ("a", "b.*")
    assert hash(CheckpointConfig(layers=["a"])) == hash(CheckpointConfig(layers=("a",)))


def test_it_cannot_be_changed():
    config = CheckpointConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.interval = 3
    assert dataclasses.replace(config, interval=3).interval == 3


# What is a candidate.


class Block(nn.Module):
    def __init__(self, width=4, experts=0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.experts = nn.ModuleList([Expert(width) for _ in range(experts)])

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 4) for _ in range(9)])
        self.encoder = nn.ModuleList([Block(experts=3) for _ in range(2)])
        self.decoder = nn.ModuleDict({"a": Block(), "b": Block(), "out": nn.Linear(4, 4)})

    def forward(self, x):
        return x


def names(parts):
    return [part.name for part in parts]


def test_repeated_layers_of_several_towers():
    found = names(repeated(part_of(Towers())))
    assert found == ["encoder.0", "encoder.1", "decoder.a", "decoder.b"]


def test_a_sequential_of_blocks_among_other_layers():
    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.ReLU(), Block(), Block(), nn.Linear(4, 4))
    assert names(repeated(part_of(model))) == ["1", "3", "4"]


def test_stages_in_a_chain_are_places_and_not_layers():
    stages = [nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), Block())]
    model = nn.Sequential(nn.Conv2d(3, 3, 1), *stages)
    assert names(repeated(part_of(model))) == ["1.0", "1.1", "2.0", "2.1", "2.2"]


def test_chains_of_operations_are_layers():
    def step():
        return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())

    model = nn.Sequential(step(), step(), nn.Flatten(), nn.Linear(4, 4))
    assert names(repeated(part_of(model))) == ["0", "1"]


def test_lists_of_lists_are_looked_through():
    """As in layers = ModuleList([ModuleList([attention, feed_forward]), ...]): a list has no
    forward that could be checkpointed."""

    class Attention(Expert):
        pass

    model = Towers()
    model.encoder = nn.ModuleList([nn.ModuleList([Attention(4), Expert(4)]) for _ in range(3)])
    model.decoder = None
    found = names(repeated(part_of(model)))
    assert found == [f"encoder.{i}.{j}" for i in range(3) for j in range(2)]


def test_recurrent_layers_are_more_than_an_operation():
    model = nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)])
    assert names(repeated(part_of(model))) == ["0", "1"]


def test_a_layer_that_is_used_many_times_is_one_candidate():
    shared = Block()
    model = nn.ModuleList([shared, shared, Block(), shared])
    assert names(repeated(part_of(model))) == ["0", "2"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.Sequential(Block(), nn.Linear(4, 4)),
        nn.Linear(4, 4),
    ],
    ids=["mlp", "one block", "no modules inside"],
)
def test_without_repeated_layers_it_says_what_to_pass(model):
    with pytest.raises(ValueError, match=r"no repeated layers.*CheckpointConfig\(layers=") as told:
        repeated(part_of(model))
    inside = [name for name, _ in model.named_modules() if name]
    assert all(repr(name) in str(told.value) for name in inside[:3])


def test_names_and_patterns():
    whole = part_of(Towers())
    assert names(named(whole, ["decoder.b", "encoder.0"])) == ["encoder.0", "decoder.b"]
    assert names(named(whole, ["*.mlp"])) == [
        *("encoder.0.mlp", "encoder.1.mlp", "decoder.a.mlp", "decoder.b.mlp")
    ]
    assert names(named(whole, ["decoder.[ab]"])) == ["decoder.a", "decoder.b"]


def test_of_what_one_pattern_matches_the_outermost_count():
    assert names(named(part_of(Towers()), ["encoder.*"])) == ["encoder.0", "encoder.1"]


def test_a_name_that_matches_nothing_is_told_its_neighbours():
    with pytest.raises(ValueError, match=r"'encoder\.7' matches no module") as told:
        named(part_of(Towers()), ["decoder.a", "encoder.7"])
    assert "'encoder.0'" in str(told.value)
    with pytest.raises(ValueError, match=r"'\^+' matches no module.*'heads\.0'.* more"):
        named(part_of(Towers()), ["^^^"])


def test_a_list_cannot_be_named_for_it_has_no_forward():
    with pytest.raises(ValueError, match="'encoder' matches no module with a forward"):
        named(part_of(Towers()), ["encoder"])


def test_a_layer_inside_another_is_refused():
    with pytest.raises(ValueError, match=r"'encoder\.0\.mlp' is inside 'encoder\.0'"):
        named(part_of(Towers()), ["encoder.0.mlp", "encoder.*"])


def test_a_shared_layer_can_be_named_by_any_of_its_names():
    shared = Block()
    model = nn.ModuleList([shared, Block(), shared])
    found = named(part_of(model), ["2"])
    assert [part.identity for part in found] == [id(shared)]


def test_a_part_is_a_value():
    model = Towers()
    assert part_of(model) == part_of(model)
    leaf = Part(name="x", kind="k", role="plain", identity=1)
    assert leaf.parts == ()


# What is chosen.


def costs(*nbytes, ms=None, device="cpu"):
    ms = [1.0] * len(nbytes) if ms is None else ms
    return [
        LayerCost(name=f"l{i}", dropped_bytes=size, replay_ms=time, device=device)
        for i, (size, time) in enumerate(zip(nbytes, ms, strict=True))
    ]


@pytest.mark.parametrize(
    ("interval", "chosen"), [(1, "abcde"), (2, "ace"), (3, "ad"), (5, "a"), (99, "a")]
)
def test_interval(interval, chosen):
    config = CheckpointConfig(interval=interval)
    assert choose_by_name(config, tuple("abcde")) == set(chosen)


def test_selective_takes_all_that_was_named():
    config = CheckpointConfig(strategy="selective", layers="*")
    assert choose_by_name(config, ("a", "b")) == {"a", "b"}


def test_strategies_that_learn_begin_with_all():
    config = CheckpointConfig(strategy="smart")
    assert choose_by_name(config, ("a", "b", "c")) == {"a", "b", "c"}


def test_size_based():
    config = CheckpointConfig(strategy="size_based", min_bytes=100)
    assert choose_by_cost(config, costs(99, 100, 0, 101), {}) == {"l1", "l3"}


@pytest.mark.parametrize(
    ("available", "chosen"),
    [
        (200, set()),  # 100 of room: all 100 bytes are kept
        (198, {"l1", "l2"}),  # 99: without l2 50 stay and 50 come back, without l1 too 20 and 50
        (140, {"l1", "l2"}),
        (138, {"l0", "l1", "l2"}),
        (0, {"l0", "l1", "l2", "l3"}),
    ],
)
def test_memory_aware_keeps_what_fits_beside_the_largest_replay(available, chosen):
    config = CheckpointConfig(strategy="memory_aware", memory_share=0.5)
    found = choose_by_cost(config, costs(10, 30, 50, 10), {"cpu": available})
    assert found == chosen


def test_memory_aware_chooses_for_each_device_on_its_own():
    config = CheckpointConfig(strategy="memory_aware", memory_share=1)
    here = costs(10, 10)
    there = [dataclasses.replace(cost, name=f"m{cost.name}", device="cuda:1") for cost in here]
    found = choose_by_cost(config, here + there, {"cpu": 20, "cuda:1": 5})
    assert found == {"ml0", "ml1"}
    assert missing_bytes(config, here + there, {"cpu": 20, "cuda:1": 5}) == {"cuda:1": 5}


def test_memory_aware_leaves_layers_that_free_nothing():
    config = CheckpointConfig(strategy="memory_aware")
    assert choose_by_cost(config, costs(0, 10, 0), {"cpu": 0}) == {"l1"}


def test_smart_takes_most_bytes_per_millisecond_first():
    config = CheckpointConfig(strategy="smart", target_share=0.5)
    found = choose_by_cost(config, costs(60, 40, 50, 50, ms=[60.0, 1.0, 2.0, 100.0]), {})
    assert found == {"l1", "l2", "l0"}  # 40 and 50 of 200 are not yet half of it


def test_smart_frees_everything_if_asked_to_and_nothing_twice():
    config = CheckpointConfig(strategy="smart", target_share=1)
    assert choose_by_cost(config, costs(5, 0, 7), {}) == {"l0", "l2"}
    assert choose_by_cost(config, [], {}) == frozenset()


layer_costs = st.lists(
    st.builds(
        LayerCost,
        name=st.uuids().map(str),
        dropped_bytes=st.integers(0, 1000),
        replay_ms=st.floats(0, 10),
        device=st.sampled_from(["cpu", "cuda:0"]),
    ),
    max_size=12,
)


@given(layer_costs, st.floats(0.01, 1), st.integers(0, 5000))
def test_memory_aware_never_keeps_too_much_and_never_drops_one_too_many(layers, share, room):
    config = CheckpointConfig(strategy="memory_aware", memory_share=share)
    chosen = choose_by_cost(config, layers, dict.fromkeys(["cpu", "cuda:0"], room))
    for device in {cost.device for cost in layers}:
        here = [cost for cost in layers if cost.device == device]
        dropped = sorted(cost.dropped_bytes for cost in here if cost.name in chosen)
        kept = sorted(cost.dropped_bytes for cost in here if cost.name not in chosen)
        fits = sum(kept) + max(dropped, default=0) <= share * room
        assert fits or sum(kept) == 0
        if dropped:  # with the smallest of them kept it would not fit
            assert dropped[0] >= max(kept, default=0)
            again = sum(kept) + dropped[0] + max(dropped[1:], default=0)
            assert again > share * room


@given(layer_costs, st.floats(0.01, 1))
def test_smart_frees_its_share_and_would_not_without_the_last(layers, share):
    config = CheckpointConfig(strategy="smart", target_share=share)
    chosen = [cost for cost in layers if cost.name in choose_by_cost(config, layers, {})]
    wanted = share * sum(cost.dropped_bytes for cost in layers)
    freed = sum(cost.dropped_bytes for cost in chosen)
    assert freed >= wanted
    if chosen:
        worst = max(cost.replay_ms / cost.dropped_bytes for cost in chosen)
        lasts = [c.dropped_bytes for c in chosen if c.replay_ms / c.dropped_bytes == worst]
        assert freed - max(lasts) < wanted


# What is available.


def system(root: Path, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   64 kB\nHugePages: none\n"


def test_the_machine_alone(tmp_path):
    assert host_bytes(system(tmp_path, proc__meminfo=MEMINFO)) == 64 * 1024


def test_where_nobody_tells(tmp_path):
    assert host_bytes(tmp_path) is None


def test_a_control_group(tmp_path):
    root = system(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="0::/job/step\n",
        sys__fs__cgroup__job__step__memory_dot_max="max\n",
        sys__fs__cgroup__job__step__memory_dot_current="900\n",
        sys__fs__cgroup__job__memory_dot_max="2000\n",
        sys__fs__cgroup__job__memory_dot_current="1500\n",
        sys__fs__cgroup__job__memory_dot_stat="file 400\nshmem 300\nactive_file 60\n"
        "inactive_file 40\n",
    )
    assert host_bytes(root) == 2000 - 1500 + 60 + 40


def test_a_control_group_that_is_not_mounted_where_it_says(tmp_path):
    root = system(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="0::/outside/of/the/container\n",
        sys__fs__cgroup__memory_dot_max="3000\n",
        sys__fs__cgroup__memory_dot_current="1000\n",
    )
    assert host_bytes(root) == 2000


def test_a_control_group_of_the_first_version(tmp_path):
    root = system(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="5:cpu,cpuacct:/x\n4:memory:/a\n0::/\n",
        sys__fs__cgroup__memory__a__memory_dot_limit_in_bytes="5000\n",
        sys__fs__cgroup__memory__a__memory_dot_usage_in_bytes="4900\n",
        sys__fs__cgroup__memory__a__memory_dot_stat="active_file 1\ntotal_active_file 20\n"
        "total_inactive_file 30\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes="0\n",
    )
    assert host_bytes(root) == 150


def test_more_used_than_allowed_is_nothing_left(tmp_path):
    root = system(
        tmp_path,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memory_dot_max="10\n",
        sys__fs__cgroup__memory_dot_current="11\n",
    )
    assert host_bytes(root) == 0


def test_this_machine_tells():
    found = available_bytes("cpu")
    assert found is not None
    assert MIB < found < 1 << 50
    assert available_bytes("meta") is None


def test_available_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _, total = torch.cuda.mem_get_info(0)
    assert 0 < available_bytes("cuda:0") <= total
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    before = available_bytes("cuda:0")
    del held  # torch keeps it, and would give it out again
    assert available_bytes("cuda:0") >= before + 60 * MIB


# What is told.


def test_the_table():
    rows = [
        LayerRow(name="a", recomputed=True, dropped_bytes=1234567, replays=3, replay_ms=1.26),
        LayerRow(name="long.name", recomputed=False, dropped_bytes=None, replays=0, replay_ms=0.0),
    ]
    assert table(rows) == (
        "layer      activations      bytes  replays  total ms\n"
        "a          recomputed   1,234,567        3       1.3\n"
        "long.name  kept                 -        0       0.0"
    )
