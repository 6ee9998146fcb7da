"""Ranks that overwrite a checkpoint again and again and are killed in the middle of it: at every
moment the old one or the new one loads, whole.

``pytest -m proof -k seed-17`` runs one.
"""

import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from holdfast.catalog import Catalog
from holdfast.coordination import SoloCoordinator, TorchCoordinator
from holdfast.distributed import DistributedCheckpoint, LoadOptions, SaveOptions, per_rank
from holdfast.errors import CheckpointError
from holdfast.testing import RankGang

RANKS = 2
IN_EVERY_RUN = 2
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
                (folder.parent / "saved").write_text(str(number))


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


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"seed-{seed}", marks=[pytest.mark.proof] * (seed >= IN_EVERY_RUN))
        for seed in range(100)
    ],
)
def test_a_checkpoint_that_is_overwritten_while_ranks_are_killed(seed, tmp_path):
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


def test_what_readers_see_while_it_is_overwritten(tmp_path):
    """A reader in another process sees one whole state after the other, and never goes back."""
    folder = tmp_path / "store"
    seen = []
    with RankGang(RANKS) as gang:
        gang.start(overwrite_for_ever, folder, "multi_shard")
        until = time.monotonic() + 60
        while len(set(seen)) < 5:
            assert time.monotonic() < until, seen
            if (folder.parent / "saved").exists():
                seen.append(read_number(folder))
    assert seen == sorted(seen)


def read_number(folder):
    found = Catalog(folder).read("latest")
    number = found["extra"]["number"]
    for name, value in state_of(number, 0)["model"].items():
        assert np.array_equal(found["model"][name], value.numpy()), (number, name)
    return number
