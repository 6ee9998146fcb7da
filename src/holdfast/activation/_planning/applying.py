"""A plan at work on a model. Knows what each stage is to do, and does it; does not decide."""

import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._layers.layer_forward import (
    Arguments,
    Forward,
    checkpointed,
    install,
    remove,
)
from holdfast.activation._planning.deciding import Decision
from holdfast.activation._planning.forwards import Acting, Decided, Forwards, Known
from holdfast.activation._planning.linking import Linked, Pass, hooked, may_link, run_linked
from holdfast.activation._planning.profiling import moving
from holdfast.activation._planning.sizes import Shapes, shapes_of, size_of
from holdfast.activation._planning.stages import roots_of
from holdfast.activation._regions.region import Region

_log = logging.getLogger("holdfast.activation")

_MOST_FALLBACKS = 100  # their texts have numbers in them, which could go on for ever

_UNFORESEEN = (
    "meets larger inputs than any forward before that began like this one: it keeps as little as "
    "can be, as do the stages after it, but this step may exceed the budget"
)
_NOT_REPLAYED = (
    "keeps what was planned for smaller inputs: it cannot be run again, so what larger ones save "
    "is not known"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A stage that did not do what the plan says, and why."""

    stage: str
    reason: str


class _Forward(threading.local):
    """Where the forward of this thread is: what it began like, what was decided for that then, the
    stage that ran last, and those that kept no more than inputs because nothing was decided for
    what they met. ``is_off``: what was decided no longer holds; ``is_larger``: as these met larger
    inputs than the sample's. Nothing in it keeps a tensor alive."""

    known: Known | None = None
    decided: Decided | None = None
    number = -1
    learned: tuple[int, ...] = ()
    is_off = False
    is_larger = False
    owed_bytes = 0
    last: tuple[int, Linked] | None = None


class AppliedPlan:
    """A plan that a model follows until it is undone; also as a context. Thread-safe.

    The stages keep it alive, it does not keep the model alive. In eval mode or without gradients
    they run as they are. When a forward begins with shapes that none before began with, its stages
    keep only inputs, and it is seen what they would save; when such a forward comes again, it is
    decided for, which takes up to a second. A stage whose graph is not the one that was planned
    keeps everything, and stages after it keep only their inputs until that is made up for; see
    ``fallbacks``. Neither is so where stages call collectives when they are run again: then all
    batches are decided for like the sample, for ranks that did not do alike would wait for ever.
    """

    def __init__(self, decision: Decision) -> None:
        self._decision = decision
        self._first = decision.stages[0].name
        self._manager = CheckpointManager()
        tier = decision.tier
        self._mover = None if tier is None else CheckpointManager(tier.tier, folder=tier.folder)
        self._modules: dict[str, weakref.ref[Any]] = {}
        self._lock = threading.Lock()
        self._forwards = Forwards(decision)
        self._numbers = {stage.name: number for number, stage in enumerate(decision.stages)}
        self._fallbacks: dict[Fallback, None] = {}
        self._now = _Forward()

    def _install(self, modules: Mapping[str, Any]) -> None:
        """Have the stages follow the plan."""
        with self._lock:
            for name, module in modules.items():
                self._modules[name] = weakref.ref(module)
                install(module, name, self)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Where the plan was not followed, each case once; the first hundred."""
        self._finish(self._now)
        return tuple(self._fallbacks)

    def undo(self) -> None:
        """Give every stage back the forward it had. A forward that was run before can still run its
        backward. Idempotent."""
        with self._lock:
            while self._modules:
                module = self._modules.popitem()[1]()
                if module is not None:
                    remove(module, self)

    def __repr__(self) -> str:
        return f"<AppliedPlan on {len(self._modules)} stages, {len(self._fallbacks)} fallbacks>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def _call(self, name: str, module: Any, forward: Forward, call: Arguments) -> Any:
        """A stage's call in training."""
        number = self._numbers[name]
        if not may_link():
            return self._as_planned(number, name, module, forward, call)
        now = self._now
        shapes = shapes_of(call)
        known = now.known
        if number <= now.number or known is None:
            known = self._begin(now, number, shapes)
        now.number = number
        if now.decided is not None and not now.is_off:
            expected = shapes in known.expected[number]
            if expected or self._forwards.expects(known, number, shapes, call):
                return self._follow(now.decided.stages[number], name, module, forward, call)
        return self._learn(known, name, module, forward, call)

    def _recomputes(self, name: str) -> bool:
        """A copy of the model has no plan, so it replays what it cannot drop."""
        number = self._numbers[name]
        kind = self._forwards.planned.stages[number].action.kind
        return kind != "keep" and self._decision.chain.stages[number].replayable

    def _begin(self, now: _Forward, number: int, shapes: Shapes) -> Known:
        self._finish(now)
        known = now.known = self._forwards.beginning(number, shapes)
        now.decided, now.is_off, now.is_larger = known.decided, False, False
        now.owed_bytes, now.last = 0, None
        if now.decided is not None and now.decided.problem:
            self._note(self._first, now.decided.problem)
        if self._decision.communicates and self._forwards.is_larger(number, shapes):
            self._note(self._first, "meets larger batches than the sample, and does as for that")
        return known

    def _finish(self, now: _Forward) -> None:
        """Tell of a forward that met what nothing was decided for, if that can have been too much
        though all stages that did kept as little as they can."""
        known, learned, now.learned = now.known, now.learned, ()
        if known is None or not learned:
            return
        first = self._decision.stages[learned[0]].name
        decided = now.decided
        if decided is None and now.is_larger:
            decided, learned = self._forwards.least(), ()
        if self._forwards.may_exceed(known, decided, learned):
            self._note(first, _UNFORESEEN)

    def _learn(
        self, known: Known, name: str, module: Any, forward: Forward, call: Arguments
    ) -> Any:
        """Run a stage that meets what nothing was decided for, and take note of what it saves."""
        now = self._now
        number = now.number
        if not self._decision.chain.stages[number].replayable:
            if not self._forwards.meet(known, number, call):
                now.is_off = True
                if self._forwards.saves_more(number, call):
                    self._note(name, _NOT_REPLAYED)
            acting = (now.decided or self._forwards.planned).stages[number]
            return self._follow(acting, name, module, forward, call)
        now.is_larger |= self._forwards.is_larger(number, shapes_of(call))
        passes = self._forwards.least().stages[number].action.passes if now.is_larger else {}
        output, region = self._linked(passes, name, module, forward, call)
        constants = {each.numel() for each in module.parameters()}
        if not self._forwards.learn(known, number, size_of(call, region), constants):
            now.is_off = True
        now.learned += (number,)
        return output

    def _follow(
        self, acting: Acting, name: str, module: Any, forward: Forward, call: Arguments
    ) -> Any:
        """Run a stage as it was decided."""
        now, action = self._now, acting.action
        if action.kind == "segment":
            return self._linked(action.passes, name, module, forward, call)[0]
        if now.owed_bytes > 0 and action.spare_bytes > 0:
            now.owed_bytes -= action.spare_bytes
            self._note(name, "keeps only its input, to make up for what a stage before it kept")
            return checkpointed(name, module, forward, call, self._manager)
        if action.kind == "input":
            return checkpointed(name, module, forward, call, self._manager)
        if action.kind == "moved" and self._mover is not None:
            return moving(self._mover, name, module, forward, call)
        args, kwargs = call
        output = forward(*args, **kwargs)
        if acting.dropping is not None and not acting.dropping.drop(roots_of(output, call)):
            now.owed_bytes += action.saves_bytes
            self._note(
                name,
                "keeps everything: its graph is not the one that was planned (another branch, "
                "autocast, dtype or mask?)",
            )
        return output

    def _linked(
        self, passes: Mapping[int, Pass], name: str, module: Any, forward: Forward, call: Arguments
    ) -> tuple[Any, Region]:
        """Run a stage of the segment that has these passes; without any, one that is alone."""
        now, number = self._now, self._numbers[name]
        last, now.last = now.last, None
        linked_to = number - 1 in passes
        output, region, linked = run_linked(
            number,
            module,
            forward,
            call,
            name=name,
            before=last[1] if linked_to and last and last[0] == number - 1 else None,
            passes=passes,
            manager=self._manager,
        )
        if linked_to and last is not None and linked.link is None:
            self._note(name, "keeps its input: it is not what the stage before returned")
        if number + 1 in passes:
            now.last = (number, linked)
        return output, region

    def _as_planned(
        self, number: int, name: str, module: Any, forward: Forward, call: Arguments
    ) -> Any:
        """Run a stage where others' hooks are at work on what autograd saves, or tensors are only
        traced. What is done depends on the shapes alone: under another checkpoint a stage runs
        again, and must then do the same."""
        acting = self._forwards.planned.stages[number]
        action = acting.action
        is_hooked, drops = hooked(), acting.dropping is not None
        other = is_hooked and self._forwards.is_other(number, call)
        replays = action.kind in {"input", "segment"} or (drops and action.spare_bytes > 0) or other
        if is_hooked and (drops or other or action.kind == "segment"):
            kept = "its input" if replays else "everything"
            self._note(name, f"keeps {kept}: other hooks are at work on what autograd saves")
        if replays:
            return checkpointed(name, module, forward, call, self._manager)
        if action.kind == "moved" and self._mover is not None:
            return moving(self._mover, name, module, forward, call)
        args, kwargs = call
        return forward(*args, **kwargs)

    def _note(self, stage: str, reason: str) -> None:
        fallback = Fallback(stage=stage, reason=reason)
        if fallback not in self._fallbacks and len(self._fallbacks) < _MOST_FALLBACKS:
            self._fallbacks[fallback] = None
            _log.warning("stage %r %s", stage, reason)
