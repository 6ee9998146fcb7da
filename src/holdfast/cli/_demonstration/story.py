"""The demo's scenes, one after the other. Knows what is done to the training, not how it is judged
or drawn."""

import contextlib
import time
from pathlib import Path
from typing import Final

import msgspec

from holdfast.catalog import Catalog, VerifyReport
from holdfast.cli._demonstration.acts import Run
from holdfast.cli._demonstration.jobs import Course, Event, Job, Planned, Resumed, Saved, Stepped
from holdfast.cli._demonstration.launching import Exited, RunError, events_of
from holdfast.cli._demonstration.proofs import Flip, Story, in_time
from holdfast.cli._demonstration.screen import Scene, Screen
from holdfast.cli._text import size

STORE: Final = "run"
PLAN: Final = "plan.json"

_BEFORE: Final = 2  # ranks
_AFTER: Final = 3
_LOG_CHARS: Final = 300
_LENGTH_BYTES: Final = 8  # of a header, before it, as safetensors has it


def play(course: Course, out: Path, screen: Screen) -> Story:
    """Show everything, leaving store, plan and logs in ``out``. ``RunError`` if a run fails that
    was not meant to."""
    began = time.monotonic()
    store = out / STORE
    saving = Job(course=course, store=str(store), plan=str(out / PLAN), is_killed=True)
    with screen.scene(f"Undisturbed: {_BEFORE} ranks, no plan, no saves") as scene:
        undisturbed = _run(Job(course=course), _BEFORE, out / "undisturbed.log", scene)
        _told_of_training(undisturbed, scene)
    with screen.scene(
        f"The same within a budget, saving as it trains; killed in the save of step "
        f"{course.killed_in}"
    ) as scene:
        killed = _run(saving, _BEFORE, out / "killed.log", scene)
        _told_of_kill(killed, scene)
    with screen.scene(f"What is left; then one bit of step_{course.flipped} is flipped") as scene:
        left = _verified(store)
        for report in left:
            scene.say(f"{report.prefix}: {'intact' if report.is_intact else 'DAMAGED'}")
        flip = _flip(store / f"step_{course.flipped}")
        scene.say(f"flipped a bit of byte {flip.place:,} of {flip.file}; verify says:")
        flipped = Catalog(store).verify(f"step_{course.flipped}")
        for damage in flipped.damage:
            scene.say(f"  {damage.file}:")
            scene.say(f"  {damage.problem}")
    with screen.scene(f"Resumed on {_AFTER} ranks, to the end") as scene:
        job = Job(course=course, store=saving.store, plan=saving.plan)
        resumed = _run(job, _AFTER, out / "resumed.log", scene)
        held = _verified(store)
    return Story(
        course=course,
        undisturbed=undisturbed,
        killed=killed,
        left=left,
        flip=flip,
        flipped=flipped,
        resumed=resumed,
        held=held,
        seconds=time.monotonic() - began,
    )


def _run(job: Job, ranks: int, log: Path, scene: Scene) -> Run:
    run = Run()
    scene.wait(f"starting {ranks} ranks")
    with contextlib.closing(events_of(job, ranks=ranks, log=log)) as events:
        for event in events:
            run.hear(event)
            show(event, run, scene)
    if run.code and not job.is_killed:
        raise RunError(f"a run ended with exit code {run.code}; {log} says: {_last_words(log)}")
    return run


def show(event: Event | Exited, run: Run, scene: Scene) -> None:
    """Tell of an event that ``run`` has heard already."""
    match event:
        case Stepped(step=step, loss=loss):
            scene.step(step, loss)
        case Planned():
            scene.say(
                f"planned in {in_time(event.planning_s)}: activations of a step take "
                f"{size(event.after_bytes)}, not {size(event.before_bytes)}"
            )
        case Saved(step=step):
            # Ranks wait for different times. Told once, when the last of them has told its own.
            for save in run.saves:
                if save.step == step:
                    scene.say(
                        f"step_{step} is saved: {in_time(save.total_s)}, of which the training "
                        f"waited {in_time(save.stall_s)}"
                    )
        case Resumed():
            for name, reason in event.passed_over:
                scene.say(f"passed over {name}: {reason.partition(':')[0]}")
            scene.say(
                f"resumed from {event.prefix}, saved by {event.saved_by} ranks and loaded by "
                f"{event.ranks}"
            )
        case _:
            pass


def _told_of_training(run: Run, scene: Scene) -> None:
    if run.began is not None and run.losses:
        scene.say(
            f"{run.began.parameters:,} parameters, {run.began.characters:,} characters of "
            f"Shakespeare's sonnets; loss {run.losses[min(run.losses)]:.3f} -> "
            f"{run.losses[max(run.losses)]:.3f}"
        )


def _told_of_kill(run: Run, scene: Scene) -> None:
    if run.killed is None:
        scene.say("no rank was killed")
        return
    killed = run.killed
    scene.say(
        f"SIGKILL for rank {killed.rank} when {size(killed.done_bytes)} of its "
        f"{size(killed.total_bytes)} were written; the training was past step "
        f"{max(run.losses, default=0)}"
    )
    for lost in run.lost:
        scene.say(f"rank {lost.rank} knew {in_time(lost.at_s - killed.at_s)} later: {lost.story}")


def _verified(store: Path) -> tuple[VerifyReport, ...]:
    catalog = Catalog(store)
    return tuple(catalog.verify(info.prefix) for info in catalog.list())


def _flip(folder: Path) -> Flip:
    """Flip a bit in the middle of the largest weight in a file, as a disk might."""
    path = min(folder.glob("*.safetensors"))
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = msgspec.json.decode(file.read(length))
        places = {name: each["data_offsets"] for name, each in header.items() if "." in name}
        weights = [name for name in places if name.startswith("model.")]
        tensor = max(weights, key=lambda name: places[name][1] - places[name][0])
        place = _LENGTH_BYTES + length + sum(places[tensor]) // 2
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    return Flip(file=path.name, tensor=tensor, place=place)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["nothing"])[-1].strip()[:_LOG_CHARS]
