"""What attackers and newcomers of the distributed checkpoint found, in one process."""

import collections
import os
import signal
import time

import pytest
import torch
from torch import nn

import holdfast
from holdfast import LoadOptions, SaveError, SaveOptions, TornSnapshotError, ValidationError
from holdfast.distributed import CheckpointOptions, DistributedCheckpoint
from holdfast.distributed._watch import finish
from holdfast.format import PerRank


@pytest.fixture
def ckpt(tmp_path):
    with DistributedCheckpoint.create(options=CheckpointOptions(storage=tmp_path)) as checkpointer:
        yield checkpointer


def named(prefix, **options):
    return SaveOptions(checkpoint_prefix=prefix, **options)


def which(prefix, **options):
    return LoadOptions(checkpoint_prefix=prefix, **options)


def stepped(model, kind=torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_tensors_in_a_deque_come_back_as_tensors(tmp_path):
    queue = collections.deque([torch.ones(3), {"x": torch.zeros(2)}], maxlen=5)
    holdfast.save({"q": queue}, tmp_path / "a")
    found = holdfast.load(tmp_path / "a")["q"]
    assert found.maxlen == 5
    assert torch.equal(found[0], torch.ones(3))
    assert torch.equal(found[1]["x"], torch.zeros(2))


def test_state_of_an_optimizer_that_has_not_its_parameters_shape_is_loaded(ckpt):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["left"] = torch.randn(7, 7)
    ckpt.save(model, optimizer, named("a"))
    into = nn.Linear(4, 4)
    other = torch.optim.SGD(into.parameters(), lr=0.1)
    ckpt.load(into, other, which("a"))
    assert torch.equal(other.state[into.weight]["left"], optimizer.state[model.weight]["left"])


def test_state_of_a_resized_layer_is_left_out_with_it(ckpt):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    ckpt.save(model, stepped(model), named("a"))
    into = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    optimizer = torch.optim.AdamW(into.parameters())
    result = ckpt.load(into, optimizer, which("a", strict=False))
    places = {each.place for each in result.report.shapes}
    assert {"model.1.weight", "optimizer.state.1.weight.exp_avg"} <= places
    assert into[1].weight not in optimizer.state
    assert optimizer.state[into[0].weight]["exp_avg"].shape == (4, 4)


def test_values_of_several_ranks_are_not_saved_as_one_ranks(tmp_path):
    with pytest.raises(SaveError, match=r"x holds the values of the 3 ranks"):
        holdfast.save({"x": PerRank((1, 2, 3))}, tmp_path / "a")


def test_a_default_device_does_not_matter(ckpt):
    model = nn.Linear(3, 2)
    ckpt.save(model, stepped(model), named("a"))
    into = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(into.parameters())
    with torch.device("meta"):
        ckpt.load(into, optimizer, which("a"))
    assert torch.equal(into.weight, model.weight)
    assert optimizer.state[into.weight]["exp_avg"].device.type == "cpu"


def test_a_load_in_inference_mode_can_be_trained_on(ckpt):
    model = nn.Linear(3, 2)
    ckpt.save(model, stepped(model), named("a"))
    with torch.device("meta"):
        into = nn.Linear(3, 2)
    with torch.inference_mode():
        ckpt.load(into, None, which("a"))
    assert not into.weight.is_inference()
    stepped(into)


def test_the_models_own_names_are_those_in_its_files(tmp_path):
    model = nn.Linear(3, 2)
    state = {"ema": model.state_dict(), "model": model}
    holdfast.save(state, tmp_path / "a", format="consolidated")
    (index,) = (tmp_path / "a").glob("*.index.json")
    assert '"weight"' in index.read_text()


def test_names_in_an_optimizer_do_not_hang_on_other_modules(ckpt):
    model = nn.Linear(3, 2)
    ckpt.save(model, stepped(model), named("a"), extra={"ema": nn.Linear(3, 2)})
    into = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(into.parameters())
    ckpt.load(into, optimizer, which("a"))
    assert optimizer.state[into.weight]["step"] == 1


def test_two_modules_of_one_optimizer_are_told_apart(tmp_path):
    def new():
        first, second = nn.Linear(3, 2), nn.Linear(3, 2)
        both = nn.ModuleList([first, second])
        return {"g": first, "d": second, "optimizer": stepped(both)}

    state, into = new(), new()
    holdfast.save(state, tmp_path / "a")
    holdfast.load(tmp_path / "a", into=into)
    for name in "gd":
        mine = into["optimizer"].state[into[name].weight]["exp_avg"]
        assert torch.equal(mine, state["optimizer"].state[state[name].weight]["exp_avg"])


def test_another_kind_of_optimizer_is_refused(ckpt):
    model = nn.Linear(3, 2)
    ckpt.save(model, stepped(model), named("a"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValidationError, match="was saved by AdamW, and this is SGD"):
        ckpt.load(model, optimizer, which("a"))
    assert "betas" not in optimizer.param_groups[0]


def test_an_optimizer_of_parameters_without_memory_is_refused(ckpt):
    model = nn.Linear(3, 2)
    ckpt.save(model, stepped(model), named("a"))
    with torch.device("meta"):
        into = nn.Linear(3, 2)
    with pytest.raises(ValidationError, match="make the optimizer, then load both"):
        ckpt.load(into, torch.optim.AdamW(into.parameters()), which("a"))
    assert into.weight.is_meta


def test_model_and_optimizer_in_the_wrong_order_are_refused(ckpt):
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="the model first"):
        ckpt.save(stepped(model), model)


def test_a_tensor_that_changes_meanwhile_is_not_committed(ckpt):
    tensor = torch.zeros(100_000)

    def change(progress):
        if progress.phase == "write":
            tensor.add_(1)

    with pytest.raises(TornSnapshotError, match=r"extra\.t changed while being saved"):
        ckpt.save(nn.Linear(2, 2), None, named("a", progress=change), extra={"t": tensor})
    assert ckpt.list_checkpoints() == []


@pytest.mark.parametrize("pattern", ["model", "model.0", "model.0.weight", "model.0.*"])
def test_a_pattern_takes_what_is_inside_of_the_place_it_names(ckpt, pattern):
    model = nn.Sequential(nn.Linear(3, 2))
    ckpt.save(model, None, named("a"))
    into = nn.Sequential(nn.Linear(3, 2))
    ckpt.load(into, None, which("a", include=[pattern]))
    assert torch.equal(into[0].weight, model[0].weight)


def test_what_must_not_be_left_half_done_is_finished_whatever_interrupts():
    done = []

    def work():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # so that each arrives by itself
        done.append(True)

    finish(work)
    assert done
