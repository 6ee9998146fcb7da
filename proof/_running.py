"""The run itself: batches side by side until the targets or the time are reached.

Decides nothing about whose turn it is (``_turns``) and knows no process (``_child``). Times are
monotonic seconds.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _campaign import Campaign
from _child import Child
from _found import again
from _ledger import Batch, Ledger, seed_of
from _screen import Screen
from _turns import Standing, next_turn, standings

POLL_S = 0.05


class CodeChangedError(Exception):
    """The code is no longer what the run began with: batches of the two are not to be mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is to be run, and where what is found goes. ``rows`` can all be run here;
    ``is_same_code`` is asked before every batch."""

    folder: Path
    rows: Sequence[tuple[Campaign, str]]
    seed: int
    jobs: int
    ledger: Ledger
    screen: Screen
    is_same_code: Callable[[], bool] = lambda: True


def run(plan: Run, *, until_s: float) -> None:
    """Run batches; the last ones begin before ``until_s`` and are waited for. What was found is in
    the ledger, also when this raises: batches that it breaks off then are run again next time."""
    everybody = standings(plan.rows, plan.ledger.batches())
    running: list[Child] = []
    try:
        while True:
            _begin(plan, everybody, running, until_s)
            if not running:
                return
            plan.screen.show(everybody, running, until_s - time.monotonic())
            time.sleep(POLL_S)
            for batch in _collect(plan, running):
                row = batch.campaign, batch.subject
                everybody = [
                    each.after(batch) if (each.campaign.name, each.subject) == row else each
                    for each in everybody
                ]
    finally:
        for child in running:
            child.close()


def _begin(plan: Run, everybody: Sequence[Standing], running: list[Child], until_s: float) -> None:
    while len(running) < plan.jobs:
        busy = {child.campaign.name for child in running}
        turn = next_turn(everybody, left_s=until_s - time.monotonic(), busy=busy)
        if turn is None:
            return
        if not plan.is_same_code():
            raise CodeChangedError(
                "the code changed while the run went on; what it found until then is kept"
            )
        seed = seed_of(plan.seed, turn.campaign.name, turn.subject, turn.batches)
        running.append(Child(plan.folder, turn.campaign, turn.subject, seed))


def _collect(plan: Run, running: list[Child]) -> list[Batch]:
    """Those that have ended, written down."""
    found = []
    for child in list(running):
        batch = child.poll()
        if batch is not None:
            plan.ledger.append(batch)
            running.remove(child)
            child.close()
            plan.screen.ended(batch, again(batch))
            found.append(batch)
    return found


def jobs_here() -> int:
    """As many as there are cores; more would only be in each other's way."""
    return len(os.sched_getaffinity(0))
