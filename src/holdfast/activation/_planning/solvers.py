"""Who chooses: the solvers a user can name, each with what it can find at the least. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.activation._measuring.stretches import Course
from holdfast.activation._planning.course_solving import solve_freely
from holdfast.activation._solving.chain import Chain
from holdfast.activation._solving.dag_solving import require_highs
from holdfast.activation._solving.schedule import Infeasible
from holdfast.activation._solving.solving import Point, Solution, curve, lowest, solve
from holdfast.errors import PlanError

_TRIES = 4  # one that stops after a time may find something else each time


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """Solves a chain, seen in the course of a step that keeps everything, for a budget.

    ``require`` raises ``ImportError`` where it cannot run. ``curve`` has the least extra time at
    every budget, or nothing where each budget would have to be solved for by itself.
    """

    require: Callable[[], object]
    solve: Callable[[Chain, Course, int], Solution | Infeasible]
    curve: Callable[[Chain], tuple[Point, ...]]

    def smallest(self, chain: Chain, course: Course) -> tuple[Solution, str]:
        """The solution with the lowest peak, and what sets that, in words."""
        found, reason = lowest(lambda budget: self.solve(chain, course, budget), _TRIES)
        if isinstance(found, Solution):
            return found, reason
        raise PlanError(
            "the solver did not find again in time what it had found: use solver='chain'"
        )


def _nothing() -> None:
    pass


def _by_chain(chain: Chain, course: Course, budget_bytes: int) -> Solution | Infeasible:
    del course
    return solve(chain, budget_bytes)


def _no_curve(chain: Chain) -> tuple[Point, ...]:
    del chain
    return ()


SOLVERS: Final[Mapping[str, Solver]] = {
    "chain": Solver(require=_nothing, solve=_by_chain, curve=curve),
    "highs": Solver(require=require_highs, solve=solve_freely, curve=_no_curve),
}
