"""``holdfast.plan``: profile, choose, apply, measure, correct. The one place where all of that
meets."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.nn import Module

from holdfast import _checks
from holdfast.activation._planning.agreeing import Ranks, refuse_unlike, together
from holdfast.activation._planning.budget import share_or_bytes
from holdfast.activation._planning.deciding import Tier
from holdfast.activation._planning.plan import VERSION, ActivationPlan
from holdfast.activation._planning.preserving import preserved
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._planning.showing import report_of
from holdfast.activation._planning.solvers import SOLVERS, Solver
from holdfast.activation._planning.stages import stages_of
from holdfast.activation._planning.trial import Trial
from holdfast.errors import PlanError

_log = logging.getLogger("holdfast.activation")


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
    gradients, buffers, random streams and the sample are given back as they were, from copies that
    lie beside them meanwhile. One of these steps keeps everything: if that does not fit the device,
    plan with a smaller sample and train with larger batches, which the plan is then scaled to.
    ``progress`` is told in words what is going on, as is the logger ``holdfast.activation``. If
    ``torch.distributed`` is initialised, every rank must call it, with the same arguments but for
    the sample; all get one plan, made for the highest peaks, in which stages that call collectives
    when they are run again do so on all ranks or on none. A rank that raises tells the others, who
    raise ``PlanError`` where they next meet it: not from within a collective of the model's own.

    Raises ``BudgetError`` with the smallest budget if none fits; ``PlanError`` if the sample has no
    loss that needs gradients, if something changes the parameters in a step (an optimizer that
    steps in backward), or if another rank fails or asks for something else; ``ValueError`` for
    arguments that make no sense or a model without repeated layers; ``ImportError`` for a solver
    that is not installed; what the model raises on the sample comes through.
    """
    began = time.perf_counter()
    with together() as ranks:
        _checks.instance("model", model, Module)
        wanted = share_or_bytes(budget)
        if progress is not None and not callable(progress):
            raise ValueError(f"progress must be a function of a text, not {progress!r:.200}")
        chosen = _solver(solver)
        modules = stages_of(model, stages)
        if not any(module.training for module in modules.values()):
            raise PlanError(
                "the layers to be planned are in eval mode, in which nothing is dropped: call "
                "model.train() first. The model is as it was"
            )
        moved_to = _tier(tier, folder, _device(model))
        taken = Sample.of(sample, loss)

        def tell(what: str) -> None:
            _log.info("plan: %s", what)
            if progress is not None:
                progress(what)

        kind = "a share" if isinstance(wanted, float) else "bytes"
        asked = {"stages": list(modules), "tier": tier, "solver": solver, "a budget given as": kind}
        refuse_unlike(ranks, asked)
        with preserved(model, taken) as refuse_changes:
            taken = taken.calling(_between(ranks, refuse_changes))
            tried = Trial(
                model, taken, modules, solver=chosen, tier=moved_to, ranks=ranks, tell=tell
            )
            share = round(wanted * tried.everything_bytes) if isinstance(wanted, float) else wanted
            limit = min(ranks.gathered(share))
            found, times = tried.quickest(limit)
            refuse_changes()
        return ActivationPlan(
            version=VERSION,
            decision=tried.decision(found.solution, found.solved_bytes),
            summary=report_of(
                type(model).__name__,
                tried.seen,
                found.solution,
                found.course,
                stages=tried.stages,
                chain=tried.chain,
                floor=tried.floor(),
                curve=ranks.decided(lambda: chosen.curve(tried.chain)),
                limit=limit,
                times=times,
                planning_s=time.perf_counter() - began,
            ),
        )


def _between(ranks: Ranks, refuse_changes: Callable[[], None]) -> Callable[[], None]:
    """What is done in every step between its forward and its backward."""
    has_met = False

    def call() -> None:
        nonlocal has_met
        refuse_changes()
        # In backward, as of DDP, ranks may wait for each other: who failed before must have said.
        if not has_met:
            has_met = True
            ranks.meet()

    return call


def _solver(name: object) -> Solver:
    if not isinstance(name, str) or name not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, not {name!r}")
    SOLVERS[name].require()
    return SOLVERS[name]


def _tier(name: object, folder: str | os.PathLike[str] | None, device: Any) -> Tier | None:
    if name is None:
        if folder is not None:
            raise ValueError(f"folder is for tier='disk': without it nothing goes to {folder!r}")
        return None
    if name not in ("disk", "host"):
        raise ValueError(f"tier must be 'disk' or 'host', not {name!r:.200}")
    if name == "host" and device.type == "cpu":
        raise ValueError(
            "tier='host' moves what stages save from an accelerator to the host, and this model is "
            "on the host: use tier='disk', or no tier"
        )
    if name == "host" and folder is not None:
        raise ValueError(f"folder is for tier='disk': tier='host' has no use for {folder!r}")
    return Tier(tier=str(name), folder=None if folder is None else os.fspath(folder))


def _device(model: Any) -> Any:
    for parameter in model.parameters():
        return parameter.device
    raise PlanError(f"{type(model).__name__} has no parameters, so it needs no plan")
