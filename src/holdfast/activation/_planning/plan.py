"""``ActivationPlan``: what every stage of a model keeps, drops or runs again so that a step fits a
budget. Knows the choice and how to show it; ``planning`` makes it."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import xxhash
from torch.nn import Module

from holdfast import _checks
from holdfast.activation._layers.checkpointed import refuse_taken
from holdfast.activation._planning.applying import AppliedPlan
from holdfast.activation._planning.deciding import Decision
from holdfast.activation._planning.stages import parameters_of, weights_of
from holdfast.activation._reporting.page import page
from holdfast.activation._reporting.report import PlanReport
from holdfast.activation._reporting.text import text
from holdfast.activation._reporting.words import in_bytes
from holdfast.errors import PlanError

VERSION = 1

T = TypeVar("T")


class _Seal(msgspec.Struct):
    """What is read of a plan before the rest: what it must hold to be read at all."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlan:
    """What each stage of a model does so that a step fits a budget: ``holdfast.plan`` makes it.

    An immutable value. It holds no tensors and no model, goes through JSON, and can be applied to
    any model with the same stages. ``summary`` has its numbers; ``decision`` is what ``apply``
    reads, and may look different in the next version.
    """

    version: int
    decision: Decision
    summary: PlanReport

    def __repr__(self) -> str:
        told = self.summary
        return (
            f"<ActivationPlan for {told.model}: {len(told.rows)} stages, budget "
            f"{in_bytes(told.budget_bytes)}, measured peak {in_bytes(told.measured_peak_bytes)}>"
        )

    @property
    def budget_bytes(self) -> int:
        """The budget the plan was made for, over what is resident when a step begins."""
        return self.summary.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak of a step under the plan, as it was measured when the plan was made."""
        return self.summary.measured_peak_bytes

    def apply(self, model: Any) -> AppliedPlan:
        """Have ``model`` follow the plan from now on, until the ``AppliedPlan`` that is returned is
        undone. A plan that keeps everything is applied too: larger batches may not fit so.

        Raises ``PlanError``, with the model unchanged, if it is not a model this plan is for, and
        ``ValueError`` if layers of it are checkpointed already.
        """
        modules = self._modules(model)
        following = AppliedPlan(self.decision)
        following._install(modules)  # noqa: SLF001 -- users have no use for it
        return following

    @contextlib.contextmanager
    def applied(self, model: Any) -> Iterator[AppliedPlan]:
        """``with plan.applied(model):``, within which ``model`` follows the plan, as ``apply`` has
        it do."""
        with self.apply(model) as following:
            yield following

    def report(self, *, width: int | None = None, colour: bool = False) -> str:
        """The plan for the terminal. ``colour`` needs rich: pip install "holdfast[progress]"."""
        return text(self.summary, width, colour=colour)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as one page that needs no network."""
        Path(path).write_text(page(self.summary), encoding="utf-8")

    def to_json(self) -> str:
        """The whole plan, for ``from_json``, which refuses one that was edited: a recipe that does
        not belong to its graph would fail in the middle of a step."""
        body = msgspec.json.encode(self).decode()
        return f'{{"digest":"{_digest(_read(type(self), body))}",{body[1:]}'

    @classmethod
    def from_json(cls, data: str | bytes) -> Self:
        """The plan that ``to_json`` wrote. ``PlanError`` if it is none, or was changed since."""
        seal = _read(_Seal, data)
        if seal.version != VERSION:
            raise PlanError(
                f"this plan has version {seal.version}, and this holdfast reads {VERSION}: make "
                "it again with holdfast.plan"
            )
        plan = _read(cls, data)
        if _digest(plan) != seal.digest:
            raise PlanError(
                "this plan was changed after to_json() wrote it: make it again with holdfast.plan"
            )
        plan.decision.check()
        return plan

    def _modules(self, model: Any) -> dict[str, Any]:
        _checks.instance("model", model, Module)
        modules = dict(model.named_modules())
        here = f"this plan, made for {self.summary.model}, is not for this {type(model).__name__}"
        found = {}
        for stage in self.decision.stages:
            module = modules.get(stage.name)
            if module is None:
                raise PlanError(f"{here}: that has no module {stage.name!r}")
            kind = type(module).__name__
            if kind != stage.kind:
                raise PlanError(
                    f"{here}: {stage.name!r} is a {kind} there and a {stage.kind} in the plan"
                )
            count = parameters_of(module)
            if count != stage.parameters:
                raise PlanError(
                    f"{here}: {stage.name!r} has {count:,} parameters there and "
                    f"{stage.parameters:,} in the plan"
                )
            weights = weights_of(module)
            if weights != stage.weights:
                raise PlanError(
                    f"{here}: the parameters of {stage.name!r} are {_told(weights)} there and "
                    f"{_told(stage.weights)} in the plan, so its tensors have other sizes, or lie "
                    "elsewhere. Make a plan for the model as it is"
                )
            found[stage.name] = module
        total = parameters_of(model)
        if total != self.decision.parameters:
            raise PlanError(
                f"{here}: it has {total:,} parameters, and the plan's model had "
                f"{self.decision.parameters:,}. Make a plan for the model as it is"
            )
        refuse_taken(model)
        return found


def _told(weights: tuple[str, ...]) -> str:
    return " and ".join(weights) or "none"


def _read(kind: type[T], data: str | bytes) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"this is not a plan that to_json() wrote: {error}") from error


def _digest(plan: ActivationPlan) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(plan))
