"""Whose turn it is: which campaign and subject get the next batch. Pure; knows no process and no
clock.

First everybody gets one batch, holdfast in all campaigns before its peers, so that a short run
tells something of everything. Then whoever has had least time, until it has reached its target: so
as many as can reach theirs, and what they leave goes to the rest. Each peer gets a quarter of what
holdfast gets: fewer cases tell enough of them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from _campaign import HOLDFAST, Campaign
from _ledger import Batch

PEERS_SHARE = 0.25
MOST_TROUBLES = 3  # of one subject in one campaign, which is then left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a subject has come in a campaign."""

    campaign: Campaign
    subject: str
    cases: int = 0
    violated: int = 0
    batches: int = 0
    seconds: float = 0.0
    troubles: int = 0
    has_ended: bool = False

    def after(self, batch: Batch) -> "Standing":
        return replace(
            self,
            cases=self.cases + batch.cases,
            violated=self.violated + batch.violated,
            batches=self.batches + 1,
            seconds=self.seconds + batch.seconds,
            troubles=self.troubles + (batch.trouble is not None),
            has_ended=self.has_ended or batch.is_last,
        )

    @property
    def wanted(self) -> int:
        return self.campaign.cases if self.subject == HOLDFAST else self.campaign.peer_cases

    @property
    def is_all(self) -> bool:
        """Whether all of it is done. A campaign that ends says itself when."""
        return self.has_ended or (not self.campaign.ends and self.cases >= self.wanted)

    @property
    def is_over(self) -> bool:
        """Whether it gets no more turns: it is done, or given up."""
        return self.is_all or self.troubles >= MOST_TROUBLES

    @property
    def batch_s(self) -> float:
        """How long a batch of it takes, as far as is known."""
        return self.seconds / self.batches if self.batches else 0.0

    @property
    def turn(self) -> tuple[bool, float]:
        """Whoever's is lowest is next."""
        is_peer = self.subject != HOLDFAST
        if not self.batches:
            return False, float(is_peer)
        return True, self.seconds / (PEERS_SHARE if is_peer else 1.0)


def standings(rows: Iterable[tuple[Campaign, str]], batches: Iterable[Batch]) -> list[Standing]:
    """Where everybody stands after ``batches``, in the order of ``rows``."""
    found = {
        (campaign.name, subject): Standing(campaign=campaign, subject=subject)
        for campaign, subject in rows
    }
    for batch in batches:
        row = batch.campaign, batch.subject
        if row in found:
            found[row] = found[row].after(batch)
    return list(found.values())


def next_turn(
    everybody: Sequence[Standing], *, left_s: float, busy: Collection[str] = ()
) -> Standing | None:
    """Who gets a batch now, if the time that is left is enough for one of theirs. One campaign runs
    one batch at a time: those in ``busy`` are passed over."""
    if left_s <= 0:
        return None
    able = [
        each
        for each in everybody
        if not each.is_over and each.batch_s <= left_s and each.campaign.name not in busy
    ]
    return min(able, key=lambda each: each.turn, default=None)
