"""Sharded modules and their optimizers: state by names, and back into the same mesh."""

import pytest

from holdfast.testing import RankGang


@pytest.fixture(scope="module")
def gang():
    with RankGang(2) as ranks:
        yield ranks


def made(seed, kind="adam", *, device="cpu", reshard=True):
    """Parameters that 2 ranks share evenly, unevenly and so that one of them has nothing."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2,))
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    kinds = {
        "adam": lambda params: torch.optim.Adam(params, lr=0.01),
        "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    }
    return model, kinds[kind](model.parameters())


def trained(rank, model, optimizer, steps, seed):
    import torch

    make = torch.Generator().manual_seed(seed + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=make)).square().mean().backward()
        optimizer.step()


def stored_of(tree):
    """As a checkpoint has it: references for tensors; whole tensors beside it."""
    import torch
    from torch.distributed.tensor import DTensor

    from holdfast.format import LeafRef, decode_value, encode_value

    whole = {}

    def leaf(path, value):
        if not isinstance(value, torch.Tensor):
            return None
        name = ".".join(map(str, path))
        whole[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        return LeafRef(kind="tensor", name=name)

    return decode_value(encode_value(tree, leaf=leaf)), whole


def laid(tensor, like):
    from torch.distributed.tensor import distribute_tensor

    from holdfast.distributed._tensors import local_of, wrap

    if like.mesh is None:
        return tensor.to(like.device)
    local = local_of(distribute_tensor(tensor, like.mesh, like.placements)).clone()
    return wrap(local, like, tuple(tensor.shape))


def filled(value, tensors):
    from holdfast.format import LeafRef

    if isinstance(value, LeafRef):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: filled(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(each, tensors) for each in value)
    return value


def same(one, other):
    import torch

    from holdfast.distributed._tensors import Like, local_of

    if isinstance(one, torch.Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and Like.of(one) == Like.of(other)
            and torch.equal(local_of(one), local_of(other))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def copied(tree):
    import copy

    import torch

    from holdfast.distributed._tensors import Like, local_of, wrap

    if isinstance(tree, torch.Tensor):
        return wrap(local_of(tree).clone(), Like.of(tree), tuple(tree.shape))
    if isinstance(tree, dict):
        return {key: copied(each) for key, each in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(copied, tree))
    return copy.deepcopy(tree)


def fills(model, optimizer, values, tree):
    """What loads the state of a module and an optimizer, and the layouts that were asked for."""
    from holdfast.distributed._modules import ModuleFill, module_state, parameter_names
    from holdfast.distributed._optimizers import OptimizerFill, OptimizerTarget
    from holdfast.distributed._tensors import Like

    stored, whole = stored_of(tree)
    target = OptimizerTarget(optimizer, parameter_names(model))
    assert target.problems(stored) == ([], [], [])
    likes = {
        ref.name: like
        for _, ref, like in target.likes(stored, lambda name: tuple(whole[name].shape))
    }
    assert likes.keys() == whole.keys()
    tensors = {name: laid(whole[name], like) for name, like in likes.items()}
    state = module_state(model, loading=True)
    _, weights = stored_of(dict(values))
    staged = {name: laid(weights[name], Like.of(live)) for name, live in state.values.items()}
    return (
        [ModuleFill(state, staged), OptimizerFill(target, filled(stored, tensors))],
        likes,
    )


def round_trip(rank, kind, stepped):
    from holdfast.distributed._modules import module_state, parameter_names
    from holdfast.distributed._optimizers import optimizer_state

    model, optimizer = made(0, kind)
    trained(rank, model, optimizer, 2, 0)
    tree = optimizer_state(optimizer, parameter_names(model))
    again, other = made(1, kind)
    if stepped:
        trained(rank, again, other, 1, 7)
    before = copied(optimizer_state(other, parameter_names(again)))
    weights = copied(dict(module_state(again).values))
    actions, likes = fills(again, other, module_state(model).values, tree)
    for action in actions:
        action.apply()
    assert same(optimizer_state(other, parameter_names(again)), tree)
    for action in reversed(actions):
        action.undo()
    assert same(optimizer_state(other, parameter_names(again)), before)
    assert same(dict(module_state(again).values), weights)
    actions, _ = fills(again, other, module_state(model).values, tree)
    for action in actions:
        action.apply()
    trained(rank, model, optimizer, 2, 3)
    trained(rank, again, other, 2, 3)
    assert same(dict(module_state(again).values), dict(module_state(model).values))
    assert same(
        optimizer_state(other, parameter_names(again)),
        optimizer_state(optimizer, parameter_names(model)),
    )
    return sorted(name for name, like in likes.items() if like.mesh is not None)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", ["adam", "fused", "sgd", "adagrad"])
def test_sharded_training_goes_on_bit_for_bit(gang, kind, stepped):
    keys = {
        "adam": ["exp_avg", "exp_avg_sq"],
        "fused": ["exp_avg", "exp_avg_sq"],
        "sgd": ["momentum_buffer"],
        "adagrad": ["sum"],
    }
    for sharded in gang.run(round_trip, kind, stepped):
        assert sharded == [
            f"state.{layer}.{name}.{key}"
            for layer in (0, 2)
            for name in ("bias", "weight")
            for key in keys[kind]
        ]


def after_a_forward(rank):
    import torch

    from holdfast.distributed._modules import parameter_names
    from holdfast.distributed._optimizers import optimizer_state

    model, optimizer = made(0, reshard=False)
    trained(rank, model, optimizer, 1, 0)
    model(torch.randn(2, 4))  # leaves gathered parameters in the place of the optimizer's
    return optimizer_state(optimizer, parameter_names(model))["param_groups"][0]["params"]


def test_names_are_found_while_parameters_are_gathered(gang):
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert gang.run(after_a_forward) == [names, names]


def into_meta(rank):
    import torch

    from holdfast.distributed._modules import ModuleFill, module_state
    from holdfast.distributed._tensors import Like

    model, _ = made(0)
    values = dict(module_state(model).values)
    again, _ = made(1, device="meta")
    state = module_state(again, loading=True)
    _, whole = stored_of(values)
    likes = {name: Like.of(value) for name, value in values.items()}
    fill = ModuleFill(state, {name: laid(whole[name], like) for name, like in likes.items()})
    fill.apply()
    assert same(dict(module_state(again).values), values)
    x = torch.randn(2, 4)
    assert torch.equal(again(x), model(x))
    return all(p.requires_grad for p in again.parameters())


def test_a_sharded_model_on_the_meta_device_becomes_real(gang):
    assert gang.run(into_meta) == [True, True]


def odd_shapes(rank):
    from holdfast.distributed._modules import parameter_names
    from holdfast.distributed._optimizers import OptimizerTarget
    from holdfast.format import LeafRef

    model, optimizer = made(0)
    shapes = {"row": (6, 1), "step": (), "flag": ()}
    stored = {
        "state": {"0.weight": {key: LeafRef(kind="tensor", name=key) for key in shapes}},
        "param_groups": [{"params": ["0.weight", "0.bias", "2.weight", "2.bias"]}],
    }
    target = OptimizerTarget(optimizer, parameter_names(model))
    return {
        ref.name: (like.device.type, like.mesh is not None, [str(p) for p in like.placements])
        for _, ref, like in target.likes(stored, shapes.__getitem__)
    }


def test_state_of_another_shape_than_its_parameter_is_whole_on_every_rank(gang):
    for likes in gang.run(odd_shapes):
        assert likes == {
            "row": ("cpu", True, ["R"]),
            "step": ("cpu", False, []),
            "flag": ("cpu", False, []),
        }


def data_parallel(rank):
    import torch
    from torch import nn

    from holdfast.distributed._modules import ModuleFill, module_state, parameter_names

    net = nn.parallel.DistributedDataParallel(nn.ModuleDict({"module": nn.Linear(2, 2)}))
    state = module_state(net)
    ModuleFill(state, {"module.bias": torch.tensor([1.0, 2.0])}).apply()
    return [*state.values], [*parameter_names(net).values()], net.module["module"].bias.tolist()


def test_data_parallel_leaves_no_trace_in_names(gang):
    names = ["module.weight", "module.bias"]
    assert gang.run(data_parallel) == [(names, names, [1, 2])] * 2
