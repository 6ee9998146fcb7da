"""A sick rank cannot hang the job: ranks raise, die, stop and are late in every phase of saves and
loads. The others know at once, name the rank, and what was saved before is whole.

For holdfast: first all that the tests have, then random jobs and kills that nobody has seen. For
DCP: until when does the other rank wait?
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from overwriting import require_old_or_new
from rank_campaign import require_named

from _campaign import HOLDFAST, Campaign, Outcome, batch_of
from _dcp_ranks import CASES, GIVE_UP_S, WAITED_S, Case, Noticed, notice
from _subjects import DCP
from _tests import Piece, batches_of, run_batch

PIECES = (
    Piece(tests="tests/distributed/test_checkpoint_faults.py", batches=25),
    Piece(tests="tests/distributed/test_rank_campaign.py", batches=6),
    Piece(tests="tests/crash/test_distributed_crash.py", batches=8),
)
JOBS, KILLS = 20, 8  # of a batch that is random
DCP_CASES = 6
MOST_TOLD = 5


def run(subject: str, seed: int) -> Outcome:
    number = batch_of(seed)
    if subject == DCP:
        first = number * DCP_CASES % len(CASES)
        return ask_dcp(CASES[first : first + DCP_CASES])
    if number < batches_of(PIECES):
        return run_batch(PIECES, number)
    return run_random(random.Random(seed))


def run_random(rng: random.Random) -> Outcome:
    """Jobs and kills of seeds of their own."""
    told: list[str] = []
    facts: Counter[str] = Counter()

    def attempt(words: str, case: Callable[[int], object]) -> None:
        seed = rng.randrange(10**9)
        try:
            case(seed)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the case failed
            told.append(f"{words} of seed {seed}: {type(error).__name__}: {error}")
        facts[words] += 1

    for _ in range(JOBS):
        attempt("random jobs with a sick rank", require_named)
    for _ in range(KILLS):
        attempt("overwrites with killed ranks", _overwrite)
    return Outcome(
        cases=JOBS + KILLS, violated=len(told), violations=tuple(told[:MOST_TOLD]), facts=facts
    )


def _overwrite(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        require_old_or_new(seed, Path(folder))


def ask_dcp(cases: tuple[Case, ...]) -> Outcome:
    told: list[str] = []
    facts: Counter[str] = Counter()
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            noticed = notice(case, Path(folder))
        words = judged(noticed)
        facts["waited for the timeout" if words else "knew before the timeout"] += 1
        facts["knew which rank it was"] += noticed.names(case.victim)
        if words:
            told.append(f"{case}: {words}")
    return Outcome(
        cases=len(cases), violated=len(told), violations=tuple(told[:MOST_TOLD]), facts=facts
    )


def judged(noticed: Noticed) -> str | None:
    """What is wrong with that, in words."""
    if noticed.error is None:
        if noticed.seconds < GIVE_UP_S:
            return "the other rank's save returned without an error"
        return f"the other rank still waits after {GIVE_UP_S:g} s"
    if noticed.seconds >= WAITED_S:
        return (
            f"the other rank waits for the process group's timeout, 30 min by default: here "
            f"{noticed.seconds:.1f} s, then {noticed.error.splitlines()[0][:200]}"
        )
    return None


def unavailable(subject: str) -> str | None:
    import torch.distributed as dist

    return None if dist.is_gloo_available() else f"{subject} needs gloo"


CAMPAIGN = Campaign(
    name="rank_faults",
    promise="A sick rank cannot hang the job: when one raises, is killed, stopped, late or has a "
    "failing storage in any phase, the others know soon and name it, nobody's state is half "
    "loaded, and the previous checkpoint is whole.",
    counted="rank faults",
    cases=1000,
    run=run,
    subjects=(HOLDFAST, DCP),
    peer_cases=len(CASES),
    batch_timeout_s=900,
    unavailable=unavailable,
)
