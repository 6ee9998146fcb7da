"""A small training by Lightning's Trainer, the same in every process that makes it: with dropout, a
shuffled order, AdamW and a schedule."""

import logging
import warnings

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Lightning imports
    import lightning as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from holdfast.integrations.lightning import HoldfastCheckpointIO, RandomState

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
ROWS, BATCH, EPOCHS = 24, 4, 4


class Net(pl.LightningModule):
    def __init__(self, width=16, rate=0.01, dropout=0.25, names=("a", "b")):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Linear(8, width), nn.Dropout(dropout), nn.Tanh(), nn.Linear(width, 1)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.body(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.body(batch).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Stopped(Exception):  # noqa: N818 -- it is what a test asked for
    pass


class StopAt(Callback):
    """Ends the training after that many batches, as a crash does. ``how`` is called."""

    def __init__(self, batches, how=None):
        self._left = batches
        self._how = how

    def on_train_batch_end(self, *_):
        self._left -= 1
        if self._left == 0:
            if self._how is not None:
                self._how()
            raise Stopped


def rows(seed=3, count=ROWS):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def new_loader(kind=torch.utils.data.DataLoader, **options):
    return kind(rows(), batch_size=BATCH, shuffle=True, **options)


def new_net(seed=1, **options):
    torch.manual_seed(seed)
    return Net(**options)


def new_trainer(folder, *, plugin=None, callbacks=(), **options):
    defaults = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(
        plugins=[HoldfastCheckpointIO() if plugin is None else plugin],
        callbacks=[*callbacks],
        **(defaults | options),
    )


def fit(trainer, net, loader=None, *, ckpt_path=None, validating=False):
    validation = torch.utils.data.DataLoader(rows(4, 8), batch_size=8) if validating else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few workers, few batches
        trainer.fit(net, loader or new_loader(), validation, ckpt_path=ckpt_path)
    return net


def keeping(folder, **options):
    """A callback that saves after every epoch, and one that keeps the generators."""
    options = {"save_top_k": -1, "filename": "{epoch}"} | options
    return [ModelCheckpoint(folder / "kept", **options), RandomState()]


def assert_same(net, wanted, *, of_last=None):
    """To the last bit: the weights, and the losses that ``net`` has seen."""
    assert net.losses == wanted.losses[-len(net.losses) :] != []
    assert of_last is None or len(net.losses) == of_last
    for name, value in wanted.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
