"""The random generators are captured, restored and put back, all or none."""

import random

import numpy as np
import pytest
import torch

from holdfast.distributed._rng import RngFill, capture_rng
from holdfast.errors import LoadError
from holdfast.format import LeafRef, decode_value, encode_value


@pytest.fixture(autouse=True)
def _generators_as_before():
    former = capture_rng()
    yield
    RngFill(former).apply()


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.random(),  # noqa: NPY002
        np.random.standard_normal(),  # noqa: NPY002
        torch.rand(3).tolist(),
        torch.randperm(7).tolist(),
    ]


def leave_odd_halves():
    random.gauss(0, 1)  # each keeps the second of a pair of numbers for the next call
    np.random.standard_normal()  # noqa: NPY002
    torch.randn(1)


def test_restored_generators_go_on_as_the_captured_ones():
    leave_odd_halves()
    state = capture_rng()
    expected = draw()
    draw()
    fill = RngFill(state)
    fill.apply()
    assert fill.left_out == ()
    assert draw() == expected


def test_a_captured_state_can_be_restored_twice():
    state = capture_rng()
    expected = draw()
    for _ in range(2):
        RngFill(state).apply()
        assert draw() == expected


def test_undo_puts_the_former_generators_back():
    state = capture_rng()
    draw()
    leave_odd_halves()
    here = capture_rng()
    expected = draw()
    RngFill(here).apply()
    fill = RngFill(state)
    fill.undo()  # nothing to undo yet
    fill.apply()
    draw()
    fill.undo()
    assert draw() == expected
    draw()
    somewhere = capture_rng()
    fill.undo()  # a second time does nothing
    np.testing.assert_equal(capture_rng()["python"], somewhere["python"])


def test_a_state_survives_being_stored():
    leave_odd_halves()
    state = capture_rng()
    leaves = {}

    def leaf(path, value):
        name = ".".join(map(str, path))
        leaves[name] = value
        return LeafRef(kind="tensor" if torch.is_tensor(value) else "array", name=name)

    def filled(value):
        if isinstance(value, LeafRef):
            return leaves[value.name]
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        return value

    expected = draw()
    back = filled(decode_value(encode_value(state, leaf=leaf)))
    RngFill(back).apply()
    assert draw() == expected


def test_parts_that_were_not_saved_are_left_alone():
    state = capture_rng()
    first = torch.rand(2).tolist()
    rest = capture_rng()
    expected = random.random()
    RngFill({"torch": state["torch"]}).apply()
    assert torch.rand(2).tolist() == first
    RngFill({"python": rest["python"]}).apply()
    assert random.random() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices here")
def test_devices_that_are_not_here_are_named():
    state = {**capture_rng(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 2, "mps": None}
    fill = RngFill(state)
    fill.apply()
    assert fill.left_out == ("mps", "cuda:0", "cuda:1")


def broken(part, **changes):
    state = capture_rng()
    state[part] = {**state[part], **changes} if changes else None
    return state


@pytest.mark.parametrize(
    "make",
    [
        lambda: broken("python"),
        lambda: broken("python", state=np.zeros(3, np.uint32)),
        lambda: broken("python", state=np.full(625, -1)),
        lambda: broken("python", gauss="no"),
        lambda: broken("python", version=9),
        lambda: broken("numpy"),
        lambda: broken("numpy", state={"key": np.zeros(3, np.uint32), "pos": 0}),
        lambda: broken("numpy", state={"key": np.zeros(624, np.uint32), "pos": 10**6}),
        lambda: broken("numpy", state=None),
        lambda: broken("numpy", bit_generator="PCG64"),
        lambda: broken("torch"),
        lambda: {**capture_rng(), "torch": torch.zeros(4, dtype=torch.uint8)},
        lambda: {**capture_rng(), "torch": torch.zeros(4)},
        lambda: {**capture_rng(), "cuda": 3},
        list,
    ],
)
def test_a_malformed_state_changes_nothing(make):
    state = make()
    before = capture_rng()
    with pytest.raises(LoadError):
        RngFill(state)
    after = capture_rng()
    np.testing.assert_equal([after["python"], after["numpy"]], [before["python"], before["numpy"]])
    assert torch.equal(after["torch"], before["torch"])
