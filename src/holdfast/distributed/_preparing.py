"""What all ranks know before a save begins: its leaves, who writes which, and the tree of values.

Every rank captures its own state; then they compare. Writes nothing.
"""

import logging
from dataclasses import dataclass

import msgspec

from holdfast.catalog._writing import Facts
from holdfast.contracts import Operation
from holdfast.distributed._agree import (
    check_same,
    find_differing,
    merge_trees,
    mismatch,
    share_lists,
)
from holdfast.distributed._arranging import Arrangement, arrange
from holdfast.distributed._capture import Captured, Place, RankOwn, capture
from holdfast.distributed._flat import Flat, Naming, flatten, list_leaves
from holdfast.distributed._options import CheckpointFormat, SaveOptions
from holdfast.distributed._rng import RNG, capture_rng
from holdfast.distributed._snapshots import Taken
from holdfast.distributed._summary import OwnLeaf
from holdfast.distributed._tools import Tools
from holdfast.errors import SaveError
from holdfast.format import encode_value
from holdfast.reshard import RankGroup

_log = logging.getLogger("holdfast.distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller wants saved. ``model`` is the place of the module that a consolidated
    checkpoint is about; with ``rng`` the state, a dict, gets that of random number generators."""

    state: object
    options: SaveOptions
    model: Place | None = None
    rng: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """This rank's own state, looked at by itself. With ``taken`` it is that of this moment, though
    it goes on changing; without, nothing may change it."""

    facts: Facts
    captured: Captured
    taken: Taken | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A save that can begin. ``tree`` is of all ranks, and known to rank 0 only."""

    facts: Facts
    flat: Flat
    arrangement: Arrangement
    tree: object | None


class Preparing:
    """One rank's part in it."""

    def __init__(self, tools: Tools, request: Request, rank: int) -> None:
        self._tools = tools
        self._request = request
        self._rank = rank
        self._options = request.options

    def look(self) -> Looked:
        """Look at this rank's own state. ``SaveError`` for what cannot be stored, as far as it
        can be told from here."""
        state = self._request.state
        if self._request.rng:
            state = {**state, RNG: RankOwn(capture_rng())}  # type: ignore[dict-item]
        facts = Facts(
            step=self._options.step,
            metrics=dict(self._options.metrics),
            custom=encode_value(dict(self._options.custom_metadata), root="custom_metadata"),
        )
        return Looked(facts=facts, captured=capture(state))

    def flatten(self, looked: Looked, differing: frozenset[str] = frozenset()) -> Flat:
        """The leaves of it. ``SaveError`` for what cannot be stored."""
        kept = None if looked.taken is None else looked.taken.kept
        return flatten(looked.captured, self._naming(differing), kept)

    def agree(self, operation: Operation, looked: Looked, flat: Flat) -> Prepared:
        """Compare with the other ranks. All of them call this."""
        self._check_options(operation)
        flat = self._settle_replicas(operation, looked, flat)
        arrangement = self._arrange(operation, flat)
        tree = merge_trees(operation, flat)
        return Prepared(facts=looked.facts, flat=flat, arrangement=arrangement, tree=tree)

    def _naming(self, differing: frozenset[str]) -> Naming:
        is_consolidated = self._options.format is CheckpointFormat.CONSOLIDATED
        model = self._request.model if is_consolidated else None
        return Naming(rank=self._rank, model=model, differing=differing)

    def _check_options(self, operation: Operation) -> None:
        options = self._options
        if options.replicas_from is not None and options.replicas_from >= operation.world_size:
            raise ValueError(
                f"replicas_from must be one of the {operation.world_size} ranks, not "
                f"{options.replicas_from}"
            )
        own = {
            "step": options.step,
            "checkpoint_prefix": options.checkpoint_prefix,
            "format": options.format.value,
            "compression_level": options.compression_level.value,
            "overwrite": options.overwrite,
            "incremental": options.incremental,
            "check_replicas": options.check_replicas,
            "replicas_from": options.replicas_from,
        }
        check_same(operation, own, SaveError)

    def _settle_replicas(self, operation: Operation, looked: Looked, flat: Flat) -> Flat:
        """Compare what ranks hold several times; what may differ becomes each rank's own."""
        if operation.world_size == 1:
            return flat
        everything, chosen = self._options.check_replicas, self._options.replicas_from
        differing = find_differing(operation, flat.shared.values(), everything=everything)
        wrong = {each.name: each for each in differing if each.is_agreed}
        cut = next((each for each in wrong.values() if each.is_cut), None)
        if wrong and (chosen is None or cut is not None):
            raise mismatch([*wrong.values()])
        own = frozenset(each.name for each in differing) - wrong.keys()
        if own:
            flat = self.flatten(looked, own)
        if wrong and chosen != self._rank:
            _log.warning("of %s the copy of rank %s is saved", ", ".join(wrong), chosen)
            flat = flat.without(wrong)
        return flat

    def _arrange(self, operation: Operation, flat: Flat) -> Arrangement:
        form = self._options.format
        own = self._own_leaves(operation, flat) if form is CheckpointFormat.SINGLE_FILE else ()
        leaves = list_leaves(flat.shared.values(), self._tools.rank_of())
        groups = share_lists(operation, leaves)
        listed = ((group.ranks, group.leaves.digest()) for group in groups)
        found: Arrangement = self._tools.plans.get(
            (form, own, flat.model, *listed),
            lambda: self._new_arrangement(groups, flat, own, operation.world_size),
        )
        return found

    def _new_arrangement(
        self,
        groups: tuple[RankGroup, ...],
        flat: Flat,
        own: tuple[tuple[OwnLeaf, ...], ...],
        world_size: int,
    ) -> Arrangement:
        form = self._options.format
        try:
            return arrange(groups, form, model=flat.model, own=own, world_size=world_size)
        except ValueError as error:
            raise SaveError(
                f"the ranks do not hold parts of one state: {error}; nothing was saved"
            ) from error

    def _own_leaves(self, operation: Operation, flat: Flat) -> tuple[tuple[OwnLeaf, ...], ...]:
        """The leaves that each rank has alone, of all ranks."""
        mine = [
            OwnLeaf(name=held.name, dtype=held.dtype.code, shape=held.shape, file=0)
            for held in flat.own.values()
        ]
        told = operation.all_gather(msgspec.json.encode(mine))
        return tuple(msgspec.json.decode(each, type=tuple[OwnLeaf, ...]) for each in told)
