"""A training that is killed again and again while it saves in the background, and goes on each time
as if nothing had happened: every loss is bit for bit that of a run which nobody has disturbed.

Ranks are killed by SIGKILL, at a random moment of a random save, until 30 kills have fallen into
saves in ``make test``, more in ``make proof``; ``pytest -m proof -k seed-7`` runs one campaign.
"""

import itertools
import os
import random
import select
import signal
import time
from collections import Counter

import pytest
from resume_training import EVERY, Told, live, undisturbed

from holdfast.catalog import Catalog
from holdfast.testing import RankGang

HIDDEN = 4000  # 1 MiB of state, which takes a while to write
KILLS = 10  # of each campaign that fall into a save: 30 in every run
MOST_LIVES = 4 * KILLS  # some are killed too late, when the save is over
MOST_SAVES = 3  # of one life, before the one in which it is killed
SAVES = MOST_SAVES + 3  # after so many it waits for the kill, should that be late
STEPS = MOST_LIVES * SAVES * EVERY
IN_FLIGHT = ("capture", "agree", "begin", "write", "commit")
SOON_S, LATE_S = 0.03, 0.1  # after a save has begun


def killable(rank, folder, life, steps, kind):
    """One life, of which rank 0 says when a save has begun."""
    begun = os.open(folder / f"begun-{life}", os.O_WRONLY) if rank == 0 else None
    saves = itertools.count(1)

    def saving(_):
        if begun is not None:
            os.write(begun, b".")
        if next(saves) == SAVES:
            signal.pause()

    live(rank, folder, f"life-{life}", steps, saving=saving, kind=kind, hidden=HIDDEN)


class Campaign:
    """One training, and its many lives. ``_within_s`` is how long after its begin a save is
    disturbed, at most: less if that was too late of late, so that it follows the machine's speed.
    """

    def __init__(self, folder, kind, ranks, seed):
        self._folder = folder
        self._kind = kind
        self._ranks = ranks
        self._rng = random.Random(seed)
        self._within_s = SOON_S
        self._lives = 0
        self._durable = 0
        with RankGang(ranks) as gang:
            self._expected = gang.run(undisturbed, STEPS, kind=kind, hidden=HIDDEN)

    def be_killed(self):
        """Live until a kill, and return where the save was then, on rank 0."""
        phase = self._live(STEPS, self._kill)[0].phase
        self._within_s = min(self._within_s * (1.2 if phase in IN_FLIGHT else 0.7), LATE_S)
        return phase

    def end(self):
        """Live until it ends by itself, some steps later."""
        steps = self._durable + (SAVES - 1) * EVERY
        for each in self._live(steps, _finish):
            assert each.is_done
            assert each.failed == []
            assert (max(each.steps), each.saved) == (steps - 1, steps)

    def _live(self, steps, then):
        self._lives += 1
        path = self._folder / f"begun-{self._lives}"
        os.mkfifo(path)
        begun = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with RankGang(self._ranks) as gang:
                gang.start(killable, self._folder, self._lives, steps, self._kind)
                then(gang, begun)
        finally:
            os.close(begun)
        return self._judge()

    def _kill(self, gang, begun):
        """Kill all ranks at a random moment of a random save, one soon after the other."""
        for _ in range(1 + self._rng.randrange(MOST_SAVES)):
            self._await_save(begun, timeout_s=60)
        time.sleep(self._rng.random() * self._within_s)
        for rank in self._rng.sample(range(self._ranks), self._ranks):
            gang.kill(rank)
            time.sleep(self._rng.choice([0, 0, 0.002, 0.01]))

    @staticmethod
    def _await_save(begun, timeout_s):
        ready, _, _ = select.select([begun], [], [], timeout_s)
        assert ready, "nothing was saved in time"
        assert os.read(begun, 1), "the life has ended by itself"

    def _judge(self):
        """Compare what a life has told with the undisturbed run."""
        diaries = [self._folder / f"life-{self._lives}-rank-{n}" for n in range(self._ranks)]
        told = [Told.read(path) for path in diaries]
        for rank, each in enumerate(told):
            assert each.resumed is not None, (rank, each)
            assert each.resumed == told[0].resumed
            assert each.resumed >= self._durable, (self._lives, rank)
            assert each.passed_over == 0
            assert [*each.steps] == [*range(each.resumed, each.resumed + len(each.steps))]
            assert len(each.steps) >= EVERY - 1  # rank 0 may be a step ahead when it saves
            for step, told_of_it in each.steps.items():
                assert told_of_it == self._expected[rank][step], (self._lives, rank, step)
        self._durable = max(self._durable, *(each.saved for each in told))
        return told


def _finish(gang, _):
    for outcome in gang.outcomes(60):
        if (error := outcome.failure()) is not None:
            raise error


def kill_again_and_again(folder, kind, ranks, seed):
    """A whole campaign. Returns where the saves were when the ranks were killed."""
    campaign = Campaign(folder, kind, ranks, seed)
    fell = Counter()
    while in_flight(fell) < KILLS:
        assert fell.total() < MOST_LIVES, f"too few of the kills fell into a save: {shown(fell)}"
        fell[campaign.be_killed()] += 1
    campaign.end()
    catalog = Catalog(folder / "store")
    for info in catalog.list():
        assert catalog.verify(info.prefix).is_intact
    return fell


def in_flight(fell):
    return sum(fell[phase] for phase in IN_FLIGHT)


def shown(fell):
    return ", ".join(f"{phase}: {kills}" for phase, kills in fell.items())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_training_that_is_killed_while_it_saves_goes_on_bit_for_bit(
    tmp_path, kind, ranks, record_property
):
    fell = kill_again_and_again(tmp_path, kind, ranks, seed=ranks)
    record_property("cases", in_flight(fell))


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [pytest.param(seed, id=f"seed-{seed}") for seed in range(20)])
def test_so_it_does_however_often(tmp_path, seed, record_property):
    fell = Counter()
    for kind, ranks in (("ddp", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3)):
        folder = tmp_path / f"{kind}-{ranks}"
        folder.mkdir()
        fell += kill_again_and_again(folder, kind, ranks, seed=100 + seed)
    record_property("cases", in_flight(fell))
    for phase in (*IN_FLIGHT, "saved"):
        record_property(f"killed in {phase}", fell[phase])
