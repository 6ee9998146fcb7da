"""Lightning's Trainer with holdfast's checkpoints: saved, resumed, removed, killed and damaged."""

import os
import pathlib
import subprocess
import sys
import warnings
from collections import OrderedDict

import pytest
import torch
from lightning_training import (
    BATCH,
    EPOCHS,
    HoldfastCheckpointIO,
    ModelCheckpoint,
    Net,
    RandomState,
    StopAt,
    Stopped,
    assert_same,
    fit,
    keeping,
    new_loader,
    new_net,
    new_trainer,
    rows,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import holdfast
from holdfast.catalog import Catalog
from holdfast.distributed import SaveOptions
from holdfast.errors import StorageError
from holdfast.storage import MemoryStorage
from holdfast.testing import Fault, FaultyStorage

# Some tests start Python and torch a few times, which takes a loaded machine minutes.
pytestmark = pytest.mark.timeout(600)

SCRIPT = pathlib.Path(__file__).with_name("lightning_job.py")
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "lightning_trainer.py"
STEPS = 6  # of an epoch


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a small model wait for each other on a machine that has others to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def names_in(folder):
    return sorted(info.prefix for info in Catalog(folder).list())


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("validating", [False, True])
def test_a_training_goes_on_to_the_last_bit(tmp_path, background, validating):
    wanted = fit(new_trainer(tmp_path / "whole"), new_net(), validating=validating)
    plugin = HoldfastCheckpointIO(background=background)
    crashing = new_trainer(tmp_path, plugin=plugin, callbacks=[*keeping(tmp_path), StopAt(15)])
    with pytest.raises(Stopped):
        fit(crashing, new_net(), validating=validating)
    assert names_in(tmp_path / "kept") == ["epoch=0.ckpt", "epoch=1.ckpt"]
    again = new_trainer(tmp_path, callbacks=keeping(tmp_path))
    path = tmp_path / "kept" / "epoch=1.ckpt"
    net = fit(again, new_net(seed=9), ckpt_path=path, validating=validating)
    assert_same(net, wanted, of_last=2 * STEPS)
    assert again.current_epoch == EPOCHS


def test_inside_an_epoch_it_goes_on_with_a_loader_that_knows_its_place(tmp_path):
    def loader():
        sampler = RandomSampler(rows(), generator=torch.Generator().manual_seed(7))
        return StatefulDataLoader(
            rows(), batch_size=BATCH, sampler=sampler, generator=torch.Generator()
        )

    def saving():
        return keeping(tmp_path, every_n_train_steps=4, filename="{step}")

    wanted = fit(new_trainer(tmp_path / "whole"), new_net(), loader())
    with pytest.raises(Stopped):
        fit(new_trainer(tmp_path, callbacks=[*saving(), StopAt(11)]), new_net(), loader())
    path = tmp_path / "kept" / "step=8.ckpt"
    again = new_trainer(tmp_path, callbacks=[RandomState()])
    net = fit(again, new_net(9), loader(), ckpt_path=path)
    assert_same(net, wanted, of_last=EPOCHS * STEPS - 8)


def test_killed_while_it_saves_it_goes_on_from_the_one_before():
    """The example does that: the one before was to be removed for the one that was not saved."""
    job = run(EXAMPLE)
    assert job.returncode == 0, job.stderr
    assert "killed while it saved (signal 9); epoch=1.ckpt is whole" in job.stdout
    assert "gone on for 32 steps" in job.stdout
    assert "equal to the last bit: True" in job.stdout


def test_two_ranks_go_on_to_the_last_bit(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = run(*torchrun, SCRIPT, tmp_path)
    assert job.returncode == 0, job.stderr
    assert {path.name for path in tmp_path.glob("rank_*")} == {"rank_0", "rank_1"}


def test_generators_of_several_ranks_are_refused(tmp_path):
    trainer = new_trainer(tmp_path, callbacks=[RandomState()], num_nodes=2)
    with pytest.raises(ValueError, match="RandomState is for one process, and there are 2"):
        RandomState().setup(trainer, None, "fit")


@pytest.mark.parametrize("background", [True, False])
def test_the_best_are_kept_and_others_removed(tmp_path, background):
    saving = ModelCheckpoint(
        tmp_path / "kept", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}"
    )
    plugin = HoldfastCheckpointIO(background=background)
    trainer = new_trainer(tmp_path, plugin=plugin, callbacks=[saving])
    fit(trainer, new_net(), validating=True)
    best = [pathlib.Path(path).name for path in saving.best_k_models]
    assert len(best) == 2
    assert names_in(tmp_path / "kept") == sorted([*best, "last.ckpt"])
    folders = [path.name for path in (tmp_path / "kept").iterdir() if path.is_dir()]
    assert sorted(folders) == sorted([*best, "last.ckpt"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few workers
        (told,) = trainer.validate(Net(), dataloaders=new_loader(), ckpt_path="best", verbose=False)
    assert told["val_loss"] > 0


def test_a_link_to_the_last_one_is_read(tmp_path):
    saving = ModelCheckpoint(tmp_path / "kept", save_last="link", filename="{epoch}")
    fit(new_trainer(tmp_path, callbacks=[saving], max_epochs=2), new_net())
    assert (tmp_path / "kept" / "last.ckpt").is_symlink()
    again = new_trainer(tmp_path, callbacks=keeping(tmp_path, save_last="link"))
    assert len(fit(again, new_net(9), ckpt_path="last").losses) == (EPOCHS - 2) * STEPS


def test_what_comes_back_is_what_was_given(tmp_path):
    given = {
        "state_dict": OrderedDict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.tensor(1.5)),
        "global_step": 7,
        "epoch": 1,
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{}]}],
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": None, "k": {"/a/b.ckpt": 0.5}}},
        "hyper_parameters": {"names": ("a", "b"), "path": pathlib.Path("x"), "rate": 1e-3},
        "loops": {"fit_loop": {"state_dict": {}, "done": False}},
    }
    io = HoldfastCheckpointIO()
    io.save_checkpoint(given, tmp_path / "a.ckpt")
    found = io.load_checkpoint(tmp_path / "a.ckpt")
    assert Catalog(tmp_path).info("a.ckpt").step == 7
    weights, expected = found.pop("state_dict"), given.pop("state_dict")
    assert type(weights) is OrderedDict
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    (state,), (wanted,) = found.pop("optimizer_states"), given.pop("optimizer_states")
    assert torch.equal(state["state"][0]["step"], wanted["state"][0]["step"])
    assert found == given
    io.teardown()


def test_what_is_saved_is_the_state_of_the_call(tmp_path):
    """It is copied before the call returns: what changes it is written over after that."""
    io = HoldfastCheckpointIO()
    weight = torch.ones(300_000)
    io.save_checkpoint({"state_dict": {"weight": weight}, "lists": [1]}, tmp_path / "a.ckpt")
    weight.zero_()
    assert io.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"].min() == 1
    io.teardown()


def test_what_cannot_be_stored_is_refused_with_its_place(tmp_path):
    io = HoldfastCheckpointIO(background=False)
    io.save_checkpoint({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "a.ckpt")
    bad = {"state_dict": {}, "hyper_parameters": {"loss": torch.nn.functional.mse_loss}}
    with pytest.raises(
        holdfast.SaveError, match=r"extra\.hyper_parameters\['loss'\] is a function"
    ):
        io.save_checkpoint(bad, tmp_path / "a.ckpt")
    assert torch.equal(
        io.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weight"], torch.ones(2)
    )
    io.teardown()


def test_all_checkpoints_may_be_in_one_storage(tmp_path):
    storage = MemoryStorage()
    plugin = HoldfastCheckpointIO(storage, SaveOptions(compression_level="fast"))
    trainer = new_trainer(tmp_path, plugin=plugin, callbacks=keeping(tmp_path), max_epochs=2)
    fit(trainer, new_net())
    assert names_in(storage) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    plugin = HoldfastCheckpointIO(storage)
    trainer = new_trainer(tmp_path, plugin=plugin, callbacks=[RandomState()])
    net = fit(trainer, new_net(9), ckpt_path="epoch=1.ckpt")
    assert_same(net, fit(new_trainer(tmp_path / "whole"), new_net()), of_last=2 * STEPS)


def test_the_error_of_a_save_is_raised_by_the_next(tmp_path):
    faulty = FaultyStorage(MemoryStorage(), [Fault("open_writer", 2, StorageError("full"))])
    plugin = HoldfastCheckpointIO(faulty)
    saving = keeping(tmp_path, save_top_k=1)  # removes the one before
    trainer = new_trainer(tmp_path, plugin=plugin, callbacks=saving)
    with pytest.raises(StorageError, match="full"):
        fit(trainer, new_net())
    assert names_in(faulty) == ["epoch=0.ckpt"]


def test_the_error_of_the_last_save_is_raised_at_the_end(tmp_path):
    faulty = FaultyStorage(MemoryStorage(), [Fault("open_writer", 1, StorageError("full"))])
    plugin = HoldfastCheckpointIO(faulty)
    trainer = new_trainer(tmp_path, plugin=plugin, callbacks=keeping(tmp_path), max_epochs=1)
    with pytest.raises(StorageError, match="full"):
        fit(trainer, new_net())


def test_a_damaged_checkpoint_is_refused(tmp_path):
    fit(new_trainer(tmp_path, callbacks=keeping(tmp_path), max_epochs=1), new_net())
    path = tmp_path / "kept" / "epoch=0.ckpt"
    (shard,) = path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(holdfast.CorruptedError, match="is damaged"):
        fit(new_trainer(tmp_path), new_net(), ckpt_path=path)


def test_another_model_is_refused(tmp_path):
    fit(new_trainer(tmp_path, callbacks=keeping(tmp_path), max_epochs=1), new_net())
    path = tmp_path / "kept" / "epoch=0.ckpt"
    with pytest.raises(RuntimeError, match=r"size mismatch for body\.0\.weight"):
        fit(new_trainer(tmp_path), new_net(width=32), ckpt_path=path)


def test_paths_that_lead_nowhere_are_said_to(tmp_path):
    io = HoldfastCheckpointIO()
    with pytest.raises(holdfast.CheckpointNotFoundError, match="none"):
        io.load_checkpoint(tmp_path / "none.ckpt")
    torch.save({}, tmp_path / "torch.ckpt")
    with pytest.raises(holdfast.LoadError, match=r"TorchCheckpointIO loads what torch\.save wrote"):
        io.load_checkpoint(tmp_path / "torch.ckpt")
    holdfast.save({"x": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(holdfast.LoadError, match="not saved by Lightning"):
        io.load_checkpoint(tmp_path / "other")
    io.remove_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(ValueError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(ValueError, match="map_location must be a device"):
        io.load_checkpoint(tmp_path / "other", map_location={"cpu": "cpu"})
    io.teardown()
    with pytest.raises(ValueError, match="step"):
        HoldfastCheckpointIO(options=SaveOptions(step=1))


def test_without_lightning_one_line_says_what_to_install():
    code = "import sys; sys.modules['lightning'] = None; import holdfast.integrations.lightning"
    job = run("-c", code)
    assert job.stderr.splitlines()[-1] == (
        "ImportError: holdfast.integrations.lightning needs lightning, which is not installed: "
        'pip install "holdfast[lightning]"'
    )
