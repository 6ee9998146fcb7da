"""An optimizer's state goes into a tree by names and comes back so that training goes on alike."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim import (
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    NAdam,
    Optimizer,
    RMSprop,
    SparseAdam,
)

from holdfast.distributed._modules import parameter_names
from holdfast.distributed._optimizers import OptimizerFill, OptimizerTarget, optimizer_state
from holdfast.distributed._tensors import Like
from holdfast.errors import LoadError, SaveError
from holdfast.format import LeafRef, decode_value, encode_value


class Elementwise(nn.Module):
    """Every kind of parameter an optimizer may meet, and no matrix product: those of BF16 are not
    everywhere."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(6, 4, generator=make).to(dtype))
        self.shift = nn.Parameter(torch.randn(4, generator=make).to(dtype))
        self.gain = nn.Parameter(torch.randn((), generator=make).to(dtype))
        self.unused = nn.Parameter(torch.randn(3, generator=make).to(dtype))
        self.frozen = nn.Parameter(torch.randn(2, generator=make).to(dtype), requires_grad=False)

    def forward(self, x):
        return (x * self.scale + self.shift) * self.gain


class Sparse(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(9, 3, sparse=True)

    def forward(self, x):
        return self.table((x[:, 0].abs() * 8).long().clamp(max=8))


def trained(model, optimizer, steps, seed=0):
    make = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(6, 4, generator=make)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def stored_of(tree):
    """The tree as a checkpoint has it: references in the place of tensors, and these beside it,
    as fresh copies."""
    tensors = {}

    def leaf(path, value):
        if isinstance(value, torch.Tensor):
            name = ".".join(map(str, path))
            tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
            return LeafRef(kind="tensor", name=name)
        return None

    return decode_value(encode_value(tree, leaf=leaf)), tensors


def filled(value, tensors):
    if isinstance(value, LeafRef):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: filled(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(each, tensors) for each in value)
    return value


def fill_of(tree, optimizer, names):
    stored, tensors = stored_of(tree)
    target = OptimizerTarget(optimizer, names)
    asked = {
        ref.name: like
        for _, ref, like in target.likes(stored, lambda name: tuple(tensors[name].shape))
    }
    assert all(isinstance(like, Like) and like.mesh is None for like in asked.values())
    here = {name: tensors[name].to(like.device) for name, like in asked.items()}
    return OptimizerFill(target, filled(stored, {**tensors, **here}))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def bits(model):
    return copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})


KINDS = {
    "sgd": functools.partial(SGD, lr=0.1),
    "sgd momentum": functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": functools.partial(Adam, lr=0.01),
    "adam amsgrad": functools.partial(Adam, lr=0.01, amsgrad=True),
    "adamw foreach": functools.partial(AdamW, lr=0.01, foreach=True),
    "adamw fused": functools.partial(AdamW, lr=0.01, fused=True),
    "adam tensor lr": lambda params: Adam(params, lr=torch.tensor(0.01), foreach=False),
    "nadam": functools.partial(NAdam, lr=0.01),
    "rmsprop": functools.partial(RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": functools.partial(Adagrad, lr=0.1),
    "adadelta": functools.partial(Adadelta, lr=0.1),
    "adafactor": functools.partial(Adafactor, lr=0.1),
    "lbfgs": functools.partial(LBFGS, lr=0.1, history_size=3, max_iter=4),
}


def optimized(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("stepped", [False, True], ids=["into a new one", "into a stepped one"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit(kind, stepped):
    model = Elementwise()
    optimizer = KINDS[kind](optimized(model))
    trained(model, optimizer, 3)
    tree = optimizer_state(optimizer, parameter_names(model))
    again = Elementwise(seed=5)
    other = KINDS[kind](optimized(again))
    if stepped:
        trained(again, other, 2, seed=9)
    fill = fill_of(tree, other, parameter_names(again))
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    fill.apply()
    assert same(optimizer_state(other, parameter_names(again)), tree)
    trained(model, optimizer, 3, seed=1)
    trained(again, other, 3, seed=1)
    assert same(bits(again), bits(model))


def test_sparse_training_goes_on_bit_for_bit():
    model, again = Sparse(), Sparse(seed=3)
    optimizer, other = (SparseAdam(list(m.parameters()), lr=0.1) for m in (model, again))
    trained(model, optimizer, 3)
    fill = fill_of(
        optimizer_state(optimizer, parameter_names(model)), other, parameter_names(again)
    )
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    fill.apply()
    trained(model, optimizer, 2, seed=1)
    trained(again, other, 2, seed=1)
    assert same(bits(again), bits(model))


def moments_in_fp32(optimizer):
    for held in optimizer.state.values():
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                held[key] = value.float()


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "with a hook"])
def test_fp32_moments_of_bf16_parameters_are_not_cast(hooked):
    model = Elementwise(torch.bfloat16)
    optimizer = Adam(optimized(model), lr=0.01, foreach=False)
    trained(model, optimizer, 1)
    moments_in_fp32(optimizer)
    tree = optimizer_state(optimizer, parameter_names(model))
    assert tree["state"]["scale"]["exp_avg"].dtype == torch.float32
    again = Elementwise(torch.bfloat16, seed=5)
    other = Adam(optimized(again), lr=0.01, foreach=False)
    if hooked:
        other.register_load_state_dict_post_hook(lambda _: None)
    fill_of(tree, other, parameter_names(again)).apply()
    assert same(optimizer_state(other, parameter_names(again)), tree)


@pytest.mark.parametrize("kind", ["sgd momentum", "adam", "rmsprop", "adagrad", "adafactor"])
def test_bf16_training_goes_on_bit_for_bit(kind):
    model, again = Elementwise(torch.bfloat16), Elementwise(torch.bfloat16, seed=5)
    optimizer, other = KINDS[kind](optimized(model)), KINDS[kind](optimized(again))
    trained(model, optimizer, 3)
    fill = fill_of(
        optimizer_state(optimizer, parameter_names(model)), other, parameter_names(again)
    )
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    fill.apply()
    trained(model, optimizer, 2, seed=1)
    trained(again, other, 2, seed=1)
    assert same(bits(again), bits(model))


def test_the_tree_is_by_names_and_holds_the_live_tensors():
    model = Elementwise()
    optimizer = Adam(optimized(model), lr=0.01)
    trained(model, optimizer, 1)
    tree = optimizer_state(optimizer, parameter_names(model))
    assert tree["state"].keys() == {"scale", "shift", "gain"}  # unused has no state, frozen no part
    assert tree["state"]["scale"]["exp_avg"] is optimizer.state[model.scale]["exp_avg"]
    (group,) = tree["param_groups"]
    assert group["params"] == ["scale", "shift", "gain", "unused"]
    assert group["lr"] == 0.01
    assert tree.keys() == {"state", "param_groups"}


def test_loading_the_state_of_an_unstepped_optimizer_leaves_none():
    model, again = Elementwise(), Elementwise()
    optimizer, other = Adam(optimized(model), lr=0.5), Adam(optimized(again), lr=0.01)
    trained(again, other, 2)
    names = parameter_names(again)
    fill_of(optimizer_state(optimizer, parameter_names(model)), other, names).apply()
    assert not other.state
    assert other.param_groups[0]["lr"] == 0.5


def two_groups(model, *, swapped=False, lrs=(0.1, 0.2)):
    first = {"params": [model.scale, model.gain], "lr": lrs[0], "betas": (0.5, 0.6)}
    second = {"params": [model.unused, model.shift], "lr": lrs[1], "weight_decay": 0.3}
    return Adam([second, first] if swapped else [first, second])


def test_groups_are_matched_by_their_parameters_in_any_order():
    model, again = Elementwise(), Elementwise(seed=5)
    optimizer, other = two_groups(model), two_groups(again, swapped=True, lrs=(9, 9))
    other.param_groups[0]["ours"] = "kept"
    trained(model, optimizer, 2)
    fill = fill_of(
        optimizer_state(optimizer, parameter_names(model)), other, parameter_names(again)
    )
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    fill.apply()
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]
    assert other.param_groups[1]["betas"] == (0.5, 0.6)
    assert other.param_groups[0]["weight_decay"] == 0.3
    assert other.param_groups[0]["ours"] == "kept"
    assert other.param_groups[0]["params"][1] is again.shift
    trained(model, optimizer, 2, seed=1)
    trained(again, other, 2, seed=1)
    assert same(bits(again), bits(model))


def test_a_group_can_be_split_but_different_ones_cannot_be_joined():
    model = Elementwise()
    names = parameter_names(model)
    stored, _ = stored_of(optimizer_state(Adam(optimized(model), lr=0.7), names))
    split = two_groups(model)
    target = OptimizerTarget(split, names)
    assert target.problems(stored) == ([], [], [])
    OptimizerFill(target, stored).apply()
    assert [group["lr"] for group in split.param_groups] == [0.7, 0.7]

    stored, _ = stored_of(optimizer_state(two_groups(model), names))
    missing, unexpected, (reason,) = OptimizerTarget(Adam(optimized(model)), names).problems(stored)
    assert (missing, unexpected) == ([], [])
    assert "scale" in reason
    assert "shift" in reason
    assert "betas, lr, weight_decay" in reason
    alike = Adam([{"params": [model.scale]}, {"params": [model.shift, model.gain, model.unused]}])
    stored, _ = stored_of(optimizer_state(alike, names))
    assert OptimizerTarget(Adam(optimized(model)), names).problems(stored) == ([], [], [])


def test_parameters_of_one_side_only_are_told_and_left_alone():
    model, again = Elementwise(), Elementwise()
    optimizer = Adam([model.scale, model.shift], lr=0.1)
    trained(model, optimizer, 1)
    other = Adam([again.scale, again.gain], lr=0.2)
    trained(again, other, 2)
    stored, _ = stored_of(optimizer_state(optimizer, parameter_names(model)))
    names = parameter_names(again)
    assert OptimizerTarget(other, names).problems(stored) == (["state.gain"], ["state.shift"], [])
    gain = other.state[again.gain]
    fill_of(optimizer_state(optimizer, parameter_names(model)), other, names).apply()
    assert other.state[again.gain] is gain
    assert other.state[again.scale]["step"] == 1
    assert len(other.state) == 2


@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_undo_restores_the_very_same_dicts(kind):
    make = KINDS.get(kind, lambda params: Counting(params, lr=0.1, momentum=0.9))
    model, again = Elementwise(), Elementwise(seed=5)
    optimizer, other = make(optimized(model)), make(optimized(again))
    trained(model, optimizer, 3)
    trained(again, other, 2)
    before = copy.deepcopy(optimizer_state(other, parameter_names(again)))
    dicts = {key: id(held) for key, held in other.state.items()}
    groups = [id(group) for group in other.param_groups]
    fill = fill_of(
        optimizer_state(optimizer, parameter_names(model)), other, parameter_names(again)
    )
    fill.undo()  # nothing to undo yet
    fill.apply()
    fill.undo()
    assert same(optimizer_state(other, parameter_names(again)), before)
    assert {key: id(held) for key, held in other.state.items()} == dicts
    assert [id(group) for group in other.param_groups] == groups
    trained(again, other, 1)
    after = optimizer_state(other, parameter_names(again))
    fill.undo()  # a second time does nothing
    assert same(optimizer_state(other, parameter_names(again)), after)


class Counting(SGD):
    """An optimizer with a state dict of its own making."""

    fails = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict):
        self.calls = state_dict["calls"]
        super().load_state_dict({key: v for key, v in state_dict.items() if key != "calls"})
        if self.fails:
            self.fails = False
            raise RuntimeError("failed midway")


def test_an_optimizer_with_a_protocol_of_its_own_is_asked_by_it():
    model, again = Elementwise(), Elementwise(seed=5)
    optimizer = Counting([{"params": [model.shift]}, {"params": [model.scale], "lr": 0.3}], lr=0.1)
    other = Counting([{"params": [again.scale]}, {"params": [again.shift]}], lr=0.2, momentum=0.9)
    optimizer.param_groups[0]["momentum"] = 0.9
    trained(model, optimizer, 3)
    tree = optimizer_state(optimizer, parameter_names(model))
    assert tree["calls"] == 3
    assert tree["param_groups"][0]["params"] == ["shift"]
    assert tree["state"].keys() == {"shift"}
    fill = fill_of(tree, other, parameter_names(again))
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    fill.apply()
    assert other.calls == 3
    assert [group["lr"] for group in other.param_groups] == [0.3, 0.1]
    trained(model, optimizer, 2, seed=1)
    trained(again, other, 2, seed=1)
    assert same(bits(again), bits(model))


def test_a_protocol_that_fails_midway_is_undone():
    model, again = Elementwise(), Elementwise(seed=5)
    optimizer, other = (Counting(optimized(m), lr=0.1, momentum=0.9) for m in (model, again))
    trained(model, optimizer, 3)
    trained(again, other, 1)
    before = copy.deepcopy(optimizer_state(other, parameter_names(again)))
    fill = fill_of(
        optimizer_state(optimizer, parameter_names(model)), other, parameter_names(again)
    )
    other.fails = True
    with pytest.raises(RuntimeError, match="midway"):
        fill.apply()
    assert other.calls == 3
    fill.undo()
    assert other.calls == 1
    assert same(optimizer_state(other, parameter_names(again)), before)


class InPlace(SGD):
    """Loads into the tensors it has and then fails, and afterwards fails at once."""

    has_failed = False

    def load_state_dict(self, state_dict):
        if self.has_failed:
            raise RuntimeError("failed again")
        self.has_failed = True
        for held, (_, new) in zip(
            self.state.values(), sorted(state_dict["state"].items()), strict=True
        ):
            held["momentum_buffer"].copy_(new["momentum_buffer"])
        raise RuntimeError("failed at the end")


def test_values_written_in_place_are_put_back_even_if_it_fails_again():
    model, again = Elementwise(), Elementwise(seed=5)
    optimizer, other = (InPlace(optimized(m), lr=0.1, momentum=0.9) for m in (model, again))
    trained(model, optimizer, 3)
    trained(again, other, 1)
    names = parameter_names(again)
    before = copy.deepcopy(optimizer_state(other, names))
    fill = fill_of(optimizer_state(optimizer, parameter_names(model)), other, names)
    with pytest.raises(RuntimeError, match="at the end"):
        fill.apply()
    assert not same(optimizer_state(other, names), before)
    with pytest.raises(RuntimeError, match="again"):
        fill.undo()
    assert same(optimizer_state(other, names), before)


class Opaque(SGD):
    """An optimizer whose state dict is nothing like torch's."""

    def state_dict(self):
        return {"lr": self.param_groups[0]["lr"], "inner": [torch.full((2,), 3.0)]}

    def load_state_dict(self, state_dict):
        self.param_groups[0]["lr"] = state_dict["lr"]
        self.inner = state_dict["inner"]


def test_a_state_that_is_not_made_as_torchs_is_taken_as_it_is():
    model = Elementwise()
    names = parameter_names(model)
    tree = optimizer_state(Opaque(optimized(model), lr=0.5), names)
    other = Opaque(optimized(model), lr=0.1)
    fill_of(tree, other, names).apply()
    assert other.param_groups[0]["lr"] == 0.5
    assert other.inner[0].tolist() == [3, 3]
    plain = Adam(optimized(model))
    _, _, (reason,) = OptimizerTarget(plain, names).problems(stored_of(tree)[0])
    assert "Adam" in reason
    with pytest.raises(LoadError, match="another way"):
        OptimizerFill(OptimizerTarget(plain, names), tree)


def test_state_that_belongs_to_no_parameter_is_kept():
    model, again = Elementwise(), Elementwise()
    optimizer, other = SGD(optimized(model), lr=0.1), SGD(optimized(again), lr=0.1)
    optimizer.state["schedule"] = {"done": 3, "average": torch.ones(2)}
    other.state["forgotten"] = 1
    tree = optimizer_state(optimizer, parameter_names(model))
    assert tree["other"].keys() == {"schedule"}
    fill_of(tree, other, parameter_names(again)).apply()
    assert same(dict(other.state), {"schedule": {"done": 3, "average": torch.ones(2)}})


def test_arrays_in_the_state_are_asked_for_too():
    model = Elementwise().to("meta")  # stands for a device that is not the CPU
    ref = LeafRef(kind="array", name="history")
    stored = {
        "state": {"scale": {"history": ref}, "gone": {"history": ref}},
        "param_groups": [{"params": ["scale", "gone"]}],
    }
    target = OptimizerTarget(Adam([model.scale]), {id(model.scale): "scale"})
    ((path, found, like),) = target.likes(stored, lambda _: (6, 4))
    assert (path, found) == (("state", "scale", "history"), ref)
    assert like == Like(device=torch.device("cpu"))


def test_tensor_hyper_parameters_are_filled_in_place():
    model, again = Elementwise(), Elementwise()
    optimizer = Adam(
        [{"params": [model.scale], "lr": torch.tensor(0.1)}, {"params": [model.shift], "lr": 0.2}]
    )
    shared = torch.tensor(0.9)
    other = Adam([{"params": [again.scale]}, {"params": [again.shift]}], lr=shared)
    fill = fill_of(
        optimizer_state(optimizer, parameter_names(model)), other, parameter_names(again)
    )
    fill.apply()
    assert other.param_groups[0]["lr"] is shared
    assert [round(float(group["lr"]), 4) for group in other.param_groups] == [0.1, 0.2]
    fill.undo()
    assert all(group["lr"] is shared for group in other.param_groups)
    assert shared == torch.tensor(0.9)


def test_state_lies_in_memory_as_its_parameter():
    def made(seed):
        torch.manual_seed(seed)
        kernel = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        return nn.ParameterDict({"kernel": nn.Parameter(kernel)})

    def step(model, optimizer):
        optimizer.zero_grad()
        model["kernel"].square().sum().backward()
        optimizer.step()

    model, again = made(1), made(2)
    optimizer, other = (Adam(m.parameters(), fused=True) for m in (model, again))
    step(model, optimizer)
    fill = fill_of(
        optimizer_state(optimizer, parameter_names(model)), other, parameter_names(again)
    )
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    fill.apply()
    assert other.state[again["kernel"]]["exp_avg"].stride() == again["kernel"].stride()
    step(model, optimizer)
    step(again, other)
    assert same(bits(again), bits(model))


def test_what_a_module_does_not_name_is_called_as_the_optimizer_calls_it():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    tree = optimizer_state(SGD([("mine", one), ("yours", other)], lr=1), {})
    assert tree["param_groups"][0]["params"] == ["mine", "yours"]
    assert "param_names" not in tree["param_groups"][0]
    tree = optimizer_state(SGD([{"params": [one]}, {"params": [other]}], lr=1), {id(other): "b"})
    assert [group["params"] for group in tree["param_groups"]] == [["group0.0"], ["b"]]


def test_names_given_to_the_optimizer_stay_its_own():
    model = Elementwise()
    optimizer = SGD([("renamed", model.scale), ("shift", model.shift)], lr=1)
    fill_of(optimizer_state(optimizer, {}), optimizer, {}).apply()
    assert optimizer.param_groups[0]["param_names"] == ["renamed", "shift"]


def test_two_parameters_with_one_name_are_refused():
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    with pytest.raises(SaveError, match="'weight'"):
        optimizer_state(SGD([one, other], lr=1), {id(one): "weight", id(other): "weight"})


def test_state_of_a_tensor_in_no_group_is_refused():
    model = Elementwise()
    optimizer = SGD([model.scale], lr=1)
    optimizer.state[model.shift]["left"] = 1
    with pytest.raises(SaveError, match="none of its param_groups"):
        optimizer_state(optimizer, parameter_names(model))


@pytest.mark.parametrize(
    "stored",
    [
        None,
        {"state": {"scale": 3}, "param_groups": [{"params": ["scale"]}]},
        {"state": {}, "param_groups": [{"params": [3]}]},
        {"state": {}, "param_groups": [{"params": "scale"}]},
        {"state": {}, "param_groups": [{"params": ["scale"]}, {"params": ["scale"]}]},
        {"state": {}, "param_groups": [{}]},
        {"state": {}, "param_groups": [], "other": 3},
    ],
)
def test_a_malformed_tree_changes_nothing(stored):
    model = Elementwise()
    optimizer = Adam(optimized(model))
    trained(model, optimizer, 1)
    before = copy.deepcopy(optimizer_state(optimizer, parameter_names(model)))
    with pytest.raises(LoadError):
        OptimizerFill(OptimizerTarget(optimizer, parameter_names(model)), stored)
    assert same(optimizer_state(optimizer, parameter_names(model)), before)


def test_groups_without_parameters_are_matched_by_position():
    model = Elementwise()
    names = parameter_names(model)

    def made(lr):
        return SGD([{"params": []}, {"params": [model.scale]}, {"params": [], "lr": lr}], lr=1)

    other = made(0.2)
    fill_of(optimizer_state(made(0.4), names), other, names).apply()
    assert [group["lr"] for group in other.param_groups] == [1, 1, 0.4]


def test_the_step_is_on_the_cpu_unless_torch_wants_it_elsewhere():
    model = Elementwise()
    meta = Elementwise().to("meta")  # stands for a device that is not the CPU
    for flags, device in (({}, "cpu"), ({"capturable": True}, "meta"), ({"fused": True}, "meta")):
        optimizer = Adam(optimized(model))
        trained(model, optimizer, 1)
        optimizer.param_groups[0].update(flags)
        stored, tensors = stored_of(optimizer_state(optimizer, parameter_names(model)))
        target = OptimizerTarget(Adam(optimized(meta)), parameter_names(meta))
        likes = {
            path: like.device.type
            for path, _, like in target.likes(stored, lambda name: tuple(tensors[name].shape))  # noqa: B023
        }
        assert likes["state", "scale", "step"] == device
        assert likes["state", "gain", "step"] == device
        assert likes["state", "gain", "exp_avg"] == "meta"
        assert likes["state", "scale", "exp_avg"] == "meta"


def test_every_optimizer_of_torch_is_read_directly():
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            assert kind.state_dict is Optimizer.state_dict
