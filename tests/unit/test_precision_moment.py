"""Checkpoints that are not copied before they must be: what is seen of them is always the moment at
which they were made, or an error."""

import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from holdfast.errors import SaveError, TornSnapshotError
from holdfast.precision import (
    MixedPrecisionOptimizer,
    MixedPrecisionOptions,
    create_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    validate_checkpoint,
)


def made(storage="fp32", seed=0, **words):
    """With tensors that are large enough not to be copied at once."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(200, 300), nn.LayerNorm(300), nn.Linear(300, 100))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, **{"fused": True, **words})
    options = MixedPrecisionOptions.for_bf16(master_storage=storage)
    return MixedPrecisionOptimizer(inner, options, model=model)


def stepped(optimizer, steps=1):
    for step in range(steps):
        for weight in optimizer.training_weights.values():
            weight.grad = torch.full_like(weight, 0.25 + step)
        assert optimizer.step()
    return optimizer


def bits(value):
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1).view(torch.uint8).clone()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return all(map(same, one, other)) if isinstance(one, list) else one == other


def held(optimizer):
    """What a checkpoint of this moment has."""
    tree = optimizer.state_dict()
    weights = {name: weight.detach() for name, weight in optimizer.training_weights.items()}
    return bits([tree["masters"], weights, tree["inner"]])


def fields(checkpoint):
    names = ("master_weights", "training_weights", "base_optimizer_state")
    return bits([getattr(checkpoint, name) for name in names])


def copies(checkpoint):
    """Whether its memory is its own."""
    return not object.__getattribute__(checkpoint, "master_weights").moment._live


@pytest.mark.parametrize(
    ("storage", "fused"), [("fp32", True), ("fp32", False), ("remainder", True)]
)
def test_saving_at_once_copies_nothing_and_later_steps_everything(tmp_path, storage, fused):
    optimizer = stepped(made(storage, fused=fused), 2)
    then = held(optimizer)
    checkpoint = create_checkpoint(optimizer)
    save_checkpoint(checkpoint, tmp_path / "a")
    assert not copies(checkpoint)
    stepped(optimizer)
    assert copies(checkpoint)
    assert not same(held(optimizer), then)
    save_checkpoint(checkpoint, tmp_path / "b")
    assert same(fields(checkpoint), then)
    assert same(fields(load_checkpoint(tmp_path / "a")), then)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def skipped(optimizer):
    optimizer.training_weights["0.weight"].grad.fill_(torch.inf)
    assert not optimizer.step()


CHANGES = {
    "a step": stepped,
    "a step that is skipped": skipped,
    "a state": lambda o: o.load_state_dict(stepped(made(seed=5)).state_dict()),
    "a checkpoint": lambda o: restore_checkpoint(o, create_checkpoint(stepped(made(seed=5)))),
    "a fallback": lambda o: (o.set_fallback(fallback=True), stepped(o)),
    "other memory": lambda o: o.model.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_optimizer_does_is_not_seen(change):
    optimizer = stepped(made(), 2)
    then = held(optimizer)
    checkpoint = create_checkpoint(optimizer)
    CHANGES[change](optimizer)
    assert same(fields(checkpoint), then)


def test_who_looks_at_it_has_memory_of_his_own():
    optimizer = stepped(made(), 2)
    then = held(optimizer)
    checkpoint = create_checkpoint(optimizer)
    checkpoint.master_weights["0.weight"].zero_()
    checkpoint.base_optimizer_state["state"]["0.weight"]["exp_avg"].zero_()
    assert same(held(optimizer), then)
    assert not checkpoint.master_weights["0.weight"].any()


def test_a_layer_that_is_its_own_master_is_one_in_the_copy_too():
    checkpoint = create_checkpoint(stepped(made()))
    weight = checkpoint.training_weights["1.weight"]
    assert weight.data_ptr() == checkpoint.master_weights["1.weight"].data_ptr()


def by_load(optimizer):
    optimizer.model.load_state_dict(made(seed=3).model.state_dict())


def by_hand(optimizer):
    with torch.no_grad():
        optimizer.model[0].weight.add_(1)


def by_data(optimizer):
    optimizer.master_weights["2.weight"].data.zero_()


@pytest.mark.parametrize("then_a_step", [False, True])
@pytest.mark.parametrize("change", [by_load, by_hand, by_data])
def test_what_others_change_is_an_error_and_never_a_mixture(tmp_path, change, then_a_step):
    optimizer = stepped(made(), 2)
    checkpoint = create_checkpoint(optimizer)
    change(optimizer)
    if then_a_step:
        stepped(optimizer)  # which is not for the training to fail at
    with pytest.raises(TornSnapshotError, match=r'weight.*snapshot="copy"'):
        save_checkpoint(checkpoint, tmp_path / "a")
    with pytest.raises(TornSnapshotError):
        _ = checkpoint.master_weights
    assert "changed after create_checkpoint" in validate_checkpoint(checkpoint).summary()
    assert not (tmp_path / "a").exists()
    save_checkpoint(create_checkpoint(optimizer), tmp_path / "a")


@pytest.mark.parametrize("change", [by_load, by_hand, by_data])
def test_a_copy_is_right_whatever_happens(tmp_path, change):
    optimizer = stepped(made(), 2)
    then = held(optimizer)
    checkpoint = create_checkpoint(optimizer, snapshot="copy")
    change(optimizer)
    assert same(fields(checkpoint), then)
    assert validate_checkpoint(checkpoint)


def test_what_is_no_way_to_keep_it_is_refused():
    with pytest.raises(ValueError, match="snapshot must be 'live' or 'copy'"):
        create_checkpoint(made(), snapshot="later")


def test_nothing_is_kept_for_one_that_is_forgotten():
    optimizer = stepped(made())
    checkpoint = create_checkpoint(optimizer)
    gone = weakref.ref(object.__getattribute__(checkpoint, "master_weights").moment)
    del checkpoint
    gc.collect()
    assert gone() is None
    assert not optimizer.moments


def test_it_can_be_pickled():
    optimizer = stepped(made())
    then = held(optimizer)
    copy = pickle.loads(pickle.dumps(create_checkpoint(optimizer)))
    stepped(optimizer)
    assert same(fields(copy), then)


def test_another_thread_saves_while_training_goes_on(tmp_path):
    """It copies first, so that steps wait for a copy at most, and not for a disk."""
    optimizer = stepped(made(), 2)
    for number in range(3):
        then = held(optimizer)
        checkpoint = create_checkpoint(optimizer)
        path = tmp_path / str(number)
        thread = threading.Thread(target=save_checkpoint, args=(checkpoint, path))
        thread.start()
        stepped(optimizer, 5)
        thread.join()
        assert same(fields(load_checkpoint(path)), then)


def test_no_memory_for_a_copy_is_not_for_the_training_to_fail_at(tmp_path):
    """Here a tensor that no more can be copied: its memory is gone when the step comes."""
    optimizer = stepped(made())
    checkpoint = create_checkpoint(optimizer)
    moment = object.__getattribute__(checkpoint, "master_weights").moment
    moment._trees = {**moment._trees, "more": torch.empty(1).expand(2**30, 2**30)}
    stepped(optimizer)
    with pytest.raises(SaveError, match="no memory to copy"):
        save_checkpoint(checkpoint, tmp_path / "a")
