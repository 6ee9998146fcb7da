"""Which stages do the same thing when they are run again. Runs each twice in one forward, and
compares; nothing is kept.

A stage that changes its own input, or draws from a random stream nobody else knows of, gives other
gradients when it is replayed than it did: it may only be kept, or dropped by recipes.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from holdfast.activation._keeping.manager import CheckpointManager
from holdfast.activation._layers.layer_forward import Arguments, Forward
from holdfast.activation._planning.collectives import Collectives
from holdfast.activation._planning.sampling import Sample
from holdfast.activation._planning.seen import StageProfile
from holdfast.activation._planning.sizes import size_of
from holdfast.activation._planning.stages import standing_in, tensors_of
from holdfast.activation._recipes.bits import same_bits
from holdfast.activation._regions.options import RegionOptions
from holdfast.activation._regions.region import Region


def look_for_replays(
    model: Any,
    sample: Sample,
    stages: Mapping[str, Any],
    seen: Mapping[str, StageProfile],
    tell: Callable[[str], None],
) -> None:
    """Find the stages that must not be replayed, and tell why; and those that would then call
    collectives, which all ranks must replay or none."""
    manager = CheckpointManager()

    def call(name: str, module: Any, forward: Forward, given: Arguments) -> Any:
        args, kwargs = given
        options = RegionOptions(name=name, modules=(module,))
        region = Region(forward, args, kwargs, options, manager)
        output = region.forward(nullcontext(), args, kwargs)
        seen[name].size = size_of(given, region)
        with Collectives() as collectives:
            problem = _problem(region, tensors_of(output))
        seen[name].communicates = collectives.met
        if problem:
            seen[name].replayable = False
            tell(f"stage {name!r} is not replayed: {problem}")
        return output

    with standing_in(stages, call):
        sample.forward(model)


def _problem(region: Region, outputs: list[Any]) -> str:
    try:
        again = region.run_again()
    except Exception as error:  # noqa: BLE001 -- whatever it is, it would be so in backward too
        return str(error)
    if len(again) == len(outputs) and all(map(same_bits, again, outputs)):
        return ""
    return "run again from the same input, it returns other values"
