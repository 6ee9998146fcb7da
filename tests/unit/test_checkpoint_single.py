"""Checkpoints of one process: every kind of state comes back as it was, bit for bit."""

import collections
import enum
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler

import holdfast
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint, LoadOptions, SaveOptions
from holdfast.errors import LoadError, SaveError, ValidationError


@pytest.fixture
def ckpt(tmp_path):
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path)) as made:
        yield made


def save(ckpt, model, optimizer=None, *, extra=None, **options):
    return ckpt.save(model, optimizer, SaveOptions(checkpoint_prefix="a", **options), extra=extra)


def load(ckpt, model=None, optimizer=None, *, extra=None, **options):
    return ckpt.load(model, optimizer, LoadOptions(checkpoint_prefix="a", **options), extra=extra)


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 3)
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = self.second.weight

    def forward(self, x):
        hidden = self.norm(self.first(x)).relu()
        return self.second(hidden) + self.tied(hidden)


def train(net, optimizer, steps=2, scheduler=None):
    make = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 3, generator=make)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def same(one, other):
    assert type(one) is type(other)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert bits(one) == bits(other)


def same_state(one, other):
    """Two modules, whatever is wrapped around them."""
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        same(a, b)


def same_optimizer(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert state.keys() == other["state"][number].keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                same(value, other["state"][number][key])
            else:
                assert value == other["state"][number][key]


# ------------------------------------------------------------------ trainings


@pytest.mark.parametrize("format", ["single_file", "multi_shard", "consolidated"])
def test_training_goes_on_bit_for_bit(ckpt, format):  # noqa: A002 -- the option's name
    net, other = Net(1), Net(2)
    optimizer, loaded = (torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, other))
    train(net, optimizer)
    assert save(ckpt, net, optimizer, format=format) == "a"
    result = load(ckpt, other, loaded)
    train(net, optimizer, 3)
    train(other, loaded, 3)
    same_state(net, other)
    same_optimizer(optimizer, loaded)
    assert other.tied.weight is other.second.weight
    assert (result.source_world_size, result.target_world_size) == (1, 1)
    assert not result.was_resharded
    assert result.report.is_clean
    assert result.not_restored == ()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("saved", [0, 2])
def test_an_optimizer_is_as_it_was_saved_stepped_or_not(ckpt, saved, before, in_place):
    net, other = Net(1), Net(2)
    optimizer, loaded = (torch.optim.Adam(n.parameters(), lr=0.01) for n in (net, other))
    train(net, optimizer, saved)
    train(other, loaded, before)
    save(ckpt, net, optimizer)
    load(ckpt, other, loaded, in_place=in_place)
    same_state(net, other)
    same_optimizer(optimizer, loaded)
    assert bool(loaded.state) == bool(saved)


def test_the_result_has_the_states_it_filled(ckpt):
    net = Net(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    train(net, optimizer)
    save(ckpt, net, optimizer, extra={"step": 7})
    other = Net(2)
    result = load(ckpt, other, torch.optim.SGD(other.parameters(), lr=0.1), strict=False)
    same(result.model_state["first.weight"], net.first.weight.detach())
    assert result.optimizer_state["param_groups"][0]["lr"] == 0.5
    assert result.extra == {"step": 7}


def test_moments_keep_a_dtype_that_is_not_their_parameters(ckpt):
    def made(seed):
        net = Net(seed).bfloat16()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for number, parameter in enumerate(net.parameters()):
            moment = torch.full(parameter.shape, 1 + 2.0**-20 * (number + seed))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(seed)),
                "exp_avg": moment,
                "exp_avg_sq": moment * 3,
            }
        return net, optimizer

    net, optimizer = made(1)
    save(ckpt, net, optimizer)
    stepped = made(2)
    fresh = Net(3).bfloat16()
    for other, loaded in (stepped, (fresh, torch.optim.Adam(fresh.parameters(), lr=1.0))):
        load(ckpt, other, loaded)
        same_state(net, other)
        same_optimizer(optimizer, loaded)
        assert loaded.state[other.first.weight]["exp_avg"].dtype == torch.float32


def test_parameters_that_are_frozen_unused_or_only_partly_stateful(ckpt):
    def made(seed):
        net = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("used", "unused", "frozen")})
        torch.manual_seed(seed)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        net["frozen"].requires_grad_(False)
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    net, optimizer = made(1)
    net["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2
    save(ckpt, net, optimizer)
    other, loaded = made(2)
    for layer in ("used", "unused"):  # this one has more state than was saved
        other[layer](torch.ones(1, 2)).sum().backward()
    loaded.step()
    load(ckpt, other, loaded)
    same_state(net, other)
    same_optimizer(optimizer, loaded)
    assert not other["frozen"].weight.requires_grad


def test_a_lazy_module_is_saved_and_loaded_once_it_has_a_shape(ckpt):
    net, other = nn.LazyLinear(3), nn.LazyLinear(3)
    with pytest.raises(SaveError, match="not initialised yet: run a forward pass"):
        save(ckpt, net)
    net(torch.ones(1, 4))
    save(ckpt, net)
    with pytest.raises(LoadError, match="not initialised yet: run a forward pass"):
        load(ckpt, other)
    other(torch.ones(1, 4))
    load(ckpt, other)
    same_state(net, other)


def test_several_models_and_optimizers_with_the_same_names(ckpt):
    def made(seed):
        nets = [Net(seed), Net(seed + 1), Net(seed + 2)]
        optimizers = [torch.optim.Adam(net.parameters(), lr=seed) for net in nets[:2]]
        for net, optimizer in zip(nets, optimizers, strict=False):
            train(net, optimizer, seed)
        return nets, optimizers

    nets, optimizers = made(1)
    extra = {"critic": nets[1], "critic_optimizer": optimizers[1], "ema": {"of": [nets[2]]}}
    save(ckpt, nets[0], optimizers[0], extra=extra)
    others, loaded = made(3)
    extra = {"critic": others[1], "critic_optimizer": loaded[1], "ema": {"of": [others[2]]}}
    load(ckpt, others[0], loaded[0], extra=extra)
    for one, other in zip(nets, others, strict=True):
        same_state(one, other)
    for one, other in zip(optimizers, loaded, strict=True):
        same_optimizer(one, other)


def test_one_optimizer_of_two_models(ckpt):
    def made(seed):
        one, two = Net(seed), Net(seed + 1)
        return one, two, torch.optim.Adam([*one.parameters(), *two.parameters()], lr=0.01)

    one, two, optimizer = made(1)
    train(one, optimizer)
    train(two, optimizer)
    save(ckpt, one, optimizer, extra={"two": two})
    first, second, loaded = made(5)
    load(ckpt, first, loaded, extra={"two": second})
    same_state(one, first)
    same_state(two, second)
    same_optimizer(optimizer, loaded)


SCHEDULERS = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_where_they_were(ckpt, kind):
    def made():
        net = Net(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        return net, optimizer, SCHEDULERS[kind](optimizer)

    def step(optimizer, scheduler, times):
        rates = []
        for loss in range(times):
            optimizer.step()
            scheduler.step(*([float(loss)] if kind == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    net, optimizer, scheduler = made()
    step(optimizer, scheduler, 3)
    save(ckpt, net, optimizer, extra={"scheduler": scheduler})
    other, loaded, resumed = made()
    load(ckpt, other, loaded, extra={"scheduler": resumed})
    assert step(loaded, resumed, 5) == step(optimizer, scheduler, 5)


# ------------------------------------------------------------------- wrappers

WRAPPERS = {
    "bare": lambda net: net,
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "recomputed": checkpoint_wrapper,
    "both": lambda net: torch.compile(checkpoint_wrapper(net), backend="eager"),
}


def wrapped(seed, kind):
    net = Net(seed)
    if kind == "inside":
        net.first = checkpoint_wrapper(net.first)
        net.second = torch.compile(net.second, backend="eager")
    else:
        net = WRAPPERS[kind](net)
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(kind, "bare") for kind in [*WRAPPERS, "inside"]]
    + [("bare", kind) for kind in [*WRAPPERS, "inside"]]
    + [("both", "inside")],
)
def test_wrappers_make_no_difference(ckpt, saved, wanted):
    (net, optimizer), (other, loaded) = wrapped(1, saved), wrapped(2, wanted)
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1)
    optimizer.step()
    save(ckpt, net, optimizer)
    load(ckpt, other, loaded)
    same_state(net, other)
    same_optimizer(optimizer, loaded)
    names = ckpt.catalog.open("a").tensors
    assert {"model.first.weight", "optimizer.state.first.weight.exp_avg"} <= names.keys()
    assert not any("_orig_mod" in name or "_wrapped" in name for name in names)


# ---------------------------------------------------------- tied, meta, memory


def test_what_is_tied_is_stored_once_and_comes_back_tied(ckpt, tmp_path):
    net = Net(1)
    save(ckpt, net)
    names = ckpt.catalog.open("a").tensors
    assert "model.second.weight" in names
    assert "model.tied.weight" not in names
    tree = holdfast.load(tmp_path / "a")["model"]
    assert tree["second.weight"] is tree["tied.weight"]
    same(tree["tied.weight"], net.tied.weight.detach())


def test_what_is_tied_here_and_was_not_when_saved_is_refused(ckpt):
    net = Net(1)
    net.tied.weight = nn.Parameter(net.tied.weight.detach() + 1)
    save(ckpt, net)
    other = Net(2)
    before = other.second.weight.detach().clone()
    with pytest.raises(ValidationError, match=r"second\.weight and .*tied\.weight are one tensor"):
        load(ckpt, other)
    same(other.second.weight.detach(), before)


def test_what_was_tied_when_saved_may_be_two_here(ckpt):
    net, other = Net(1), Net(2)
    other.tied.weight = nn.Parameter(torch.zeros(3, 5))
    save(ckpt, net)
    load(ckpt, other)
    same_state(net, other)
    with torch.no_grad():
        other.tied.weight.add_(1)
    same(other.second.weight.detach(), net.second.weight.detach())


def test_a_model_on_the_meta_device_becomes_real_and_stays_tied(ckpt):
    net = Net(1)
    save(ckpt, net)
    with torch.device("meta"):
        other = Net(2)
    other.first.requires_grad_(False)
    load(ckpt, other)
    same_state(net, other)
    assert other.tied.weight is other.second.weight
    assert isinstance(other.first.weight, nn.Parameter)
    assert not other.first.weight.requires_grad
    assert other.second.weight.requires_grad
    other(torch.ones(2, 3))


def test_a_meta_tensor_of_a_plain_tree_becomes_real(ckpt):
    save(ckpt, {"w": torch.arange(3.0)}, extra={"x": [torch.ones(2)]})
    model = {"w": torch.empty(3, device="meta")}
    extra = {"x": [torch.empty(2, device="meta")]}
    load(ckpt, model, extra=extra)
    same(model["w"], torch.arange(3.0))
    same(extra["x"][0], torch.ones(2))


def test_a_refused_load_leaves_a_model_on_the_meta_device_there(ckpt):
    save(ckpt, Net(1))
    with torch.device("meta"):
        other = Net(2)
    other.more = nn.Linear(1, 1)
    with pytest.raises(ValidationError, match=r"model\.more\.weight"):
        load(ckpt, other)
    assert other.first.weight.is_meta
    with pytest.raises(SaveError, match=r"is on the meta device and has no values"):
        ckpt.save(other, options=SaveOptions(checkpoint_prefix="b"))


ODD = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "channels_last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": lambda: torch.arange(20)[::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "of no dimension": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0),
    "empty in one dimension": lambda: torch.empty(3, 0, 2),
    "complex64": lambda: torch.rand(3, dtype=torch.complex64),
    "complex128": lambda: torch.rand(3, 2, dtype=torch.complex128),
    "conjugated": lambda: torch.rand(3, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.rand(3, dtype=torch.complex64).conj().imag,
    "float8_e4m3fn": lambda: torch.rand(7).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.rand(7).to(torch.float8_e5m2),
    "bool": lambda: torch.tensor([True, False, True]),
    "uint16": lambda: torch.tensor([0, 1, 65535], dtype=torch.uint16),
    "int8": lambda: torch.arange(-3, 3, dtype=torch.int8),
    "half": lambda: torch.rand(3).half(),
    "bfloat16": lambda: torch.rand(3).bfloat16(),
    "not numbers": lambda: torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45]),
}


@pytest.mark.parametrize("format", ["single_file", "multi_shard", "consolidated"])
def test_tensors_of_every_kind(ckpt, tmp_path, format):  # noqa: A002 -- the option's name
    torch.manual_seed(3)
    odd = {f"a {name}": make() for name, make in ODD.items()}
    module = nn.Module()
    for name, tensor in odd.items():
        module.register_buffer(name, tensor)
    save(ckpt, module, extra=dict(odd), format=format)
    found = holdfast.load(tmp_path / "a")
    for name, tensor in odd.items():
        same(found["model"][name], tensor.resolve_conj().resolve_neg())
        same(found["extra"][name], tensor.resolve_conj().resolve_neg())

    def blank(name, tensor):
        return torch.zeros_like(tensor if name != "a expanded" else tensor.contiguous())

    target = {name: blank(name, tensor) for name, tensor in odd.items()}
    other = nn.Module()
    for name, tensor in odd.items():
        other.register_buffer(name, blank(name, tensor))
    memory = {name: (tensor, tensor.stride()) for name, tensor in target.items()}
    load(ckpt, other, extra=target)
    for name, tensor in odd.items():
        same(target[name], tensor.resolve_conj().resolve_neg())
        same(other.get_buffer(name), tensor.resolve_conj().resolve_neg())
        assert target[name] is memory[name][0]
        assert target[name].stride() == memory[name][1]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("elements", [8, 200_000])
def test_a_tensor_that_cannot_be_filled_is_told_in_words(ckpt, elements, in_place):
    """Rather than that the process ends, or that nothing happens."""
    stored = {"gone": torch.ones(elements), "sparse": torch.eye(3)}
    save(ckpt, stored, extra={"net": nn.Linear(elements, 1)})
    state = {"gone": torch.zeros(elements), "sparse": torch.zeros(3, 3).to_sparse()}
    model = nn.Linear(elements, 1)
    for tensor in (state["gone"], model.weight.data):
        tensor.untyped_storage().resize_(0)
    before = model.bias.clone()
    with pytest.raises(ValidationError) as caught:
        load(ckpt, state, extra={"net": model}, in_place=in_place)
    assert [line.strip() for line in str(caught.value).splitlines()[2:5]] == [
        "model.gone has no memory: it was given back (untyped_storage().resize_(0))",
        "model.sparse is a torch.sparse_coo tensor; only dense ones are loaded, as to_dense()",
        "extra.net.weight has no memory: it was given back (untyped_storage().resize_(0))",
    ]
    assert torch.equal(model.bias, before)


def test_no_gradient_is_saved_or_lost(ckpt):
    net, other = Net(1), Net(2)
    other(torch.ones(2, 3)).sum().backward()
    gradient = other.first.weight.grad
    save(ckpt, net)
    load(ckpt, other)
    assert other.first.weight.grad is gradient


# ---------------------------------------------------------------- plain trees


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 -- the old kind, too


def test_plain_trees_keep_every_type(ckpt):
    tree = {
        "tuple": (1, (2.5, None), [True]),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=3),
        "by number": {1: "one", (2, 3): "pair", None: 0, False: 1.0},
        "big": 10**40,
        "floats": [math.inf, -math.inf, 0.1, -0.0],
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "path": Path("/a/b"),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "numpy": np.float32(0.1),
        "$": {"$": ["tuple", []]},
        "": "",
        "a.b": {"a": 1},
        "a": {"b": 2},
        "empty": {"dict": {}, "list": [], "tuple": ()},
    }
    save(ckpt, nn.Linear(1, 1), extra=tree)
    target = dict.fromkeys(tree)
    result = load(ckpt, nn.Linear(1, 1), extra=target)
    assert repr(target) == repr(tree)
    assert repr(dict(result.extra)) == repr(tree)


def test_names_that_are_no_text(ckpt):
    """As names of files may be, which Python has with lone surrogates."""
    tree = {"\udc80": 1, "deep": {"\udcff": {"\udc80": torch.ones(1)}}, "\x00": "\udc80", "é\n": 2}
    save(ckpt, {"\udc80": torch.ones(2)}, extra=tree)
    target = dict.fromkeys(tree)
    model = {"\udc80": torch.zeros(2)}
    load(ckpt, model, extra=target)
    assert model["\udc80"].tolist() == [1, 1]
    assert repr(target) == repr(tree)


def test_names_that_would_be_one_name_are_two_tensors(ckpt):
    def made(start):
        tensors = [torch.tensor([float(start + n)]) for n in range(5)]
        names = "a" * 2000, "a" * 2001
        return {
            "a.b": tensors[0],
            "a": {"b": tensors[1]},
            "a.b~2": tensors[2],
            **dict(zip(names, tensors[3:], strict=True)),
        }

    save(ckpt, made(1), extra=made(11))
    model, extra = made(0), made(0)
    load(ckpt, model, extra=extra)
    assert repr(model) == repr(made(1))
    assert repr(extra) == repr(made(11))


def test_enums_come_back_by_their_value(ckpt):
    save(ckpt, nn.Linear(1, 1), extra={"colour": Colour.RED, "level": Level.HIGH})
    target = {"colour": None, "level": None}
    load(ckpt, nn.Linear(1, 1), extra=target)
    assert target["colour"] in (Colour.RED, "red")
    assert target["level"] == 3


def test_arrays_of_numpy_are_filled_in_place_or_made_anew(ckpt):
    def made(start):
        rng = np.random.default_rng(start)
        return {
            "large": rng.random((300, 7)),
            "small": np.array([start], np.int16),
            "fortran": np.asfortranarray(rng.random((4, 5), np.float32)),
            "text": np.array(["ab", "c"]),
            "scalar": np.array(float(start)),
            "empty": np.empty((0, 3)),
        }

    saved, filled = made(1), made(2)
    save(ckpt, nn.Linear(1, 1), extra=saved)
    before = dict(filled)
    anew = dict.fromkeys(saved)
    load(ckpt, nn.Linear(1, 1), extra=filled)
    load(ckpt, nn.Linear(1, 1), extra=anew)
    for name, array in saved.items():
        for found in (filled[name], anew[name]):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
        assert filled[name] is before[name]


def test_nested_trees_with_tensors_and_statefuls(ckpt):
    def made(seed):
        torch.manual_seed(seed)
        return {
            "list": [torch.rand(2), {"deep": torch.rand(3), "n": seed}],
            "tuple": (torch.rand(2), Net(seed)),
            "ordered": collections.OrderedDict(x=torch.rand(1)),
            "default": collections.defaultdict(list, {"k": [torch.rand(1)]}),
        }

    saved, filled = made(1), made(2)
    save(ckpt, nn.Linear(1, 1), extra=saved)
    tensor = filled["list"][0]
    load(ckpt, nn.Linear(1, 1), extra=filled)
    same(filled["list"][0], saved["list"][0])
    assert filled["list"][0] is tensor
    same(filled["list"][1]["deep"], saved["list"][1]["deep"])
    assert filled["list"][1]["n"] == 1
    same(filled["tuple"][0], saved["tuple"][0])
    same_state(filled["tuple"][1], saved["tuple"][1])
    same(filled["ordered"]["x"], saved["ordered"]["x"])
    same(filled["default"]["k"][0], saved["default"]["k"][0])


def test_what_shares_memory_in_extra_is_still_shared_when_made_anew(ckpt, tmp_path):
    weight = torch.rand(3)
    save(ckpt, nn.Linear(1, 1), extra={"one": weight, "two": [weight]})
    found = holdfast.load(tmp_path / "a")["extra"]
    assert found["one"] is found["two"][0]


class Loader:
    """A stateful that is not torch's, with a tensor and plain values."""

    def __init__(self, at):
        self.at = at
        self.order = torch.arange(at)

    def state_dict(self):
        return {"at": self.at, "order": self.order, "nested": {"t": (self.at,)}}

    def load_state_dict(self, state):
        assert state["nested"]["t"] == (state["at"],)
        self.at, self.order = state["at"], state["order"]


def test_anything_with_state_dict_and_load_state_dict(ckpt):
    save(ckpt, nn.Linear(1, 1), extra={"loader": Loader(5)})
    loader = Loader(2)
    load(ckpt, nn.Linear(1, 1), extra={"loader": loader})
    assert loader.at == 5
    same(loader.order, torch.arange(5))


def test_a_model_and_an_optimizer_may_be_plain_trees(ckpt):
    save(ckpt, {"w": torch.ones(2)}, {"lr": 0.5, "m": torch.ones(3)})
    model, optimizer = {"w": torch.zeros(2)}, {"lr": 0.0, "m": torch.zeros(3)}
    load(ckpt, model, optimizer)
    assert model["w"].tolist() == [1, 1]
    assert optimizer["lr"] == 0.5
    assert optimizer["m"].tolist() == [1, 1, 1]


def test_a_part_may_be_loaded_alone(ckpt):
    net = Net(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.25)
    train(net, optimizer)
    save(ckpt, net, optimizer, extra={"step": 3, "more": torch.ones(1)})
    other = Net(2)
    load(ckpt, other)
    same_state(net, other)
    extra = {"step": 0}
    load(ckpt, extra=extra)
    assert extra == {"step": 3}


def test_many_saves_of_a_training_list_newest_first(ckpt):
    net = Net(1)
    for name in ("c", "a", "b"):
        ckpt.save(net, options=SaveOptions(checkpoint_prefix=name))
    assert [info.prefix for info in ckpt.list_checkpoints()] == ["b", "a", "c"]
