"""A stage's input that is not kept but made again by the stage before. Knows regions and who comes
before whom; which inputs are held meanwhile, a schedule's segment says.

Backward comes to the stages of a segment from the last. For each, the stages before it are run
again from the nearest input that is there; on the way some inputs are held, for the stages between,
and some stages are replayed at once with all they save.
"""

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._layers.layer_forward import Arguments, Forward
from holdfast.activation._planning.stages import tensors_of
from holdfast.activation._regions.checkpoint import is_traced
from holdfast.activation._regions.found import version_of
from holdfast.activation._regions.inputs import Input
from holdfast.activation._regions.options import RegionOptions
from holdfast.activation._regions.region import Region
from holdfast.activation._solving.schedule import Segment


@dataclass(frozen=True, slots=True)
class Pass:
    """What is done on the way to a stage's input: the stages whose inputs are held, and those that
    are replayed with all they save."""

    holds: frozenset[int]
    replays: frozenset[int]


def passes_of(segment: Segment) -> dict[int, Pass]:
    """A segment's steps, by the stage whose backward they lead to."""
    found = {}
    holds: set[int] = set()
    replays: set[int] = set()
    for step in segment.steps:
        match step.kind:
            case "keep_input":
                holds.add(step.stage)
            case "replay":
                replays.add(step.stage)
            case "backward":
                found[step.stage] = Pass(frozenset(holds), frozenset(replays - {step.stage}))
                holds.clear()
                replays.clear()
            case "run":
                pass
    return found


class Link:
    """The input of one stage in one forward. It owns the regions before it, which do not know it:
    an abandoned graph is freed at once."""

    __slots__ = (
        "__weakref__",
        "_borrowed",
        "_passes",
        "_place",
        "_region",
        "held",
        "is_written",
        "prior",
        "stage",
    )

    def __init__(
        self,
        stage: int,
        region: Region,
        prior: "Link | None",
        place: int,
        passes: Mapping[int, Pass],
    ) -> None:
        self.stage = stage
        self.prior = prior
        self.held: Any = None
        self.is_written = False  # by the stage itself
        self._region = region  # of the stage before, as the prior link is its input's
        self._place = place
        self._passes = passes
        self._borrowed = False

    def value(self) -> Any:
        """The input, for the stage itself. If it was held, it is no longer."""
        held = self.held
        if held is None:
            return self._made()
        if self._borrowed:
            return held.clone() if self.is_written else held
        self.held = None
        return held

    def _made(self) -> Any:
        way = [self]
        while way[-1].prior is not None and way[-1].prior.held is None:
            way.append(way[-1].prior)
        doing = self._passes[self.stage]
        value: Any = None
        for link in reversed(way):
            before = link.prior
            if before is not None and before.held is None:
                before.held = value
            value = link._from(before, replays=link.stage - 1 in doing.replays)  # noqa: SLF001 -- of this class
            if before is not None and (
                before.stage in doing.replays or (before in way and before.stage not in doing.holds)
            ):
                before.held = None
        return value

    def _from(self, before: "Link | None", *, replays: bool) -> Any:
        """This input, from that of the stage before, which is there."""
        if before is not None:
            before._borrowed = True  # noqa: SLF001 -- as above
        try:
            outputs = self._region.replay_whole() if replays else self._region.run_again()
        finally:
            if before is not None:
                before._borrowed = False  # noqa: SLF001 -- as above
        return outputs[self._place]


@dataclass(frozen=True, slots=True)
class Linked:
    """A stage that has run: its region, what became of its input, and the tensors it returned, with
    their versions. Weakly, so that a forward that fails halfway leaves nothing behind: they live as
    long as the graph does, but for the region of a stage that saved nothing, ``unowned``."""

    region: weakref.ref[Region]
    link: weakref.ref[Link] | None
    output: tuple[tuple[weakref.ref[Any], int], ...]
    unowned: Region | None

    def place_of(self, tensor: Any) -> int | None:
        """Which of its outputs ``tensor`` is, unchanged."""
        for place, (output, version) in enumerate(self.output):
            alive: Any = output()
            if alive is tensor and version_of(alive) == version:
                return place
        return None


def hooked() -> bool:
    """Whether somebody else's hooks are at work on what autograd saves: another checkpoint's. What
    is compiled knows nothing of them."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # noqa: SLF001 -- torch has no other name for it


def may_link() -> bool:
    """Whether regions can be linked here: nobody else's hooks are at work, and tensors are what
    they seem."""
    return not (torch.compiler.is_compiling() or is_traced() or hooked())


def run_linked(
    stage: int,
    module: Any,
    forward: Forward,
    call: Arguments,
    *,
    name: str,
    before: Linked | None,
    passes: Mapping[int, Pass],
    manager: CheckpointManager,
) -> tuple[Any, Region, Linked]:
    """Run a stage with nothing kept but its input, and not that either if ``before``, the stage
    that ran before it in its segment, has just made it."""
    region = Region(forward, *call, RegionOptions(name=name, modules=(module,)), manager)
    link = None if before is None else _linked(region, stage, before, passes)
    versions = _versions(call) if link is not None else ()
    output = region.forward(nullcontext(), *call)
    if link is not None:
        link.is_written = _versions(call) != versions
    made = tuple((weakref.ref(each), version_of(each)) for each in tensors_of(output))
    linked = Linked(
        region=weakref.ref(region),
        link=None if link is None else weakref.ref(link),
        output=made,
        unowned=None if region.saved else region,
    )
    return output, region, linked


def _versions(call: Arguments) -> tuple[int, ...]:
    return tuple(map(version_of, tensors_of(call)))


def _linked(region: Region, stage: int, before: Linked, passes: Mapping[int, Pass]) -> Link | None:
    """Give up the one input of ``region`` that ``before`` made, if it did, and its graph lives."""
    made_by = before.region()
    if made_by is None:
        return None
    prior = None if before.link is None else before.link()
    for given in region.inputs:
        if isinstance(given, Input):
            place = before.place_of(given.get())
            if place is not None:
                link = Link(stage, made_by, prior, place, passes)
                given.give_up(link.value)
                return link
    return None
