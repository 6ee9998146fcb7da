"""Typed values of a training: dtypes, devices, schedulers, optimizers; and life without torch."""

import inspect
import subprocess
import sys

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler, swa_utils
from value_strategies import same, values

from holdfast.errors import IncompatibleVersionError, SaveError
from holdfast.format import LeafRef, TorchValue, decode_value, encode_value
from holdfast.format._strict_json import scan_json
from holdfast.format._value_model import MAX_VALUE_JSON_DEPTH

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
DEVICES = [
    torch.device(text) for text in ("cpu", "cpu:0", "cuda", "cuda:7", "meta", "mps", "xla:1")
]
SIZES = [torch.Size([]), torch.Size([2, 0, 3]), torch.Size([2**40]), torch.Size([-1, 4])]


class Shelf:
    """Keeps tensors under the names of their paths, as a shard would."""

    def __init__(self):
        self.tensors = {}

    def put(self, path, value):
        if not isinstance(value, torch.Tensor):
            return None
        name = ".".join(map(str, path))
        self.tensors[name] = value
        return LeafRef(kind="tensor", name=name)

    def get(self, reference):
        return self.tensors[reference.name]


def returned(value):
    shelf = Shelf()
    text = msgspec.json.encode(encode_value(value, leaf=shelf.put))
    scan_json(text, max_depth=MAX_VALUE_JSON_DEPTH)
    return decode_value(msgspec.json.decode(text), leaf=shelf.get)


@pytest.mark.parametrize("value", [*DTYPES, *DEVICES, *SIZES], ids=repr)
def test_dtypes_devices_and_sizes_come_back_as_themselves(value):
    back = returned({value: [value]})
    assert back == {value: [value]}
    assert type(back[value][0]) is type(value)


@given(values(st.sampled_from([*DTYPES, *DEVICES, *SIZES])))
@settings(max_examples=100, deadline=None)
def test_trees_with_torch_values_come_back_with_every_type(value):
    assert same(returned(value), value)


def test_what_the_installed_torch_does_not_know_is_told_from_damage():
    with pytest.raises(IncompatibleVersionError, match=r"is torch\.float3, which the installed"):
        decode_value({"$": ["torch.dtype", "float3"]})
    with pytest.raises(IncompatibleVersionError, match=r"is torch\.nn, which the installed"):
        decode_value({"$": ["torch.dtype", "nn"]})
    with pytest.raises(IncompatibleVersionError, match=r"the device 'abacus:0', which"):
        decode_value({"$": ["torch.device", "abacus:0"]})
    with pytest.raises(IncompatibleVersionError, match=r"the device 'cuda:999', which"):
        decode_value({"$": ["torch.device", "cuda:999"]})


def test_tensors_are_leaves_and_nothing_else():
    assert encode_value([torch.ones(1)], leaf=Shelf().put) == [{"$": ["tensor", "0"]}]
    message = "is a torch.Tensor, which cannot be stored; convert it first, with"
    with pytest.raises(SaveError, match=rf"^state\['w'\] {message}"):
        encode_value({"w": torch.ones(1)})
    with pytest.raises(SaveError, match=rf"^a key of state {message}"):
        encode_value({torch.ones(1): 1}, leaf=Shelf().put)
    with pytest.raises(SaveError, match=r"^state is a torch\.memory_format, which cannot be"):
        encode_value(torch.channels_last)
    with pytest.raises(SaveError, match=r"^state\[0\] is a torch\.return_types\.max, which"):
        encode_value([torch.ones(2).max(0)])


def test_the_random_generator_of_torch_continues_from_its_stored_state():
    generator, again = torch.Generator().manual_seed(7), torch.Generator()
    again.set_state(returned({"rng": generator.get_state()})["rng"])
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=generator))


class Halving:
    """A callable object: LambdaLR keeps its attributes in its state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, epoch):
        self.calls += 1
        return 0.5**epoch


def steps(optimizer):
    return lr_scheduler.StepLR(optimizer, 1), lr_scheduler.ExponentialLR(optimizer, 0.9)


MAKERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [Halving(), lambda epoch: 1.0]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [Halving(), Halving()]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, steps(o), [2]),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(steps(o)),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 0.1, 1.0, scale_fn=Halving(), cycle_momentum=False
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, 10),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
}
SCHEDULERS = sorted(
    {
        kind.__name__
        for module in (lr_scheduler, swa_utils)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
        if kind is not lr_scheduler.LRScheduler and not kind.__name__.startswith("_")
    }
)


def stepped(name, count):
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(
        [{"params": weights[:1], "lr": 0.2}, {"params": weights[1:], "lr": 0.1}], momentum=0.9
    )
    scheduler = MAKERS[name](optimizer)
    for _ in range(count):
        optimizer.step()
        advance(name, scheduler)
    return optimizer, scheduler


def advance(name, scheduler):
    scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of chained schedulers
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_continues_from_its_stored_state(name):
    optimizer, scheduler = stepped(name, 3)
    state = scheduler.state_dict()
    back = returned(state)
    assert same(back, state)

    other_optimizer, other = stepped(name, 0)
    other_optimizer.load_state_dict(optimizer.state_dict())
    other.load_state_dict(back)
    for _ in range(4):
        advance(name, scheduler)
        advance(name, other)
        assert [group["lr"] for group in other_optimizer.param_groups] == [
            group["lr"] for group in optimizer.param_groups
        ]


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)


def tensors_apart(state):
    """The same tree, with a number for each tensor: tensors compare element by element."""
    if isinstance(state, torch.Tensor):
        return ("tensor", id(state))
    if isinstance(state, dict):
        return {key: tensors_apart(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(tensors_apart, state))
    return state


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_taken", [0, 2])
def test_the_state_of_every_optimizer_of_torch_comes_back(name, steps_taken):
    weights = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = getattr(torch.optim, name)([weights], lr=torch.tensor(0.01))
    for _ in range(steps_taken):
        gradient = torch.ones(3, 4)
        weights.grad = gradient.to_sparse() if name == "SparseAdam" else gradient
        optimizer.step(lambda: 1.0) if name == "LBFGS" else optimizer.step()
    state = optimizer.state_dict()
    assert same(tensors_apart(returned(state)), tensors_apart(state))
    assert state["state"] or steps_taken == 0 or name == "SGD"


def test_the_state_of_a_grad_scaler_comes_back():
    state = torch.amp.GradScaler("cpu").state_dict()
    assert same(returned(state), state)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import msgspec
from holdfast.format import TorchValue, decode_value, encode_value
text = sys.stdin.buffer.read()
value = decode_value(msgspec.json.decode(text))
assert value == {"a": TorchValue(kind="dtype", text="bfloat16"),
                 TorchValue(kind="device", text="cuda:1"): TorchValue(kind="Size", text="2,3"),
                 "none": TorchValue(kind="Size", text="")}, value
sys.stdout.buffer.write(msgspec.json.encode(encode_value(value)))
"""


def test_without_torch_its_values_come_back_as_stand_ins_that_are_stored_alike():
    value = {
        "a": torch.bfloat16,
        torch.device("cuda:1"): torch.Size([2, 3]),
        "none": torch.Size([]),
    }
    text = msgspec.json.encode(encode_value(value))
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=text,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.stderr == b""
    assert ran.stdout == text
    stand_in = TorchValue(kind="device", text="cuda:1")
    assert returned(stand_in) == torch.device("cuda:1")


def test_storing_plain_values_does_not_import_torch():
    code = (
        "import sys; from holdfast.format import encode_value, decode_value; "
        "decode_value(encode_value({1: (2.5, 'x')})); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert ran.stdout == b"False\n"
