"""Ranks that overwrite a checkpoint again and again and are killed in the middle of it, at a moment
that is given by a seed: the old one or the new one is there, whole."""

import os
import random
import signal
import time

import numpy as np
import torch

from holdfast.catalog import Catalog
from holdfast.coordination import SoloCoordinator, TorchCoordinator
from holdfast.distributed import DistributedCheckpoint, LoadOptions, SaveOptions, per_rank
from holdfast.errors import CheckpointError
from holdfast.testing import RankGang

RANKS = 2
FORMATS = ("multi_shard", "single_file", "consolidated")


def state_of(number, rank):
    rng = np.random.default_rng(number)
    model = {f"layer{n}": torch.from_numpy(rng.random((300, 70))) for n in range(4)}
    return {"model": model, "number": number, "mine": per_rank(torch.tensor([number, rank]))}


def overwrite_for_ever(rank, folder, form):
    """Tells in the file ``saved`` what it was promised."""
    with (
        TorchCoordinator(liveness_timeout_s=2.0, timeout_s=60) as ranks,
        DistributedCheckpoint(coordinator=ranks, storage=folder) as ckpt,
    ):
        options = SaveOptions(checkpoint_prefix="latest", overwrite=True, format=form)
        number = 0
        while True:
            number += 1
            state = state_of(number, rank)
            model = state.pop("model")
            try:
                ckpt.save(model, options=options, extra=state)
            except CheckpointError as error:
                return number, type(error).__name__, error.rank
            if rank == 0:
                telling = folder.parent / "saving"  # it may be killed while it tells, too
                telling.write_text(str(number))
                telling.rename(folder.parent / "saved")


def number_in(folder):
    """Which state is stored, bit for bit; ``None`` if there is none."""
    if not Catalog(folder).list():
        return None
    extra = {"number": 0, "mine": torch.zeros(2, dtype=torch.int64)}
    model = {f"layer{n}": torch.zeros(300, 70, dtype=torch.float64) for n in range(4)}
    with DistributedCheckpoint(coordinator=SoloCoordinator(), storage=folder) as ckpt:
        options = LoadOptions(checkpoint_prefix="latest", load_rng_state=False, remap=lambda *_: 0)
        ckpt.load(model, options=options, extra=extra)
    expected = state_of(extra["number"], 0)
    for name, value in expected["model"].items():
        assert torch.equal(model[name], value), (extra["number"], name)
    assert extra["mine"].tolist() == [extra["number"], 0]
    return extra["number"]


def kill_at_random(folder, seed):
    rng = random.Random(seed)
    victims = rng.choice([[0], [1], [0, 1]])
    with RankGang(RANKS) as gang:
        gang.start(overwrite_for_ever, folder, rng.choice(FORMATS))
        saved = folder.parent / "saved"
        until = time.monotonic() + 60
        while not saved.exists():
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.2))
        for rank in victims:
            os.kill(gang.pids[rank], signal.SIGKILL)
        for outcome in gang.outcomes(30):
            if outcome.rank not in victims:
                assert outcome.value is not None, outcome
                number, error, rank = outcome.value
                assert (error, rank) == ("RankLostError", victims[0]), number
    return int(saved.read_text())


def require_old_or_new(seed, tmp_path):
    """Kill the ranks of that seed amid a save: what is left is whole, and nothing is left over."""
    folder = tmp_path / "store"
    promised = kill_at_random(folder, seed)
    found = number_in(folder)
    assert found is not None
    assert promised <= found <= promised + 1
    for path in folder.rglob("*"):
        if path.is_file() and path.name.startswith(("intent-", ".")):
            os.utime(path, (0, 0))
    catalog = Catalog(folder)
    catalog.gc()
    assert number_in(folder) == found
    assert catalog.verify("latest").is_intact
    named = {name for file in catalog.find("latest").record.files for name in file.names}
    left = {path.name for path in folder.glob("latest/*")}
    assert left - {"metadata.json", "model.safetensors.index.json"} == named
