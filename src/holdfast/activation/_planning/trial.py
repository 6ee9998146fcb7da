"""A model on which solutions are tried until one fits. Knows the chain that all ranks agreed on,
and how a step under a solution is measured."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._measuring.stretches import Course
from holdfast.activation._planning.agreeing import Ranks, reconcile
from holdfast.activation._planning.applying import AppliedPlan
from holdfast.activation._planning.budget import LEAST_BYTES
from holdfast.activation._planning.choosing import chain_of, timeless, without_recipes
from holdfast.activation._planning.deciding import Decision, PlannedStage, Tier
from holdfast.activation._planning.profiling import course_of, profile
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._planning.solvers import Solver
from holdfast.activation._planning.stages import parameters_of, weights_of
from holdfast.activation._planning.timing import timed_step
from holdfast.activation._reporting.words import in_bytes
from holdfast.activation._solving.schedule import Infeasible, Schedule
from holdfast.activation._solving.solving import Solution
from holdfast.errors import BudgetError

_ROUNDS = 4
_WORTH = 0.02  # of the budget: less room than this is not worth another try
_NEAR = 0.05  # of a step: what is foreseen to be slower by more is not tried
_ALIKE = 1.02  # what is measured again differs a little


@dataclass(frozen=True, slots=True)
class Found:
    """A solution, what it was solved for, and the course of a step under it."""

    solution: Solution
    solved_bytes: int
    course: Course


class Trial:
    """A model that has been profiled, on which solutions are tried."""

    def __init__(
        self,
        model: Any,
        sample: Sample,
        modules: dict[str, Any],
        *,
        solver: Solver,
        tier: Tier | None,
        ranks: Ranks,
        tell: Callable[[str], None],
    ) -> None:
        self._model = model
        self._sample = sample
        self._device = next(model.parameters()).device
        self._solver = solver
        self._tier = tier
        self._ranks = ranks
        self._tell = tell
        with contextlib.ExitStack() as stack:
            mover = None
            if tier is not None:
                mover = stack.enter_context(CheckpointManager(tier.tier, folder=tier.folder))
            self.seen, self._there = profile(
                model, sample, modules, self._device, tell=tell, mover=mover
            )
        self._modules = {stage.name: modules[stage.name] for stage in self.seen.stages}
        reconcile(ranks, self.seen.stages)
        self.stages, self.chain, self._kept = ranks.agreed(
            self.seen.kept.peak_bytes,
            tuple(
                PlannedStage(
                    name=each.name,
                    kind=each.kind,
                    parameters=parameters_of(modules[each.name]),
                    weights=weights_of(modules[each.name]),
                    recipes=each.recipes,
                    size=each.size,
                )
                for each in self.seen.stages
            ),
            chain_of(self.seen),
            self.seen.kept,
        )
        self.everything_bytes: int = self._kept.peak_bytes

    def quickest(self, limit: int) -> tuple[Found, tuple[float, float]]:
        """The solution that fits and is quickest when it is timed, and the seconds of a step
        without and with it; ``BudgetError`` if none fits.

        What recipes cost in a step is the hardest to foresee. So where the best solution that has
        none may be as quick, both are tried.
        """
        found = self.find(limit)
        without_s, planned_s = self.times(found)
        other = self._without_recipes(found, limit)
        if other is not None:
            other_without_s, other_s = self.times(other)
            without_s = min(without_s, other_without_s)
            gained_s = sum(self._ranks.gathered(planned_s - other_s))
            if gained_s > 0:
                return other, (without_s, other_s)
        return found, (without_s, planned_s)

    def _without_recipes(self, found: Found, limit: int) -> Found | None:
        """The best such solution, measured, if it fits and is foreseen to be about as quick."""
        schedule = found.solution.schedule
        options = zip(self.chain.stages, schedule.choices, strict=True)
        if not any(
            choice is not None and stage.options[choice].dropped for stage, choice in options
        ):
            return None
        chain = without_recipes(self.chain)
        allowed = found.solved_bytes
        solution = self._ranks.decided(lambda: self._solver.solve(chain, self._kept, allowed))
        near_s = found.solution.extra_s + _NEAR * self.seen.seconds["kept"]
        if isinstance(solution, Infeasible) or not all(
            self._ranks.gathered(solution.extra_s < near_s)
        ):
            return None
        self._tell("measuring a plan without recipes")
        course = self._course(solution, allowed)
        if max(self._ranks.gathered(course.peak_bytes)) > limit:
            return None
        return Found(solution, allowed, course)

    def find(self, limit: int) -> Found:
        """The fastest solution whose measured peak is within ``limit``, or ``BudgetError``."""
        if self.everything_bytes <= limit:
            return self._everything(limit)
        best: Found | None = None
        allowed = limit
        for turn in range(_ROUNDS):
            solution = self._solve(max(1, allowed))
            if isinstance(solution, Infeasible):
                break
            self._tell(f"measuring plan {turn + 1}")
            found = Found(solution, allowed, self._course(solution, allowed))
            measured = max(self._ranks.gathered(found.course.peak_bytes))
            if measured <= limit and (best is None or solution.extra_s < best.solution.extra_s):
                best = found
            # What was predicted too high or too low is given back or taken from the budget.
            corrected = limit - (measured - solution.peak_bytes)
            if best is not None and corrected < allowed + limit * _WORTH:
                break
            allowed = min(corrected, allowed - 1) if measured > limit else corrected
        return best or self._smallest(limit)

    def times(self, found: Found) -> tuple[float, float]:
        """The quickest step without and with the plan; a machine has its moods, so once more
        without between those with it."""
        self._tell("timing the step under the plan")
        following = AppliedPlan(self.decision(found.solution, found.solved_bytes))

        def planned_s() -> float:
            with following:
                following._install(self._modules)  # noqa: SLF001 -- as in plan.apply
                return timed_step(self._model, self._sample, self._device)

        before = planned_s()
        without = timed_step(self._model, self._sample, self._device)
        return min(self.seen.seconds["kept"], without), min(before, planned_s())

    def decision(self, solution: Solution, solved_bytes: int) -> Decision:
        return Decision(
            stages=self.stages,
            chain=self.chain,
            schedule=solution.schedule,
            solved_bytes=solved_bytes,
            parameters=parameters_of(self._model),
            tier=self._tier,
            communicates=any(stage.communicates for stage in self.seen.stages),
        )

    def _solve(self, budget_bytes: int) -> Solution | Infeasible:
        return self._ranks.decided(lambda: self._solver.solve(self.chain, self._kept, budget_bytes))

    def floor(self) -> tuple[Solution, str]:
        """The solution with the lowest peak, and what sets that, in words."""
        chain = timeless(self.chain)
        return self._ranks.decided(lambda: self._solver.smallest(chain, self._kept))

    def _everything(self, limit: int) -> Found:
        solution = Solution(
            schedule=Schedule(choices=(0,) * len(self.chain.stages)),
            extra_s=0.0,
            peak_bytes=self.everything_bytes,
            rounding_bytes=0,
        )
        return Found(solution, limit, self.seen.kept)

    def _smallest(self, limit: int) -> Found:
        """The smallest solution, if it fits when it is measured."""
        solution, reason = self.floor()
        self._tell("measuring the smallest plan")
        course = self._course(solution, solution.peak_bytes)
        measured = max(self._ranks.gathered(course.peak_bytes))
        if measured <= limit:
            return Found(solution, solution.peak_bytes, course)
        everything = self.everything_bytes
        least = max(LEAST_BYTES, min(everything, math.ceil(measured * _ALIKE)))
        raise BudgetError(
            f"no plan fits {in_bytes(limit)}: the smallest step of this model on this sample takes "
            f"{in_bytes(least)}, set by {reason}. Keeping everything takes {in_bytes(everything)}, "
            f"of which the smallest is {least / everything:.1%} and the budget "
            f"{limit / everything:.1%}. Give a larger budget or a smaller sample. The model is as "
            "it was",
            smallest_bytes=least,
        )

    def _course(self, solution: Solution, solved_bytes: int) -> Course:
        following = AppliedPlan(self.decision(solution, solved_bytes))
        return course_of(
            self._model,
            self._sample,
            self._modules,
            following._call,  # noqa: SLF001 -- as its stand-ins do
            self._device,
            there=self._there,
        )
