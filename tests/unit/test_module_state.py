"""A module's state has names that wrappers leave alone, and comes back in place or not at all."""

import copy
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from holdfast.distributed import _swapping
from holdfast.distributed._modules import ModuleFill, module_state, parameter_names
from holdfast.distributed._swapping import (
    Fill,
    Keep,
    Swap,
    replacing,
    replacing_all,
    strided_as,
    swap,
    undo_all,
)
from holdfast.errors import LoadError, SaveError


class Net(nn.Module):
    """A submodule of the user's own called ``module``, tied weights, and buffers of both kinds."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.module.weight
        self.norm.weight.requires_grad_(False)
        self.register_buffer("passing", torch.rand(2), persistent=False)


NAMES = [
    "module.weight",
    "module.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "head.weight",
]


def wrapped_inside():
    net = Net()
    net.norm = checkpoint_wrapper(net.norm)
    net.module = nn.DataParallel(torch.compile(net.module, backend="eager"))
    return nn.DataParallel(net)


WRAPPINGS = {
    "bare": Net,
    "data parallel": lambda: nn.DataParallel(Net()),
    "compiled": lambda: torch.compile(Net(), backend="eager"),
    "both": lambda: torch.compile(nn.DataParallel(Net()), backend="eager"),
    "checkpointed": lambda: checkpoint_wrapper(Net()),
    "inside": wrapped_inside,
}


def copies(state):
    return {name: copy.deepcopy(value) for name, value in state.values.items()}


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[name], value) if torch.is_tensor(one[name]) else one[name] == value
        for name, value in other.items()
    )


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappers_leave_no_trace_in_names(wrapping):
    net = WRAPPINGS[wrapping]()
    state = module_state(net)
    assert list(state.values) == NAMES
    assert state.parameters == set(NAMES) - state.buffers
    assert state.buffers == set(NAMES[4:7])
    assert set(state.keys.values()) == set(net.state_dict())
    names = parameter_names(net)
    by_id = {id(p): p for p in net.parameters()}
    assert list(names.values()) == ["module.weight", "module.bias", "norm.weight", "norm.bias"]
    for number, name in names.items():
        assert by_id[number].data_ptr() == state.values[name].data_ptr()


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_filling_keeps_parameters_tied_and_themselves(wrapping):
    net = WRAPPINGS[wrapping]()
    state = module_state(net)
    before = copies(state)
    passing = [buffer.clone() for name, buffer in net.named_buffers() if name.endswith("passing")]
    parameters = {name: id(p) for name, p in net.named_parameters(remove_duplicate=False)}
    grads = {name: p.requires_grad for name, p in net.named_parameters()}
    new = copies(module_state(Net(seed=1)))
    new["norm.running_mean"] += 3
    new["norm.num_batches_tracked"] += 7
    expected = copy.deepcopy(new)
    fill = ModuleFill(state, new)
    fill.undo()  # nothing to undo yet
    assert same(copies(state), before)
    fill.apply()
    assert same(copies(module_state(net)), expected)
    assert {n: id(p) for n, p in net.named_parameters(remove_duplicate=False)} == parameters
    assert {n: p.requires_grad for n, p in net.named_parameters()} == grads
    fill.undo()
    assert same(copies(module_state(net)), before)
    for old, (_, now) in zip(
        passing, ((n, b) for n, b in net.named_buffers() if n.endswith("passing")), strict=True
    ):
        assert torch.equal(old, now)
    ModuleFill(state, copy.deepcopy(expected)).apply()
    fill.undo()  # a second time does nothing
    assert same(copies(module_state(net)), expected)


def test_one_staged_tensor_for_two_tied_names_is_exchanged_once():
    net = Net()
    staged = torch.full((4, 3), 5.0)
    ModuleFill(module_state(net), {"module.weight": staged, "head.weight": staged}).apply()
    assert torch.equal(net.head.weight, torch.full((4, 3), 5.0))


def test_a_part_can_be_filled_and_is_cast_to_the_dtype_here():
    net = Net().to(torch.bfloat16)
    state = module_state(net)
    before = copies(state)
    fill = ModuleFill(state, {"module.bias": torch.arange(4.0), "norm.weight": torch.ones(4)})
    fill.apply()
    assert net.module.bias.dtype == torch.bfloat16
    assert net.module.bias.tolist() == [0, 1, 2, 3]
    changed = {n for n in NAMES if not torch.equal(before[n], state.values[n])}
    assert changed == {"module.bias"}  # norm.weight was one already
    fill.undo()
    assert same(copies(state), before)


def test_an_averaged_model_keeps_its_own_names():
    assert "module.module.weight" in module_state(AveragedModel(Net())).values
    assert "n_averaged" in module_state(AveragedModel(Net())).buffers


class Clashing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = checkpoint_wrapper(nn.Linear(2, 2))
        self.register_state_dict_post_hook(self._twice)

    @staticmethod
    def _twice(module, state, prefix, _):
        state[f"{prefix}inner._checkpoint_wrapped_module.bias"] = torch.zeros(2)


def test_two_keys_with_one_name_are_refused():
    with pytest.raises(SaveError, match=r"inner.bias.*inner._checkpoint_wrapped_module.bias"):
        module_state(Clashing())


def test_what_has_no_values_yet_is_refused():
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(SaveError, match=r"0.weight.*forward pass first"):
        module_state(lazy)
    with pytest.raises(LoadError, match="forward pass first"):
        module_state(lazy, loading=True)
    with pytest.raises(SaveError, match=r"0.weight is on the meta device"):
        module_state(nn.Sequential(nn.Linear(2, 2, device="meta")))


@pytest.mark.parametrize(
    ("new", "match"),
    [
        ({"module.bias": torch.zeros(4), "gone.bias": torch.zeros(4)}, "gone.bias"),
        (
            {"module.bias": torch.zeros(4), "norm.bias": torch.zeros(5)},
            r"norm.bias.*\(4,\).*\(5,\)",
        ),
        ({"module.bias": torch.zeros(4), "norm.bias": "text"}, "norm.bias.*str"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(new, match):
    net = Net()
    state = module_state(net, loading=True)
    before = copies(state)
    with pytest.raises(LoadError, match=match):
        ModuleFill(state, new)
    assert same(copies(state), before)


def test_an_expanded_buffer_cannot_be_filled():
    net = nn.Module()
    net.register_buffer("mask", torch.zeros(1).expand(4))
    with pytest.raises(LoadError, match=r"mask.*clone"):
        ModuleFill(module_state(net), {"mask": torch.ones(4)})


# --- extra states, hooks and loading of a module's own -------------------------------------------


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = {"seen": [1]}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra.clear()  # in place, so that whoever kept the object sees it, too
        self.extra.update(state)


def test_extra_states_are_given_by_the_module_and_back():
    net = nn.ModuleDict({"a": Counter(), "b": checkpoint_wrapper(Counter())})
    state = module_state(net)
    assert state.values["b._extra_state"] == {"seen": [1]}
    fill = ModuleFill(state, {"b._extra_state": {"seen": [2, 3]}, "a.weight": torch.ones(2)})
    fill.apply()
    assert net["b"].extra == {"seen": [2, 3]}
    assert net["a"].extra == {"seen": [1]}
    assert net["a"].weight.tolist() == [1, 1]
    fill.undo()
    assert net["b"].extra == {"seen": [1]}
    assert net["a"].weight.tolist() == [0, 0]


def test_an_extra_state_may_be_a_tensor():
    class Scale(nn.Module):
        scale = torch.ones(2)

        def get_extra_state(self):
            return self.scale

        def set_extra_state(self, state):
            self.scale = state * 1

    net = Scale()
    fill = ModuleFill(module_state(net), {"_extra_state": torch.tensor([3.0])})
    fill.apply()
    assert net.scale.tolist() == [3]
    fill.undo()
    assert net.scale.tolist() == [1, 1]


class Hooked(nn.Module):
    """Its hook changes what is loaded, what is not, and then fails."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()
        self.weight = nn.Parameter(torch.zeros(2))
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.fails = False
        self.called = 0
        self.register_load_state_dict_post_hook(self._after)

    @staticmethod
    def _after(module, _):
        module.called += 1
        with torch.no_grad():
            module.weight.mul_(2)
            module.bias.add_(1)
        module.scratch = torch.ones(2)
        if module.fails:
            raise RuntimeError("failed after changing things")


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_run_and_whatever_they_do_is_undone(fails):
    net = Hooked()
    scratch = net.scratch
    net.fails = fails
    new = {"weight": torch.ones(2), "counter._extra_state": {"seen": [9]}}
    fill = ModuleFill(module_state(net), new)
    if fails:
        with pytest.raises(RuntimeError, match="after changing"):
            fill.apply()
    else:
        fill.apply()
    assert net.called == 1
    assert net.weight.tolist() == [2, 2]
    assert net.bias.tolist() == [1, 1]
    assert net.counter.extra == {"seen": [9]}
    fill.undo()
    assert net.weight.tolist() == [0, 0]
    assert net.bias.tolist() == [0, 0]
    assert net.counter.extra == {"seen": [1]}
    assert net.scratch is scratch
    assert scratch.tolist() == [0, 0]


class Packed(nn.Module):
    """Keeps its values where no parameter or buffer is, and tells them in another form."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(2)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}double"] = self.kept * 2
        destination[f"{prefix}kept"] = self.kept
        destination[f"{prefix}note"] = "a text"

    def _load_from_state_dict(self, state, prefix, *args):
        self.kept.copy_(state[f"{prefix}double"] / 2)
        self.note = state[f"{prefix}note"]


def test_values_that_are_no_memory_of_the_module_go_by_its_own_loading():
    net = nn.Sequential(Packed(), nn.Linear(1, 1))
    fill = ModuleFill(
        module_state(net),
        {"0.double": torch.tensor([2.0, 4.0]), "0.note": "another", "1.bias": torch.ones(1)},
    )
    fill.apply()
    assert net[0].kept.tolist() == [1, 2]
    assert net[0].note == "another"
    assert net[1].bias.tolist() == [1]
    fill.undo()
    assert net[0].kept.tolist() == [0, 0]
    assert net[0].note == "a text"
    assert net[1].bias.tolist() != [1]


def test_transposed_values_of_hooks_are_the_same_memory():
    net = nn.Linear(2, 3)
    net.register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update({f"{prefix}weight": state[f"{prefix}weight"].t()})
    )
    net.register_load_state_dict_pre_hook(
        lambda _, state, prefix, *__: state.update(
            {f"{prefix}weight": state[f"{prefix}weight"].t()}
        )
    )
    ModuleFill(module_state(net), {"weight": torch.arange(6.0).view(2, 3)}).apply()
    assert net.weight.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_value_the_loading_has_no_place_for_is_an_error():
    net = nn.Linear(1, 1)
    net.register_state_dict_post_hook(lambda _, state, *__: state.update({"odd": 1}))
    fill = ModuleFill(module_state(net), {"odd": 2, "bias": torch.ones(1)})
    with pytest.raises(LoadError, match="'odd'"):
        fill.apply()
    fill.undo()
    assert net.bias.tolist() != [1]


# --- the meta device ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel, checkpoint_wrapper])
def test_a_model_on_the_meta_device_becomes_real(wrap):
    with torch.device("meta"):
        net = wrap(Net())
    inner = getattr(net, "module", net) if isinstance(net, nn.DataParallel) else net
    inner.head.weight = inner.module.weight
    inner.to(torch.float64)
    state = module_state(net, loading=True)
    new = copies(module_state(Net(seed=2)))
    del new["head.weight"]  # tied, so stored once
    fill = ModuleFill(state, copy.deepcopy(new), device="cpu")
    fill.apply()
    real = module_state(net)
    for name, value in new.items():
        assert torch.equal(real.values[name], value.to(real.values[name].dtype))
    assert real.values["module.weight"].dtype == torch.float64
    assert inner.head.weight is inner.module.weight
    assert isinstance(inner.head.weight, nn.Parameter)
    assert inner.module.weight.requires_grad
    assert not inner.norm.weight.requires_grad
    fill.undo()
    assert all(p.is_meta for p in net.parameters())
    assert inner.head.weight is inner.module.weight


def test_hooks_of_a_model_on_the_meta_device_see_all_of_its_state():
    with torch.device("meta"):
        net = nn.ModuleDict({"plain": nn.Linear(2, 2), "packed": Packed()})
    net["plain"].bias = nn.Parameter(torch.zeros(2))
    net["packed"].kept = torch.zeros(2)
    bias = net["plain"].bias
    fill = ModuleFill(
        module_state(net, loading=True),
        {"plain.weight": torch.ones(2, 2), "packed.double": torch.ones(2)},
    )
    fill.apply()
    assert net["plain"].weight.tolist() == [[1, 1], [1, 1]]
    assert net["plain"].bias is bias
    assert net["packed"].kept.tolist() == [0.5, 0.5]
    fill.undo()
    assert net["plain"].weight.is_meta
    assert net["packed"].kept.tolist() == [0, 0]


def test_meta_tensors_keep_the_order_of_their_memory():
    net = nn.Conv2d(3, 4, 2, device="meta").to(memory_format=torch.channels_last)
    kernel = torch.randn(4, 3, 2, 2)
    ModuleFill(module_state(net, loading=True), {"weight": kernel}).apply()
    assert torch.equal(net.weight, kernel)
    assert net.weight.is_contiguous(memory_format=torch.channels_last)
    assert net.bias.is_meta


# --- exchanging tensors ---------------------------------------------------------------------------


SHAPES = [
    lambda make: make(5, 7),
    lambda make: make(7, 5).t(),
    lambda make: make(10, 14)[::2, ::2],
    lambda make: make(()),
    lambda make: make(0, 3),
    lambda make: make(3, 70, 1000),
    lambda make: make(3, 1, 1000, 70).permute(0, 1, 3, 2),
    lambda make: make(120_000, 2),
    lambda make: make(2, 120_000),
    lambda make: make(1_048_577),  # two threads, and a last chunk that is short
    lambda make: make(2_000, 1_100).t(),
]


@pytest.mark.parametrize("make", SHAPES)
def test_tensors_of_any_strides_are_exchanged_and_put_back(make):
    live = make(torch.randn).requires_grad_()
    staged = torch.randn(live.shape)
    old, new = live.detach().clone(), staged.clone()
    swap(live, staged)
    assert torch.equal(live, new)
    assert torch.equal(staged, old)
    change = Swap(live, torch.full_like(staged, 2))
    change.apply()
    assert bool((live == 2).all())
    change.undo()
    assert torch.equal(live, new)
    with torch.no_grad():
        live += 1
    change.undo()  # a second time does nothing
    assert torch.equal(live, new + 1)


@pytest.mark.parametrize("made", [Swap, Fill])
def test_what_cannot_be_exchanged_is_refused_at_once(made):
    with pytest.raises(ValueError, match="shape"):
        made(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="expanded"):
        made(torch.zeros(1).expand(2), torch.zeros(2))
    with pytest.raises(ValueError, match="dtype"):
        Swap(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


class Breaking(torch.Tensor):
    """A tensor whose contents can be written so many times, and then no more."""

    left = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_ and type(args[0]) is cls:
            if Breaking.left == 0:
                raise RuntimeError("no more")
            Breaking.left -= 1
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("which", ["live", "staged"])
@pytest.mark.parametrize("left", range(4))
def test_an_exchange_that_fails_midway_is_undone(which, left):
    live, staged = torch.randn(3, 30_000), torch.randn(3, 30_000)
    old = live.clone()
    breaking = (live if which == "live" else staged).as_subclass(Breaking)
    change = Swap(breaking, staged) if which == "live" else Swap(live, breaking)
    Breaking.left = left
    if left < 3:
        with pytest.raises(RuntimeError, match="no more"):
            change.apply()
    else:
        change.apply()
    assert torch.equal(live, old) == (left == 0 and which == "live")
    Breaking.left = 99
    change.undo()
    assert torch.equal(live, old)


@pytest.mark.parametrize("elements", [100_000, 1_048_577])
@pytest.mark.parametrize("at", range(8))
def test_an_exchange_of_plain_memory_that_is_interrupted_anywhere_is_undone(
    monkeypatch, elements, at
):
    """Counts what is copied, by either thread, and interrupts instead of one of them or after."""
    live, staged = torch.randn(elements), torch.randn(elements)
    old, new = live.clone(), staged.clone()
    change = Swap(live, staged)
    bytes_of, lock, left = _swapping._bytes_of, threading.Lock(), [at // 2]

    class Interrupting(np.ndarray):
        def __setitem__(self, key, value):
            with lock:
                left[0] -= 1
                due = left[0] == -1
            if due and at % 2:
                raise KeyboardInterrupt
            super().__setitem__(key, value)
            if due:
                raise KeyboardInterrupt

    monkeypatch.setattr(_swapping, "_bytes_of", lambda memory: bytes_of(memory).view(Interrupting))
    try:
        change.apply()
    except KeyboardInterrupt:
        pass
    else:
        assert elements == 100_000  # which is copied at once
        assert torch.equal(live, new)
    left[0] = 1_000_000
    change.undo()
    assert torch.equal(live, old)
    change.undo()
    assert torch.equal(live, old)


@pytest.mark.parametrize("is_undone", [False, True])
def test_autograd_sees_an_exchange_of_what_it_needs(is_undone):
    weight = torch.randn(200_000, requires_grad=True)
    change = Swap(weight, torch.zeros(200_000))
    if is_undone:
        change.apply()
    loss = (weight * weight).sum()
    change.undo() if is_undone else change.apply()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_that_was_loaded_can_be_resized():
    live = torch.zeros(200_000)
    swap(live, torch.ones(200_000))
    live.resize_(400_000)
    assert bool((live[:200_000] == 1).all())


def resized_by_a_hook(live):
    """Its memory is elsewhere afterwards, and what was its own is somebody else's."""
    before = live.data_ptr()
    live.resize_(4_000_000)
    return torch.full((200_000,), 7.0), live.data_ptr() != before


def test_a_tensor_that_has_other_memory_by_now_is_put_back_there():
    live = torch.zeros(200_000)
    change = Swap(live, torch.ones(200_000))
    change.apply()
    others, is_elsewhere = resized_by_a_hook(live)
    assert is_elsewhere
    change.undo()
    assert bool((live[:200_000] == 0).all())
    assert bool((others == 7).all())


@pytest.mark.parametrize("elements", [8, 200_000])
@pytest.mark.parametrize("made", [Swap, Fill, "together", Keep])
def test_a_tensor_whose_memory_was_given_back_is_not_written_to(made, elements):
    live, staged = torch.zeros(elements), torch.ones(elements)
    if made == "together":
        (change,) = replacing_all([(live, staged)])
    else:
        change = made(live) if made is Keep else made(live, staged)
    change.apply()
    live.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was given back"):
        change.undo()


def test_undoing_what_is_undone_or_was_never_changed_does_nothing():
    live = torch.zeros(200_000)
    change = Swap(live, torch.ones(200_000))
    change.apply()
    change.undo()
    version = live._version
    live.untyped_storage().resize_(0)
    change.undo()
    refused = Swap(live, torch.ones(200_000))
    with pytest.raises(RuntimeError, match="was given back"):
        refused.apply()
    refused.undo()
    assert live._version == version + 1  # of the exchange that began


@pytest.mark.parametrize("elements", [100, 200_000])
def test_a_tensor_made_for_inference_is_filled_whatever_its_size(elements):
    with torch.inference_mode():
        live = torch.zeros(elements)
    swap(live, torch.ones(elements))
    assert bool((live == 1).all())


def test_values_that_are_not_their_bytes_are_exchanged_by_torch():
    live = torch.randn(100_000, dtype=torch.complex64).conj()
    staged = torch.randn(100_000, dtype=torch.complex64)
    old, new = live.clone(), staged.clone()
    swap(live, staged)
    assert torch.equal(live, new)
    assert torch.equal(staged, old)


def test_an_exchange_takes_little_memory():
    live, staged = torch.zeros(8192, 8192, dtype=torch.uint8), torch.ones(8192, 8192)
    staged = staged.to(torch.uint8)
    from torch.profiler import ProfilerActivity, profile

    tracemalloc.start()
    swap(live, staged)
    _, made = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < made <= 8 * 1024 * 1024
    assert bool((live == 1).all())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        swap(live.t(), staged)
    made = sum(max(0, event.self_cpu_memory_usage) for event in seen.events())
    assert 0 < made <= 8 * 1024 * 1024
    assert bool((live == 0).all())


def test_other_dtypes_are_cast_and_put_back():
    live = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    change = replacing(live, torch.tensor([3.0, 4.0]))
    change.undo()
    change.apply()
    assert live.tolist() == [3, 4]
    change.undo()
    change.undo()
    assert live.tolist() == [1.5, 2.5]


def test_all_are_undone_although_one_fails():
    class Failing:
        def undo(self):
            raise RuntimeError("cannot")

    live = torch.zeros(2)
    change = Swap(live, torch.ones(2))
    change.apply()
    with pytest.raises(RuntimeError, match="cannot"):
        undo_all([change, Failing()])
    assert live.tolist() == [0, 0]


def many_tensors():
    """Of all kinds, some of them short and next to each other."""
    torch.manual_seed(0)
    with torch.inference_mode():
        inference = torch.zeros(3)
    memory = torch.randn(100)
    return [
        *(torch.randn(1000, 3) for _ in range(40)),  # more than are exchanged together
        torch.randn(200_000),
        torch.randn(7, 5).t(),
        torch.randn(10, 14)[::2, ::2],
        torch.tensor(float("nan")),
        torch.zeros(0, 3),
        inference,
        nn.Parameter(torch.randn(4)),
        torch.arange(5),
        torch.randn(4, dtype=torch.complex64).conj(),
        memory[:60],  # these two share elements: what comes last stays
        memory[40:],
        torch.randn(6).as_subclass(Breaking),
    ]


def test_many_tensors_are_exchanged_in_their_order_and_put_back():
    lives, expected = many_tensors(), many_tensors()
    news = [torch.full(each.shape, at).to(each.dtype) for at, each in enumerate(lives)]
    olds = [each.detach().clone() for each in lives]
    Breaking.left = 99
    for live, new in zip(expected, news, strict=True):
        replacing(live.detach(), new.clone()).apply()
    changes = [*replacing_all(zip(lives, [new.clone() for new in news], strict=True))]
    assert len(changes) == 14  # the 40 in 4, two and one and two together, 7 by themselves
    for change in changes:
        change.apply()
    for live, same in zip(lives, expected, strict=True):
        assert torch.equal(live, same)
    assert lives[-3][-20:].tolist() == lives[-2][:20].tolist() == [float(len(lives) - 2)] * 20
    undo_all(changes)
    for live, old in zip(lives, olds, strict=True):
        assert torch.equal(live.isnan(), old.isnan())
        assert torch.equal(live.nan_to_num(), old.nan_to_num())


@pytest.mark.parametrize("staged", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_short_tensors_that_cannot_be_exchanged_are_refused(staged):
    pairs = [(torch.zeros(2), torch.ones(2)), (torch.zeros(2), staged)]
    if staged.dtype == torch.float64:  # which is cast
        assert [type(each) for each in replacing_all(pairs)][1:] == [Fill]
        return
    with pytest.raises(ValueError, match="shape"):
        [*replacing_all(pairs)]
    with pytest.raises(ValueError, match="expanded"):
        [*replacing_all([(torch.zeros(1).expand(2), torch.zeros(2))])]


def test_short_tensors_are_put_back_although_one_cannot_be():
    lives = [torch.zeros(2), torch.zeros(2), torch.zeros(2)]
    (change,) = replacing_all([(live, torch.ones(2)) for live in lives])
    change.undo()  # nothing to undo yet
    change.apply()
    lives[1].requires_grad_()  # so that it cannot be copied to
    with pytest.raises(RuntimeError, match="leaf"):
        change.undo()
    assert [live.tolist() for live in lives] == [[0, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize("at", range(4))
def test_an_exchange_of_short_tensors_that_is_interrupted_anywhere_is_undone(monkeypatch, at):
    lives = [torch.zeros(2), torch.zeros(2)]
    (change,) = replacing_all([(live, torch.ones(2)) for live in lives])
    copy, calls = torch._foreach_copy_, []

    def interrupted(*lists):
        calls.append(lists)
        if at % 2 or len(calls) <= at // 2:
            copy(*lists)
        if len(calls) > at // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        change.apply()
    change.undo()
    assert [live.tolist() for live in lives] == [[0, 0]] * 2
    lives[0] += 1
    change.undo()  # a second time does nothing
    assert [live.tolist() for live in lives] == [[1, 1], [0, 0]]


def test_the_order_in_memory_is_copied_only_if_it_differs():
    tensor = torch.randn(2, 3, 4, 4)
    assert strided_as(tensor, torch.zeros(2, 3, 4, 4)) is tensor
    assert strided_as(tensor, torch.zeros(4, 6, 4, 4)[::2, ::2]) is tensor
    last = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert strided_as(tensor, last).stride() == last.stride()
    assert torch.equal(strided_as(tensor, last), tensor)
