"""Resume is exact: trainings are killed again and again while they save, and go on bit for bit; a
resumed optimizer takes the very steps that it would have taken. The cases are the tests'.
"""

from _campaign import Campaign, Outcome, batch_of
from _tests import Piece, run_batch

PIECES = (
    Piece(
        tests="tests/numerics/test_precision_resume.py::test_the_next_hundred_steps_are_the_same",
        batches=1,
    ),
    Piece(tests="tests/distributed/test_exact_resume.py", batches=23),
)


def run(_: str, seed: int) -> Outcome:
    return run_batch(PIECES, batch_of(seed))


CAMPAIGN = Campaign(
    name="exact_resume",
    promise="Resume is exact, to the last bit: of trainings on 1 to 3 ranks that are killed at "
    "random moments of their saves, again and again; and of every optimizer, precision and moment "
    "of mixed precision, for 100 steps more.",
    counted="kills and resumes",
    cases=882,
    run=run,
    batch_timeout_s=900,
    ends=True,
)
