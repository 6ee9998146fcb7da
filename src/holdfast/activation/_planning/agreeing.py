"""One plan for all ranks. Knows torch.distributed's default group and its store.

Ranks plan in step, for the model's forward and backward may call collectives: ranks that decided
apart would run different numbers of steps, and wait for each other for ever. Before they exchange
anything they meet at the store, where a rank that fails leaves word: collectives would wait for it.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.activation._planning.seen import StageProfile
from holdfast.errors import PlanError

T = TypeVar("T")

_MOST_WAIT_S = 0.1  # between two looks at the store, which thousands of ranks may share


@contextlib.contextmanager
def together() -> Iterator["Ranks"]:
    """The ranks that plan: all that there are, each of which must come. What is raised within is
    told to the others, who raise ``PlanError`` where they next meet."""
    ranks = Ranks()
    try:
        yield ranks
    except BaseException as error:
        ranks.tell(error)
        raise


class Ranks:
    """The ranks of the default group, or this process alone. Each calls the same methods in the
    same order."""

    def __init__(self) -> None:
        self._store: Any = None
        self._meetings = 0
        self._source = 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # It stays in the store with a number beside it: some rank may yet look at that.
            name = [f"holdfast/plan/{secrets.token_hex(8)}"]
            dist.broadcast_object_list(name, src=0)
            # A client of its own: one that waits blocks every other user of it.
            self._store = dist.PrefixStore(name[0], dist.group.WORLD.get_group_store().clone())

    def meet(self) -> None:
        """Wait for all. ``PlanError`` if one has failed, or is not there when torch's own patience
        would end."""
        if self._store is None:
            return
        self._meetings += 1
        due = self._meetings * dist.get_world_size()
        self._store.add("met", 1)
        until = time.monotonic() + self._store.timeout.total_seconds()
        wait_s = 0.001
        while (met := self._store.add("met", 0)) < due:
            self._raise_what_is_told()
            if time.monotonic() > until:
                raise PlanError(
                    f"{due - met} ranks did not come to where the others wait for them in "
                    "holdfast.plan, which every rank must call. The model is as it was"
                )
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_WAIT_S)

    def tell(self, error: BaseException) -> None:
        """Leave word of what this rank raises, unless another has."""
        if self._store is not None:
            told = {"rank": dist.get_rank(), "error": f"{type(error).__name__}: {error}"[:2000]}
            with contextlib.suppress(RuntimeError):  # no store: what is being raised says more
                self._store.compare_set("failed", "", json.dumps(told))

    def gathered(self, value: T) -> list[T]:
        """What every rank has."""
        if self._store is None:
            return [value]
        self.meet()
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def agreed(self, weight: int, *values: Any) -> tuple[Any, ...]:
        """``values`` as the rank has them whose ``weight`` is highest, which then decides."""
        weights = self.gathered(weight)
        self._source = weights.index(max(weights))
        return self._sent(values)

    def decided(self, decide: Callable[[], T]) -> T:
        """What the rank that decides finds: on another's machine, another version of a library
        might find something else."""
        decides = self._store is None or dist.get_rank() == self._source
        found: T = self._sent((decide() if decides else None,))[0]
        return found

    def _sent(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._store is None:
            return values
        self.meet()
        sent = list(values)
        dist.broadcast_object_list(sent, src=self._source)
        return tuple(sent)

    def _raise_what_is_told(self) -> None:
        if self._store.check(["failed"]):
            told = json.loads(self._store.get("failed"))
            raise PlanError(
                f"rank {told['rank']} failed in holdfast.plan: {told['error']}. One plan is made "
                "for all ranks, so none is made. The model is as it was",
                rank=told["rank"],
            )


def refuse_unlike(ranks: Ranks, asked: Mapping[str, Any]) -> None:
    """``PlanError`` on all ranks unless all are asked for the same."""
    for rank, other in enumerate(everywhere := ranks.gathered(dict(asked))):
        for name, first in everywhere[0].items():
            if other[name] != first:
                raise PlanError(
                    f"rank {rank} calls holdfast.plan with {name} {other[name]!r:.200}, and rank 0 "
                    f"with {first!r:.200}. One plan is made for all ranks, so they must ask for "
                    "the same. The model is as it was"
                )


def reconcile(ranks: Ranks, stages: Sequence[StageProfile]) -> None:
    """What only some ranks can do, none does. ``PlanError`` on all if they ran other stages."""
    told = ranks.gathered(
        [(each.name, each.kind, each.replayable, each.communicates) for each in stages]
    )
    ran = [[stage[:2] for stage in stages] for stages in told]
    for rank, other in enumerate(ran):
        if other != ran[0]:
            unlike = sorted({name for name, _ in {*other} ^ {*ran[0]}}) or "in another order"
            raise PlanError(
                f"rank {rank} ran other stages than rank 0: {unlike}. One plan is made for all "
                "ranks, so their models must do the same. The model is as it was"
            )
    for number, stage in enumerate(stages):
        stage.replayable = all(rank[number][2] for rank in told)
        stage.communicates = any(rank[number][3] for rank in told)
