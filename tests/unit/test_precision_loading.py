"""States that are loaded into a MixedPrecisionOptimizer: what fits, and what is refused with the
whole list and nothing changed."""

import copy
import dataclasses
import math
import signal

import pytest
import torch
from torch import nn

from holdfast.errors import SaveError, ValidationError
from holdfast.precision import (
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    load_and_restore,
    restore_checkpoint,
    save_checkpoint,
    take_over,
)

FP16 = MixedPrecisionOptions.for_fp16(initial_scale=64.0, max_consecutive_overflows=3)
FP32 = MixedPrecisionOptions(precision="fp32")


def made(options=FP16, seed=0, kind=torch.optim.AdamW, **words):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    inner = kind(model.parameters(), **{"lr": 0.01, **words})
    return MixedPrecisionOptimizer(inner, options, model=model)


def stepped(optimizer, steps=2, *, first=0):
    for step in range(first, first + steps):
        drawn = torch.Generator().manual_seed(step)
        for weight in optimizer.training_weights.values():
            gradient = torch.randn(weight.shape, generator=drawn, dtype=torch.float32)
            weight.grad = (gradient * optimizer.scaler.scale).to(weight.dtype)
        assert optimizer.step()
    return optimizer


def leaves(value, place=()):
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*place, key))]
    if isinstance(value, list | tuple):
        return [leaf for nth, item in enumerate(value) for leaf in leaves(item, (*place, nth))]
    if isinstance(value, torch.Tensor):
        value = (value.dtype, tuple(value.shape), value.detach().tolist())
    return [(place, value)]


def everything(optimizer):
    weights = {name: weight.detach() for name, weight in optimizer.training_weights.items()}
    return leaves({"weights": weights, "optimizer": optimizer.state_dict()})


def group(**changes):
    return lambda state: state["inner"]["groups"][0].update(changes)


def held(**changes):
    return lambda state: state["inner"]["state"]["0.weight"].update(changes)


def without(*names):
    return lambda state: [state["inner"]["state"]["0.weight"].pop(name) for name in names]


BAD = {
    "no dict at all": (None, "no version"),
    "an empty one": (lambda s: s.clear(), "no version"),
    "version 0": (lambda s: s.update(version=0), "version is 0"),
    "version True": (lambda s: s.update(version=True), "version is True"),
    "a master that is a list": (
        lambda s: s["masters"].update({"0.bias": [1]}),
        "0.bias' is no ten",
    ),
    "a sparse master": (
        lambda s: s["masters"].update({"0.weight": torch.ones(6, 4).to_sparse()}),
        "torch.sparse_coo tensor",
    ),
    "a master of integers": (
        lambda s: s["masters"].update({"0.bias": torch.ones(6, dtype=torch.int64)}),
        "is of torch.int64",
    ),
    "a master that nothing computes with": (
        lambda s: s["masters"].update({"0.bias": torch.ones(6).to(torch.float8_e4m3fn)}),
        "is of torch.float8_e4m3fn",
    ),
    "a name that is a number": (lambda s: s["masters"].update({3: torch.ones(1)}), "called 3"),
    "training weights None": (lambda s: s.update(training=None), "training is no dict"),
    "no count": (lambda s: s.update(step_count=None), "step_count is None"),
    "a count that is a float": (lambda s: s.update(skipped_steps=1.0), "skipped_steps is 1.0"),
    "a flag that is none": (lambda s: s.update(has_fallback="no"), "has_fallback is 'no'"),
    "no inner state": (lambda s: s["inner"].pop("state"), "'state'] is missing"),
    "inner state that is a list": (lambda s: s["inner"].update(state=[]), "'state'] is missing"),
    "no groups": (lambda s: s["inner"].update(groups=None), "'groups'] is missing"),
    "a group without parameters": (lambda s: s["inner"]["groups"][0].pop("params"), "group 0 of"),
    "parameters that are numbers": (group(params=[0, 1]), "group 0 of"),
    "state of a parameter that is a list": (
        lambda s: s["inner"]["state"].update({"0.weight": []}),
        "no dict of state of '0.weight'",
    ),
    "options that are a tensor": (lambda s: s.update(options=torch.ones(2)), "it is no dict"),
    "a scale that is a tensor": (
        lambda s: s["scaler"].update(scale=torch.tensor(2.0)),
        "scale is a tensor",
    ),
    "a scale that FP32 has not": (
        lambda s: s["scaler"].update(scale=1e-40, dynamic=False),
        "scale is 1e-40",
    ),
    "a rate that is text": (group(lr="fast"), "lr of group 0 is 'fast'"),
    "a rate that is None": (group(lr=None), "lr of group 0 is None"),
    "a rate that is NaN": (group(lr=math.nan), "lr of group 0 is nan"),
    "three rates": (group(lr=torch.ones(3)), "lr of group 0"),
    "three betas": (group(betas=(0.9, 0.9, 0.9)), "betas of group 0"),
    "betas that are text": (group(betas="ab"), "betas of group 0"),
    "a flag that is text": (group(amsgrad="yes"), "amsgrad of group 0"),
    "amsgrad without its state": (group(amsgrad=True), "no max_exp_avg_sq of '0.weight'"),
    "no moments": (without("exp_avg", "exp_avg_sq"), "no exp_avg of '0.weight'"),
    "a step that is a number": (held(step=3), "no step of '0.weight', or it is no tensor"),
    "three steps": (held(step=torch.ones(3)), "step of '0.weight' is"),
    "wide moments": (held(exp_avg=torch.ones(6, 4, dtype=torch.float64)), "exp_avg of '0.weight'"),
    "moments that are numbers": (held(exp_avg=1.5), "exp_avg of '0.weight'"),
    "moments without values": (held(exp_avg=torch.ones(6, 4, device="meta")), "exp_avg of '0.w"),
}


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "trained"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_no_state_is_refused_and_changes_nothing(case, fresh):
    change, word = BAD[case]
    state = copy.deepcopy(stepped(made(seed=1)).state_dict())
    if change is None:
        state = None
    else:
        change(state)
    optimizer = made() if fresh else stepped(made(), 3)
    before = everything(optimizer)
    with pytest.raises(ValidationError) as caught:
        optimizer.load_state_dict(state)
    assert word in str(caught.value)
    assert everything(optimizer) == before


def test_every_problem_is_told_at_once():
    state = copy.deepcopy(stepped(made(seed=1)).state_dict())
    for change in (group(lr="fast", betas=3), held(exp_avg=torch.ones(2)), without("exp_avg_sq")):
        change(state)
    state["masters"]["0.bias"] = torch.full((6,), math.nan)
    state["masters"]["2.bias"] = torch.ones(7)
    with pytest.raises(ValidationError) as caught:
        made().load_state_dict(state)
    words = (
        "lr",
        "betas",
        "exp_avg of",
        "no exp_avg_sq",
        "'0.bias' is not finite",
        "'2.bias' is 7",
    )
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("where", ["checkpoint", "file", "grad scaler"])
def test_the_other_ways_in_refuse_the_same(tmp_path, where):
    source = stepped(made(seed=1))
    optimizer = stepped(made(), 3)
    before = everything(optimizer)
    with pytest.raises(ValidationError, match="lr of group 0 is 'fast'"):
        if where == "grad scaler":
            packed = source.inner.state_dict()
            packed["param_groups"][0]["lr"] = "fast"
            take_over(optimizer, torch.amp.GradScaler("cpu").state_dict(), packed)
        else:
            checkpoint = create_checkpoint(source)
            checkpoint.base_optimizer_state["groups"][0]["lr"] = "fast"
            if where == "file":
                save_checkpoint(checkpoint, tmp_path / "a")
                load_and_restore(optimizer, tmp_path / "a")
            restore_checkpoint(optimizer, checkpoint)
    assert everything(optimizer) == before


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (torch.tensor([0.01]), torch.tensor([0.5])),
        (torch.tensor(0.01), 0.5),
        (0.01, torch.tensor(0.5)),
        (torch.tensor(0.01, dtype=torch.float64), torch.tensor(0.5)),
    ],
    ids=str,
)
def test_a_rate_comes_back_as_it_was(saved, live):
    """Not rounded to what the optimizer had, or the next steps would be others."""
    first, second = stepped(made(lr=saved, fused=True)), made(lr=live, fused=True, seed=3)
    before = second.param_groups[0]["lr"]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    found = second.param_groups[0]["lr"]
    assert type(found) is type(saved)
    assert leaves(found) == leaves(saved)
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        assert (found is before) == (saved.dtype is live.dtype)
    assert everything(stepped(first, first=2)) == everything(stepped(second, first=2))


def test_what_a_scheduler_adds_to_groups_comes_back():
    first = made()
    torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.1, total_steps=10)
    stepped(first)
    second = made(seed=3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.param_groups[0]["max_lr"] == 0.1
    third = made(seed=4)
    torch.optim.lr_scheduler.OneCycleLR(third, max_lr=0.5, total_steps=10)
    third.load_state_dict(copy.deepcopy(made(seed=5).state_dict()))
    assert third.param_groups[0]["max_lr"] == 0.5


def test_state_of_what_is_no_parameter_is_refused():
    optimizer = stepped(made())
    optimizer.state["all of them"] = {"step": 3}
    for call in (optimizer.state_dict, lambda: create_checkpoint(optimizer)):
        with pytest.raises(SaveError, match="'all of them'"):
            call()


def test_a_state_of_an_optimizer_that_was_not_fused_is_none_for_remainders():
    bf16 = MixedPrecisionOptions.for_bf16()
    state = stepped(made(bf16, seed=1)).state_dict()
    options = dataclasses.replace(bf16, master_storage="remainder")
    optimizer = stepped(made(options, fused=True))
    before = everything(optimizer)
    with pytest.raises(ValidationError, match="was not fused"):
        optimizer.load_state_dict(state)
    assert everything(optimizer) == before


def test_hooks_of_torch_are_called():
    first, second, seen = stepped(made()), made(seed=2), []
    first.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    first.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    second.register_load_state_dict_pre_hook(
        lambda _, state: seen.append(state["more"]) or {**state, "step_count": 7}
    )
    second.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.step_count))
    second.load_state_dict(first.state_dict())
    assert seen == ["before saving", 1, 7]


class TestFp32TakesAny:
    """What a fallback that cannot be is told to do: FP32 goes on from the masters."""

    @pytest.mark.parametrize("fell_back", [False, True])
    @pytest.mark.parametrize("kept", [False, True], ids=["without weights", "with weights"])
    def test_from_16_bits(self, tmp_path, kept, fell_back):
        first = stepped(made())
        if fell_back:
            first.set_fallback(fallback=True)
            first.scaler.retire()
        save_checkpoint(create_checkpoint(first, training_weights=kept), tmp_path / "a")
        second = stepped(made(FP32, seed=2), 1)
        load_and_restore(second, tmp_path / "a")
        for name, master in first.master_weights.items():
            assert torch.equal(second.training_weights[name], master)
            assert second.training_weights[name].dtype is torch.float32
        assert second.scaler.scale == 1.0
        assert second.step_count == 2
        assert second.has_fallback is fell_back
        reference = made(FP32, seed=3)
        reference.load_state_dict(second.state_dict())
        assert everything(stepped(reference)) == everything(stepped(second))

    def test_but_16_bits_do_not_take_fp32(self):
        with pytest.raises(ValidationError, match="trained in fp32"):
            made().load_state_dict(stepped(made(FP32)).state_dict())

    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    def test_weights_alone_go_from_any_to_any(self, precision):
        first, second = stepped(made()), made(MixedPrecisionOptions(precision=precision), seed=2)
        restore_checkpoint(second, create_checkpoint(first), restore_state=False)
        for name, master in first.master_weights.items():
            assert torch.equal(second.master_weights[name], master)
            weight = second.training_weights[name]
            assert torch.equal(weight, master.to(weight.dtype))
        assert second.step_count == 0


def test_masters_of_the_model_also_when_the_state_has_fallen_back():
    """Those of the weights as they are, not the masters that were there before."""
    first = stepped(made())
    first.set_fallback(fallback=True)
    second = made(seed=2)
    for weight in second.training_weights.values():
        weight.data.fill_(0.75)  # as torch does not count it
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state, masters_from="model")
    assert second.has_fallback
    assert all((weight == 0.75).all() for weight in second.training_weights.values())


def test_masters_of_weights_that_are_not_finite_are_refused():
    checkpoint = create_checkpoint(stepped(made()))
    checkpoint.training_weights["0.weight"].fill_(math.nan)
    with pytest.raises(ValidationError, match="not finite"):
        restore_checkpoint(made(), checkpoint, masters_from="model")


def test_a_frozen_parameter_may_be_infinite():
    """A mask, say. Nothing is trained from it."""
    mask = [nn.Parameter(torch.full((3,), -math.inf), requires_grad=False) for _ in range(2)]
    first, second = (
        MixedPrecisionOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2)), each], lr=0.1), FP16)
        for each in mask
    )
    second.load_state_dict(first.state_dict())


def test_a_training_that_has_diverged_does_not_replace_a_good_file(tmp_path):
    optimizer = stepped(made())
    path = tmp_path / "a"
    save_checkpoint(create_checkpoint(optimizer), path)
    good = path.read_bytes()
    names = ("0.weight", "0.bias")
    with torch.no_grad():
        for name in names:
            optimizer.master_weights[name].fill_(math.inf)
    with pytest.raises(SaveError, match="not finite") as caught:
        save_checkpoint(create_checkpoint(optimizer), path)
    assert all(f"master_weights.{name}" in str(caught.value) for name in names)
    assert "1.weight" not in str(caught.value)
    assert path.read_bytes() == good


@pytest.mark.parametrize(
    "changes", [{"timestamp": "today"}, {"metadata": None}, {"skipped_steps": 3, "step_count": 2}]
)
def test_what_no_file_would_load_is_not_saved(tmp_path, changes):
    checkpoint = dataclasses.replace(create_checkpoint(stepped(made())), **changes)
    with pytest.raises(SaveError, match="not whole"):
        save_checkpoint(checkpoint, tmp_path / "a")


@pytest.fixture
def _ctrl_c():
    """As a program has it that was not started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_waits_until_a_state_is_loaded():
    """Whenever it comes, the optimizer is what it was or what was loaded."""
    state = copy.deepcopy(stepped(made(seed=1)).state_dict())
    optimizer = made()
    optimizer.choose_step = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(state)
    del optimizer.choose_step
    wanted = made(seed=2)
    wanted.load_state_dict(state)
    assert everything(optimizer) == everything(wanted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
