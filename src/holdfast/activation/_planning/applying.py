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
from holdfast.activation._planning.deciding import Action, Decision
from holdfast.activation._planning.linking import Linked, hooked, may_link, run_linked
from holdfast.activation._planning.profiling import moving
from holdfast.activation._planning.stages import numel_of, roots_of
from holdfast.activation._recipes.dropping import Dropping

_log = logging.getLogger("holdfast.activation")

_HOOKED = "keeps its input: other hooks are at work on what autograd saves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A stage that did not do what the plan says, and why."""

    stage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Acting:
    """What a stage does, ready to be done."""

    action: Action
    dropping: Dropping | None


class _Forward(threading.local):
    """Where the forward of this thread is."""

    stages: Mapping[str, _Acting] | None = None
    owed_bytes = 0
    last: tuple[int, Linked] | None = None


class AppliedPlan:
    """A plan that a model follows until it is undone; also as a context. Thread-safe.

    The stages keep it alive, it does not keep the model alive. In eval mode or without gradients
    they run as they are. Batches of another size than the sample's are decided for when they first
    come, which takes up to a second. A stage whose graph is not the one that was planned keeps
    everything, and stages after it keep only their inputs until that is made up for; see
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
        self._known: dict[int, Mapping[str, _Acting]] = {}
        self._fallbacks: dict[Fallback, None] = {}
        self._now = _Forward()

    def install(self, modules: Mapping[str, Any]) -> None:
        """Have the stages follow the plan."""
        with self._lock:
            for name, module in modules.items():
                self._modules[name] = weakref.ref(module)
                install(module, name, self)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Where the plan was not followed, each case once."""
        return tuple(self._fallbacks)

    def undo(self) -> None:
        """Give every stage back the forward it had. A forward that was run before can still run its
        backward. Idempotent."""
        with self._lock:
            while self._modules:
                module = self._modules.popitem()[1]()
                if module is not None:
                    remove(module, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def run(self, name: str, module: Any, forward: Forward, call: Arguments) -> Any:
        """A stage's call in training."""
        now = self._now
        if name == self._first or now.stages is None:
            now.stages, now.owed_bytes, now.last = self._stages(call), 0, None
        acting = now.stages[name]
        action = acting.action
        if action.kind == "segment":
            return self._in_segment(action, name, module, forward, call)
        if now.owed_bytes > 0 and action.spare_bytes > 0:
            now.owed_bytes -= action.spare_bytes
            self._note(name, "keeps only its input, to make up for what a stage before it kept")
            return checkpointed(name, module, forward, call, self._manager)
        if acting.dropping is not None and action.spare_bytes > 0 and hooked():
            self._note(name, _HOOKED)
            return checkpointed(name, module, forward, call, self._manager)
        if action.kind == "input":
            return checkpointed(name, module, forward, call, self._manager)
        if action.kind == "moved" and self._mover is not None:
            return moving(self._mover, name, module, forward, call)
        args, kwargs = call
        output = forward(*args, **kwargs)
        if acting.dropping is not None and not acting.dropping.drop(roots_of(output, call)):
            now.owed_bytes += action.saves_bytes
            self._note(name, "keeps everything: its graph is not the one that was planned")
        return output

    _call = run

    def _recomputes(self, name: str) -> bool:
        """A copy of the model has no plan, so it replays what it cannot drop."""
        action = self._acting(0)[name].action
        return action.kind != "keep" and self._decision.chain.stages[action.number].replayable

    def _in_segment(
        self, action: Action, name: str, module: Any, forward: Forward, call: Arguments
    ) -> Any:
        if not may_link():
            self._note(name, _HOOKED)
            return checkpointed(name, module, forward, call, self._manager)
        now = self._now
        last, now.last = now.last, None
        linked_to = action.number - 1 in action.passes
        output, linked = run_linked(
            action.number,
            module,
            forward,
            call,
            name=name,
            before=last[1] if linked_to and last and last[0] == action.number - 1 else None,
            passes=action.passes,
            manager=self._manager,
        )
        if linked_to and linked.link is None:
            self._note(name, "keeps its input: it is not what the stage before returned")
        if action.number + 1 in action.passes:
            now.last = (action.number, linked)
        return output

    def _stages(self, call: Arguments) -> Mapping[str, _Acting]:
        numel = numel_of(call)
        if self._decision.communicates and numel > self._decision.input_numel:
            self._note(self._first, "meets larger batches than the sample, and does as for that")
        return self._acting(self._decision.bucket(numel))

    def _acting(self, bucket: int) -> Mapping[str, _Acting]:
        found = self._known.get(bucket)
        if found is None:
            actions = self._decision.actions(bucket)
            found = self._known[bucket] = {
                name: _Acting(
                    action=action,
                    dropping=None if action.drops is None else Dropping(name, action.drops),
                )
                for name, action in actions.stages.items()
            }
            if actions.problem:
                self._note(self._first, actions.problem)
        return found

    def _note(self, stage: str, reason: str) -> None:
        fallback = Fallback(stage=stage, reason=reason)
        if fallback not in self._fallbacks:
            self._fallbacks[fallback] = None
            _log.warning("stage %r %s", stage, reason)
