"""Garbage is collected after a save or load as it was before, however it ended."""

import gc

import pytest
import torch

import holdfast
from holdfast.distributed._collecting import collecting_later
from holdfast.errors import CheckpointError


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.enable()


@pytest.mark.parametrize("was_on", [True, False])
def test_saving_and_loading_leave_the_collector_as_it_was(tmp_path, was_on):
    gc.enable() if was_on else gc.disable()
    holdfast.save({"x": torch.ones(2)}, tmp_path / "a")
    assert gc.isenabled() == was_on
    holdfast.load(tmp_path / "a", into={"x": torch.zeros(2)})
    assert gc.isenabled() == was_on
    with pytest.raises(CheckpointError):
        holdfast.load(tmp_path / "missing")
    with pytest.raises(CheckpointError):
        holdfast.load(tmp_path / "a", into={"x": torch.zeros(3)})
    assert gc.isenabled() == was_on


def test_nothing_is_collected_inside_unless_much_is_moved():
    with collecting_later():
        assert not gc.isenabled()
        with collecting_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with collecting_later(moved_bytes=2**30):
        assert gc.isenabled()
