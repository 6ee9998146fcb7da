"""A campaign: random jobs, random faults at random moments, each replayable by its seed.

A few run in ``make test``, all of these and more in ``make proof``; ``pytest -m proof -k seed-52``
runs one.
"""

import pytest
from rank_campaign import FAULTS, require_named

IN_EVERY_RUN = 8
SEEDS = [
    pytest.param(seed, id=f"seed-{seed}", marks=[pytest.mark.proof] if seed >= IN_EVERY_RUN else [])
    for seed in range(120)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_fault_at_any_moment_hangs_the_job_or_goes_unnamed(seed):
    assert require_named(seed) in FAULTS
