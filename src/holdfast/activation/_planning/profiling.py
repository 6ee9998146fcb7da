"""What a model's step takes when it keeps everything, stage by stage. Runs real steps on the user's
sample; decides nothing.

The levels of memory and the times come from separate steps: looking on takes time. Those for the
memory come first, for the first step of a kind is slow.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._layers.layer_forward import Arguments, Forward, checkpointed
from holdfast.activation._measuring.meter import residents
from holdfast.activation._measuring.stretches import Course, Marker, record_course
from holdfast.activation._planning.remakable import look_for_recipes
from holdfast.activation._planning.replayable import look_for_replays
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._planning.seen import Profile, StageProfile, Way
from holdfast.activation._planning.stages import keeping, roots_of, standing_in, tensors_of
from holdfast.activation._planning.timing import clocked, timed_step
from holdfast.activation._recipes.dropping import Dropping
from holdfast.errors import PlanError

Run = Callable[[str, Any, Forward, Arguments], Any]


def profile(
    model: Any,
    sample: Sample,
    modules: Mapping[str, Any],
    device: Any,
    *,
    tell: Callable[[str], None],
    mover: CheckpointManager | None = None,
) -> tuple[Profile, list[weakref.ref[Any]]]:
    """Run the model a few times and look on. ``mover``: of the tier that stages may be moved to.
    With the profile comes what was resident in its steps, for those that follow."""
    tell("trying the sample")
    order = _order(model, sample, modules)
    stages = {name: modules[name] for name in order}
    seen = {
        name: StageProfile(name=name, kind=type(each).__name__) for name, each in stages.items()
    }
    tell("looking for what can be made again")
    look_for_recipes(model, sample, stages, seen)
    look_for_replays(model, sample, stages, seen, tell)
    droppings = {
        name: Dropping(name, each.recipes.drops)
        for name, each in seen.items()
        if each.recipes is not None and each.recipes.made
    }
    ways: dict[Way, Run] = {
        "kept": keeping,
        "replayed": functools.partial(_replaying, seen),
        "remade": functools.partial(_remaking, droppings),
    }
    if mover is not None:
        ways["moved"] = functools.partial(moving, mover)
    # Before what is measured: FSDP gives whole parameters back at the end of a backward, and the
    # steps above only ran forward.
    tell("timing the stages")
    timing = _Timing(seen, droppings, device)
    with standing_in(stages, timing.kept):
        first_s = timed_step(model, sample, device)
    courses = {}
    there = residents()
    for way, run in ways.items():
        tell(f"measuring the memory of a step with every stage {way}")
        courses[way] = course_of(model, sample, stages, run, device, there=there)
    tell("timing the step")
    if device.type == "cpu":  # elsewhere it would mean waiting for the device, within the step
        ways |= {"replayed": timing.replayed, "remade": timing.remade}
    seconds = {}
    for way, run in reversed(ways.items()):
        with standing_in(stages, run):
            seconds[way] = timed_step(model, sample, device)
    seconds["kept"] = min(seconds["kept"], first_s)
    found = Profile(
        stages=tuple(seen.values()), courses=courses, seconds=seconds, device=str(device)
    )
    return found, there


def course_of(
    model: Any,
    sample: Sample,
    stages: Mapping[str, Any],
    run: Run,
    device: Any,
    *,
    there: Sequence[weakref.ref[Any]],
) -> Course:
    """The course of one step in which ``run(name, module, forward, call)`` runs each stage. Its
    marks: ``("forward", i)`` where the i-th begins, ``("forwarded", i)`` where it ends, and
    ``("backward", i)`` where its backward begins."""
    numbers = {name: number for number, name in enumerate(stages)}

    def step(mark: Marker) -> None:
        def call(name: str, module: Any, forward: Forward, given: Arguments) -> Any:
            number = numbers[name]
            mark(("forward", number))
            output = run(name, module, forward, given)
            mark(("forwarded", number))
            _mark_backward(output, mark, number)
            return output

        with standing_in(stages, call):
            sample.step(model)

    course = record_course(step, device, there)
    marks = {each.ends_at for each in course.stretches}
    for name, number in numbers.items():
        if ("forwarded", number) not in marks:
            raise PlanError(
                f"stage {name!r} did not run in every step on the sample. A model that leaves out "
                "layers at random (LayerDrop) is planned with that switched off, and can be "
                "trained with it then. The model is as it was"
            )
    return course


def moving(
    mover: CheckpointManager, name: str, module: Any, forward: Forward, call: Arguments
) -> Any:
    """The stage with all that it saves moved to the tier of ``mover``."""
    return checkpointed(name, module, forward, call, mover, keep=_every)


def _every(tensor: Any) -> bool:
    del tensor
    return True


def _replaying(
    seen: Mapping[str, StageProfile], name: str, module: Any, forward: Forward, call: Arguments
) -> Any:
    run = checkpointed if seen[name].replayable else keeping
    return run(name, module, forward, call)


def _remaking(
    droppings: Mapping[str, Dropping], name: str, module: Any, forward: Forward, call: Arguments
) -> Any:
    output = keeping(name, module, forward, call)
    if name in droppings:
        droppings[name].drop(roots_of(output, call))
    return output


def _mark_backward(output: Any, mark: Marker, number: int) -> None:
    """Mark where the first gradient of a stage's outputs is there."""
    waiting = [each for each in tensors_of(output) if each.requires_grad]
    marked = False

    def arrived(gradient: Any) -> None:
        nonlocal marked
        del gradient
        if not marked:
            marked = True
            mark(("backward", number))

    for each in waiting:
        each.register_hook(arrived)


def _order(model: Any, sample: Sample, modules: Mapping[str, Any]) -> list[str]:
    """The stages in the order they run, from one step that also allocates the gradients."""
    ran: list[str] = []
    again: set[str] = set()

    def call(name: str, module: Any, forward: Forward, given: Arguments) -> Any:
        ran.append(name)
        if _in_backward():
            again.add(name)
        return keeping(name, module, forward, given)

    try:
        with standing_in(modules, call):
            sample.step(model)
    except PlanError:
        raise
    except Exception as error:
        error.add_note(
            "raised by the model on the sample given to holdfast.plan; the model is as it was"
        )
        raise
    once = [name for name in dict.fromkeys(ran) if ran.count(name) == 1 and name not in again]
    if again and not once:
        raise PlanError(
            f"stages are run again in backward, {min(again)!r} among them: the model is "
            "checkpointed already. Switch that off, as with gradient_checkpointing_disable() in "
            "transformers, and let the plan decide what is run again"
        )
    if not once:
        raise PlanError(
            "no stage of the model ran exactly once in a training step on the sample: is the model "
            "in training mode (model.train()), and does it run the layers named as stages?"
        )
    return once


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 -- there is no other name


class _Timing:
    """The same ways, which note what they take stage by stage."""

    def __init__(
        self, seen: Mapping[str, StageProfile], droppings: Mapping[str, Dropping], device: Any
    ) -> None:
        self._seen = seen
        self._droppings = droppings
        self._device = device

    def kept(self, name: str, module: Any, forward: Forward, call: Arguments) -> Any:
        """Notes the time of a stage's forward."""
        with clocked(self._seen[name].forward_s, self._device):
            return keeping(name, module, forward, call)

    def replayed(self, name: str, module: Any, forward: Forward, call: Arguments) -> Any:
        """Notes the time of the same in backward."""
        # Checkpointing goes through all that a function holds, so this one holds next to nothing.
        seconds, device = self._seen[name].replayed_s, self._device

        def run(*args: Any, **kwargs: Any) -> Any:
            if not _in_backward():
                return forward(*args, **kwargs)
            with clocked(seconds, device):
                return forward(*args, **kwargs)

        return _replaying(self._seen, name, module, run, call)

    def remade(self, name: str, module: Any, forward: Forward, call: Arguments) -> Any:
        """Notes the time of dropping all that recipes make again."""
        output = keeping(name, module, forward, call)
        if name in self._droppings:
            with clocked(self._seen[name].dropping_s, self._device):
                self._droppings[name].drop(roots_of(output, call))
        return output
