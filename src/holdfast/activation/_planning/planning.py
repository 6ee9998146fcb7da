"""``holdfast.plan``: profile, choose, apply, measure, correct. The one place where all of that
meets."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch.nn import Module

from holdfast import _checks
from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._measuring.meter import residents
from holdfast.activation._measuring.stretches import Course
from holdfast.activation._planning.agreeing import agreed, gathered, reconcile
from holdfast.activation._planning.applying import AppliedPlan
from holdfast.activation._planning.budget import LEAST_BYTES, share_or_bytes
from holdfast.activation._planning.choosing import chain_of
from holdfast.activation._planning.course_solving import solve_freely
from holdfast.activation._planning.deciding import Decision, PlannedStage, Tier, smallest
from holdfast.activation._planning.plan import VERSION, ActivationPlan
from holdfast.activation._planning.preserving import preserved
from holdfast.activation._planning.profiling import course_of, profile, timed_step
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._planning.showing import report_of
from holdfast.activation._planning.stages import parameters_of, stages_of
from holdfast.activation._reporting.words import in_bytes
from holdfast.activation._solving.chain import Chain
from holdfast.activation._solving.schedule import Infeasible, Schedule
from holdfast.activation._solving.solving import Solution, solve
from holdfast.errors import BudgetError, PlanError

_log = logging.getLogger("holdfast.activation")

_ROUNDS = 4
_WORTH = 0.02  # of the budget: less room than this is not worth another try
_ALIKE = 1.01  # times decide which of the smallest solutions it is: their peaks differ a little
_REPEATS = 2


def plan(
    model: Any,
    sample: Any,
    budget: float | str,
    *,
    loss: Callable[[Any], Any] | None = None,
    stages: Sequence[str] | None = None,
    tier: Literal["disk", "host"] | None = None,
    folder: str | os.PathLike[str] | None = None,
    solver: Literal["chain", "highs"] = "chain",
    progress: Callable[[str], None] | None = None,
) -> ActivationPlan:
    """A plan under which a training step of ``model`` on ``sample`` stays within ``budget``.

    ``sample`` is one batch: a mapping is given to the model as keywords, a tuple or list as
    arguments, anything else as the one argument. ``loss(output)`` gives the loss for the model's
    output; without it that is the output itself, its ``loss`` attribute or its ``"loss"`` entry.

    ``budget`` is what a step's forward and backward may take at most over what is resident when it
    begins (parameters, their gradients, optimizer state): an int of bytes, ``"1.5GiB"``,
    ``"800 MB"``; or a share of what the step takes when everything is kept: ``"40%"`` or ``0.4``.

    ``stages`` names the modules to plan, by name or pattern as in ``"blocks.*"``, none inside
    another; by default the repeated layers. What lies outside them stays as it is and counts.

    ``tier`` allows the plan to move what stages save, to ``"disk"`` (a scratch file in ``folder``)
    or, from an accelerator, to the ``"host"``, where it is measured to be faster than running them
    again.

    ``solver`` is ``"chain"``, or ``"highs"`` for models whose backward does not run the stages in
    the reverse order of their forward. That needs SciPy, ``pip install "holdfast[solver]"``, and
    decides only for batches of the sample's size, and for each stage by itself.

    The model is run about twenty times, in its present mode, which must be training mode; then
    gradients, buffers and random streams are given back as they were. One of these steps keeps
    everything: if that does not fit the device, plan with a smaller sample and train with larger
    batches, which the plan is then scaled to. ``progress`` is told in words what is going on, as
    is the logger ``holdfast.activation``. If ``torch.distributed`` is initialised, every rank must
    call it, with the same stages and budget; all get one plan, made for the highest peaks, in which
    stages that call collectives when they are run again do so on all ranks or on none.

    Raises ``BudgetError`` with the smallest budget if none fits, ``PlanError`` if the sample has no
    loss that needs gradients, ``ValueError`` for arguments that make no sense or a model without
    repeated layers; what the model raises on the sample comes through.
    """
    began = time.perf_counter()
    _checks.instance("model", model, Module)
    wanted = share_or_bytes(budget)
    taken = Sample.of(sample, loss)
    if progress is not None and not callable(progress):
        raise ValueError(f"progress must be a function of a text, not {progress!r:.200}")
    if solver not in _SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(map(repr, _SOLVERS))}, not {solver!r}")
    modules = stages_of(model, stages)
    moved_to = None
    if tier is not None:
        moved_to = Tier(tier=tier, folder=None if folder is None else os.fspath(folder))

    def tell(what: str) -> None:
        _log.info("plan: %s", what)
        if progress is not None:
            progress(what)

    with preserved(model, taken):
        tried = Trial(model, taken, modules, tier=moved_to, tell=tell)
        share = round(wanted * tried.everything_bytes) if isinstance(wanted, float) else wanted
        limit = min(gathered(share))
        found = tried.find(limit, _SOLVERS[solver])
        times = tried.times(found)
    return ActivationPlan(
        version=VERSION,
        decision=tried.decision(found.solution, found.solved_bytes),
        summary=report_of(
            type(model).__name__,
            tried.seen,
            found.solution,
            found.course,
            chain=tried.chain,
            limit=limit,
            times=times,
            planning_s=time.perf_counter() - began,
        ),
    )


def _device(model: Any) -> Any:
    for parameter in model.parameters():
        return parameter.device
    raise PlanError(f"{type(model).__name__} has no parameters, so it needs no plan")


Solving = Callable[[Chain, Course, int], Solution | Infeasible]


def _solve_chain(chain: Chain, course: Course, budget_bytes: int) -> Solution | Infeasible:
    del course
    return solve(chain, budget_bytes)


_SOLVERS: Final[Mapping[str, Solving]] = {"chain": _solve_chain, "highs": solve_freely}


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
        tier: Tier | None,
        tell: Callable[[str], None],
    ) -> None:
        self._model = model
        self._sample = sample
        self._device = _device(model)
        self._tier = tier
        self._tell = tell
        with contextlib.ExitStack() as stack:
            mover = None
            if tier is not None:
                mover = stack.enter_context(CheckpointManager(tier.tier, folder=tier.folder))
            self.seen = profile(model, sample, modules, self._device, tell=tell, mover=mover)
        self._modules = {stage.name: modules[stage.name] for stage in self.seen.stages}
        reconcile(self.seen.stages)
        self._stages, self.chain, self._kept, self._input_numel = agreed(
            self.seen.kept.peak_bytes,
            tuple(
                PlannedStage(
                    name=each.name,
                    kind=each.kind,
                    parameters=parameters_of(modules[each.name]),
                    recipes=each.recipes,
                )
                for each in self.seen.stages
            ),
            chain_of(self.seen),
            self.seen.kept,
            self.seen.stages[0].input_numel,
        )
        self._there = residents()
        self.everything_bytes: int = self._kept.peak_bytes

    def find(self, limit: int, solving: Solving) -> Found:
        """The fastest solution whose measured peak is within ``limit``, or ``BudgetError``."""
        if self.everything_bytes <= limit:
            return self._everything(limit)
        best: Found | None = None
        allowed = limit
        for turn in range(_ROUNDS):
            solution = solving(self.chain, self._kept, max(1, allowed))
            if isinstance(solution, Infeasible):
                break
            self._tell(f"measuring plan {turn + 1}")
            found = Found(solution, allowed, self._course(solution, allowed))
            measured = max(gathered(found.course.peak_bytes))
            if measured <= limit and (best is None or solution.extra_s < best.solution.extra_s):
                best = found
            # What was predicted too high or too low is given back or taken from the budget.
            corrected = limit - (measured - solution.peak_bytes)
            if best is not None and corrected < allowed + limit * _WORTH:
                break
            allowed = min(corrected, allowed - 1) if measured > limit else corrected
        return best or self._smallest(limit)

    def times(self, found: Found) -> tuple[float, float]:
        """The quickest step without and with the plan, taken in turns: a machine has its moods."""
        self._tell("timing the step under the plan")
        following = AppliedPlan(self.decision(found.solution, found.solved_bytes))
        without, planned = [], []
        for _ in range(_REPEATS):
            without.append(timed_step(self._model, self._sample, self._device))
            with following:
                following.install(self._modules)
                planned.append(timed_step(self._model, self._sample, self._device))
        return min(without), min(planned)

    def decision(self, solution: Solution, solved_bytes: int) -> Decision:
        return Decision(
            stages=self._stages,
            chain=self.chain,
            schedule=solution.schedule,
            solved_bytes=solved_bytes,
            input_numel=self._input_numel,
            tier=self._tier,
            communicates=any(stage.communicates for stage in self.seen.stages),
        )

    def _everything(self, limit: int) -> Found:
        solution = Solution(
            schedule=Schedule(choices=(0,) * len(self.chain.stages)),
            extra_s=0.0,
            peak_bytes=self.everything_bytes,
            slot_bytes=0,
            rounding_bytes=0,
        )
        return Found(solution, limit, self.seen.kept)

    def _smallest(self, limit: int) -> Found:
        """The smallest solution, if it fits when it is measured."""
        solution, reason = smallest(self.chain)
        self._tell("measuring the smallest plan")
        course = self._course(solution, solution.peak_bytes)
        measured = max(gathered(course.peak_bytes))
        if measured <= limit:
            return Found(solution, solution.peak_bytes, course)
        least = max(LEAST_BYTES, math.ceil(measured * _ALIKE))
        raise BudgetError(
            f"no plan fits {in_bytes(limit)}: the smallest step of this model on this sample takes "
            f"{in_bytes(least)}, set by {reason}. Keeping everything takes "
            f"{in_bytes(self.everything_bytes)}. Give a larger budget or a smaller sample. The "
            "model is as it was",
            smallest_bytes=least,
        )

    def _course(self, solution: Solution, solved_bytes: int) -> Course:
        following = AppliedPlan(self.decision(solution, solved_bytes))
        return course_of(
            self._model,
            self._sample,
            self._modules,
            following.run,
            self._device,
            there=self._there,
        )
