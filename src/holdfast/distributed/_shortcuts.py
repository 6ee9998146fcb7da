"""A whole state as one tree, saved and loaded by a checkpointer: what ``holdfast.save`` and
``holdfast.load`` do."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from holdfast.distributed._capture import Place
from holdfast.distributed._checkpoint import MODEL, DistributedCheckpoint
from holdfast.distributed._options import CheckpointFormat, LoadOptions, SaveOptions
from holdfast.distributed._preparing import Request
from holdfast.distributed._rng import RNG

_ALONE: Final = "state"


def save_tree(checkpointer: DistributedCheckpoint, state: object, options: SaveOptions) -> str:
    """All ranks call this."""
    if options.include_rng_state and (type(state) is not dict or RNG in state):
        raise ValueError(f"include_rng_state needs a state that is a dict without a key {RNG!r}")
    request = Request(
        state=state,
        options=options,
        model=_model_place(state, options),
        rng=options.include_rng_state,
    )
    return checkpointer._save(request)  # noqa: SLF001 -- the same engine, for a state as it is


def load_tree(
    checkpointer: DistributedCheckpoint,
    into: Any,
    map_location: torch.device | str | None,
    options: LoadOptions,
) -> Any:
    """All ranks call this."""
    prefix = options.checkpoint_prefix or ""
    device = None if map_location is None else torch.device(map_location)
    if into is None:
        return checkpointer._load(None, options, prefix, device=device).tree  # noqa: SLF001
    rng = options.load_rng_state and type(into) is dict and RNG not in into
    return checkpointer._load(into, options, prefix, device=device, rng=rng).filled  # noqa: SLF001


def _model_place(state: object, options: SaveOptions) -> Place | None:
    """Where the model of a consolidated checkpoint is: the state itself, or under ``"model"``."""
    if options.format is not CheckpointFormat.CONSOLIDATED:
        return None
    if isinstance(state, nn.Module):
        return ()
    if isinstance(state, Mapping) and MODEL in state:
        return (MODEL,)
    raise ValueError(
        "a consolidated checkpoint is about one model: give the model itself, or a dict with it "
        f"under {MODEL!r}"
    )
