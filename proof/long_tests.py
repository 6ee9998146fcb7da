"""Everything else that is too long for ``make test``: the tests that are marked ``proof`` and
belong to no other campaign.

``COVERED`` says which campaign does what the others do; a test sees to it that none is forgotten.
"""

from _campaign import Campaign, Outcome, batch_of
from _tests import Piece, run_batch

PROOF = "proof"
PIECES = (
    Piece(tests="tests/distributed/test_checkpoint_options.py", batches=5, only=PROOF),
    Piece(tests="tests/numerics/test_mixed_precision_remainder.py", batches=8, only=PROOF),
    Piece(tests="tests/unit/test_catalog_interleaved.py", batches=25, only=PROOF),
    Piece(tests="tests/unit/test_prune.py", batches=25, only=PROOF),
    Piece(tests="tests/distributed/test_preemption_torchrun.py", batches=1, only=PROOF),
    Piece(tests="tests/distributed/test_checkpoint_matrix.py", batches=21, only=PROOF),
)
COVERED = {
    "tests/crash/test_crash_states.py": "crash_states",
    "tests/crash/test_distributed_crash.py": "rank_faults",
    "tests/crash/test_failing_calls.py": "failing_calls",
    "tests/crash/test_full_disk.py": "power_cuts",
    "tests/crash/test_killed.py": "kills",
    "tests/distributed/test_checkpoint_faults.py": "rank_faults",
    "tests/distributed/test_exact_resume.py": "exact_resume",
    "tests/distributed/test_rank_campaign.py": "rank_faults",
    "tests/unit/test_catalog_verify.py": "bit_rot",
}


def run(_: str, seed: int) -> Outcome:
    return run_batch(PIECES, batch_of(seed))


CAMPAIGN = Campaign(
    name="long_tests",
    promise="Every kind of parallelism, format and number of ranks loads what every other has "
    "saved; remainders of masters are exact for all 2**32 bit patterns; savers, deleters "
    "and collectors that take turns in any order lose nothing.",
    counted="tests",
    cases=229,
    run=run,
    batch_timeout_s=1800,
    ends=True,
)
