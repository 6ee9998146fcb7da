"""Ranks that overwrite a checkpoint again and again and are killed in the middle of it: at every
moment the old one or the new one loads, whole.

``pytest -m proof -k seed-17`` runs one.
"""

import time

import numpy as np
import pytest
from overwriting import RANKS, overwrite_for_ever, require_old_or_new, state_of

from holdfast.catalog import Catalog
from holdfast.testing import RankGang

IN_EVERY_RUN = 2


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"seed-{seed}", marks=[pytest.mark.proof] * (seed >= IN_EVERY_RUN))
        for seed in range(100)
    ],
)
def test_a_checkpoint_that_is_overwritten_while_ranks_are_killed(seed, tmp_path):
    require_old_or_new(seed, tmp_path)


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
