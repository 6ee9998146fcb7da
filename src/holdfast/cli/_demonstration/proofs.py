"""What the demo claims to have shown, and whether it has. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.catalog import VerifyReport
from holdfast.cli._demonstration.acts import Run, Save
from holdfast.cli._demonstration.jobs import KILLED_RANK, Course
from holdfast.cli._text import size


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Where a bit was flipped: in which byte of which file, and so in which tensor."""

    file: str
    tensor: str
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that happened. ``left`` is what the store held after the kill, ``held`` what it holds in
    the end, each with every byte verified; ``flipped`` is what was found after ``flip``."""

    course: Course
    undisturbed: Run
    killed: Run
    left: tuple[VerifyReport, ...]
    flip: Flip
    flipped: VerifyReport
    resumed: Run
    held: tuple[VerifyReport, ...]
    seconds: float

    @property
    def saves(self) -> tuple[Save, ...]:
        return (*self.killed.saves, *self.resumed.saves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A claim, what was seen of it, and whether that bears it out."""

    claim: str
    seen: str
    holds: bool


def proofs_of(story: Story) -> tuple[Proof, ...]:
    """Every claim of the demo, in the order in which it is shown."""
    return (
        _fits(story),
        _saved(story),
        _nothing_torn(story),
        _noticed(story),
        _found(story),
        _resumed(story),
        _same_losses(story),
        _same_bits(story),
        _whole(story),
    )


def in_time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _fits(story: Story) -> Proof:
    claim, plan = "activations fit a budget", story.killed.planned
    if plan is None:
        return Proof(claim=claim, seen="there was no plan", holds=False)
    return Proof(
        claim=claim,
        seen=f"{size(plan.before_bytes)} -> {size(plan.after_bytes)}; budget "
        f"{size(plan.budget_bytes)}",
        holds=plan.after_bytes <= plan.budget_bytes < plan.before_bytes,
    )


def _saved(story: Story) -> Proof:
    course, saves = story.course, story.saves
    expected = [
        *range(course.every, course.killed_in, course.every),
        *range(course.resumed + course.every, course.steps + 1, course.every),
    ]
    seen = f"{len(saves)} of {len(expected)}"
    if saves:
        writing, waiting = max(each.total_s for each in saves), max(each.stall_s for each in saves)
        seen += f"; each in at most {in_time(writing)}, training waited at most {in_time(waiting)}"
    return Proof(
        claim="saves while the training goes on",
        seen=seen,
        holds=[each.step for each in saves] == expected,
    )


def _nothing_torn(story: Story) -> Proof:
    killed, course = story.killed.killed, story.course
    claim = "SIGKILL amid a save harms nothing"
    if killed is None or not story.killed.code:
        return Proof(claim=claim, seen="no rank was killed", holds=False)
    names = [f"step_{step}" for step in range(course.every, course.killed_in, course.every)]
    is_intact = all(report.is_intact for report in story.left)
    return Proof(
        claim=claim,
        seen=f"at {size(killed.done_bytes)} of {size(killed.total_bytes)}; the "
        f"{len(story.left)} saves before it are {'intact' if is_intact else 'DAMAGED'}",
        holds=0 < killed.done_bytes < killed.total_bytes
        and sorted(report.prefix for report in story.left) == sorted(names)
        and is_intact,
    )


def _noticed(story: Story) -> Proof:
    claim, knew_s = "other ranks know of it", story.killed.knew_s
    if knew_s is None:
        return Proof(claim=claim, seen="they were not told", holds=False)
    return Proof(
        claim=claim,
        seen=f"{in_time(knew_s)} later, and which rank it was",
        holds=all(f"rank {KILLED_RANK}" in each.story for each in story.killed.lost),
    )


def _found(story: Story) -> Proof:
    claim, damage = "a flipped bit is found", story.flipped.damage
    if not damage:
        return Proof(claim=claim, seen="it was NOT found", holds=False)
    return Proof(
        claim=claim,
        seen=f"in {damage[0].tensor} of {story.flipped.prefix}",
        holds=len(damage) == 1
        and damage[0].tensor == story.flip.tensor
        and damage[0].file.endswith(f"/{story.flip.file}"),
    )


def _resumed(story: Story) -> Proof:
    claim, found = "resumed from the newest whole one", story.resumed.resumed
    if found is None:
        return Proof(claim=claim, seen="nothing was resumed", holds=False)
    passed = [name for name, _ in found.passed_over]
    return Proof(
        claim=claim,
        seen=f"{found.prefix}, by {found.ranks} ranks where {found.saved_by} had saved; "
        f"passed over {', '.join(passed) or 'none'}",
        holds=found.step == story.course.resumed
        and found.ranks != found.saved_by
        and passed == [f"step_{story.course.flipped}"],
    )


def _same_losses(story: Story) -> Proof:
    course, whole = story.course, story.undisturbed.losses
    steps = range(course.resumed + 1, course.steps + 1)
    after = _alike(story.resumed.losses, whole, steps)
    before = _alike(story.killed.losses, whole, sorted(story.killed.losses))
    return Proof(
        claim="losses are those of no disturbance",
        seen=f"the same bits in {after} of {len(steps)} steps after, {before} of "
        f"{len(story.killed.losses)} before",
        holds=after == len(steps) and before == len(story.killed.losses) > course.killed_in - 1,
    )


def _alike(losses: dict[int, float], whole: dict[int, float], steps: Sequence[int]) -> int:
    return sum(step in losses and losses[step] == whole.get(step) for step in steps)


def _same_bits(story: Story) -> Proof:
    digests = story.undisturbed.digest, story.resumed.digest
    is_same = digests[0] is not None and digests[0] == digests[1]
    shown = " and ".join(str(digest)[:8] for digest in dict.fromkeys(digests))
    return Proof(
        claim="so are weights, masters, moments",
        seen=f"{'the same' if is_same else 'OTHER'} SHA-256: {shown}",
        holds=is_same,
    )


def _whole(story: Story) -> Proof:
    damaged = sum(not report.is_intact for report in story.held)
    checked = sum(report.checked_bytes for report in story.held)
    return Proof(
        claim="the store is whole in the end",
        seen=f"{len(story.held)} checkpoints, {size(checked)} verified, {damaged} damaged",
        holds=not damaged and len(story.held) == story.course.steps // story.course.every,
    )


def failed(proofs: Sequence[Proof]) -> Iterator[Proof]:
    return (proof for proof in proofs if not proof.holds)
