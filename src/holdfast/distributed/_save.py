"""One save, on one of its ranks: capture, agree, begin, write, commit.

Rank 0 begins and commits; every rank writes. Each phase either ends on all ranks or raises the
same error on all. What a failed save leaves behind is removed by whoever can know that nobody
will commit it; the rest is left to gc.
"""

import contextlib
import datetime as dt
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch

from holdfast.catalog import Attempt
from holdfast.catalog._attempt import written_in
from holdfast.catalog._delete import delete_replaced
from holdfast.catalog._model_index import check_index, settle_index, write_index
from holdfast.catalog._names import intent_name
from holdfast.catalog._writing import Facts, check_record_size, record_of
from holdfast.contracts import Operation
from holdfast.distributed._agree import find_differing, merge_trees, mismatch, share_lists
from holdfast.distributed._arranging import Arrangement, arrange
from holdfast.distributed._capture import Captured, Place, capture
from holdfast.distributed._flat import Flat, Held, Naming, flatten, list_leaves
from holdfast.distributed._keeping import Keeper
from holdfast.distributed._options import CheckpointFormat, SaveOptions
from holdfast.distributed._progress import ProgressMeter
from holdfast.distributed._summary import OwnLeaf, Summary, files_of, tensors_of, whole_tensor
from holdfast.distributed._tools import Tools
from holdfast.distributed._watch import Watch
from holdfast.distributed._writing import RankWriter
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    NoSpaceError,
    ObjectNotFoundError,
    SaveError,
)
from holdfast.format import CommitRecord, CompressionLevel, encode_value

_log = logging.getLogger("holdfast.distributed")

_COMMITTER: Final = 0
_SEEN_WITHIN_S: Final = 5.0
"""How long a rank looks for what rank 0 wrote: network filesystems remember for a while that
something was not there."""

_PAUSE_S: Final = 0.1


def save_state(
    tools: Tools, state: object, options: SaveOptions, *, model: Place | None, timeout_s: float
) -> str:
    """Save a tree of values, tensors and statefuls, and return its prefix. ``model`` is the place
    of the module that a consolidated checkpoint is about. All ranks call this."""
    saving = _Saving(tools, state, options, model)
    try:
        with tools.coordinator.operation("save", timeout_s) as operation:
            saving.run(operation, timeout_s)
    except BaseException as error:
        saving.give_up(error)
        raise
    saving.tidy()
    return saving.prefix


class _Begun(msgspec.Struct, frozen=True):
    prefix: str
    attempt: str


class _Saving:
    """What is known of one save as it goes on."""

    def __init__(
        self, tools: Tools, state: object, options: SaveOptions, model: Place | None
    ) -> None:
        self._tools = tools
        self._state = state
        self._options = options
        self._model = model if options.format is CheckpointFormat.CONSOLIDATED else None
        self._rank = tools.coordinator.rank
        self._meter = ProgressMeter(options.progress, operation="save", rank=self._rank)
        self._attempt: Attempt | None = None
        self._begun: _Begun | None = None
        self._told = False  # whether the committer may have all that it needs to commit
        self._committed = False

    @property
    def prefix(self) -> str:
        return "" if self._begun is None else self._begun.prefix

    def run(self, operation: Operation, timeout_s: float) -> None:
        with operation.phase("capture"), self._meter.phase("capture"):
            facts = self._facts()
            captured = capture(self._state)
            flat = flatten(captured, self._naming())
            self._check_options(operation)
        with operation.phase("agree"), self._meter.phase("agree"):
            flat = self._settle_replicas(operation, captured, flat)
            arrangement = self._arrange(operation, flat)
            tree = merge_trees(operation, flat)
        with operation.phase("begin"), self._meter.phase("begin"):
            self._begin(operation, arrangement, flat, tree, facts)
        with contextlib.ExitStack() as stack:
            if self._attempt is not None:
                stack.enter_context(Keeper(self._attempt))
            with operation.phase("write"):
                summary = self._write(operation, arrangement, flat, timeout_s)
            with operation.phase("commit"), self._meter.phase("commit"):
                self._told = True
                told = operation.gather(summary.encode(), target=_COMMITTER)
        with operation.phase("commit"):
            if told is not None:
                summaries = [Summary.decode(each) for each in told]
                self._commit(self._record(facts, tree, arrangement, summaries))
                self._committed = True
            operation.broadcast(b"committed", source=_COMMITTER)
            self._committed = True

    def tidy(self) -> None:
        """After the commit, and not part of it: nothing here can make the save fail."""
        attempt = self._attempt
        if attempt is None:
            return
        try:
            if attempt.replaces is not None:
                settle_index(self._tools.storage, self.prefix)
                delete_replaced(self._tools.storage, attempt.replaces)
        except CheckpointError as error:
            _log.warning("%s is saved, but not all is tidy: %s", self.prefix, error)

    def give_up(self, error: BaseException) -> None:
        """After an error: remove what nobody will commit, and say what is known."""
        self._tools.bulk.discard()
        if self._committed:
            _say(error, f"{self.prefix} is committed and whole all the same.")
        elif self._attempt is not None:
            self._abort(self._attempt, error)
        elif self._begun is not None and not self._told:
            self._remove_own(self._begun, error)
        elif self._begun is not None and _is_of_committer(error):
            _say(
                error,
                f"Whether {self.prefix} is committed is unknown: list the checkpoints to see. "
                "What was saved before is intact; gc removes what is left if it is not.",
            )

    def _facts(self) -> Facts:
        return Facts(
            step=self._options.step,
            metrics=dict(self._options.metrics),
            custom=encode_value(dict(self._options.custom_metadata), root="custom_metadata"),
        )

    def _naming(self, differing: frozenset[str] = frozenset()) -> Naming:
        return Naming(rank=self._rank, model=self._model, differing=differing)

    def _check_options(self, operation: Operation) -> None:
        """All ranks must want the same: they go through the same steps."""
        options = self._options
        own = {
            "checkpoint_prefix": options.checkpoint_prefix,
            "format": options.format.value,
            "compression_level": options.compression_level.value,
            "check_replicas": options.check_replicas,
            "replicas_from": options.replicas_from,
        }
        if options.replicas_from is not None and options.replicas_from >= operation.world_size:
            raise ValueError(
                f"replicas_from must be one of the {operation.world_size} ranks, not "
                f"{options.replicas_from}"
            )
        first = msgspec.json.decode(operation.broadcast(msgspec.json.encode(own)))
        for name, value in own.items():
            if first[name] != value:
                raise SaveError(
                    f"{name} is {value!r} on rank {self._rank} and {first[name]!r} on rank 0; "
                    "give every rank the same options. Nothing was saved"
                )

    def _settle_replicas(self, operation: Operation, captured: Captured, flat: Flat) -> Flat:
        """Compare what ranks hold several times; what may differ becomes each rank's own."""
        if operation.world_size == 1:
            return flat
        everything = self._options.check_replicas
        differing = find_differing(
            operation, flat.shared.values(), everything=everything, place_of=_place_of
        )
        if not differing:
            return flat
        wrong = {name: ranks for name, ranks in differing.items() if flat.is_agreed(name)}
        chosen = self._options.replicas_from
        if wrong and chosen is None:
            raise mismatch(wrong, buffers=not everything)
        if differing.keys() > wrong.keys():
            own = frozenset(differing.keys() - wrong.keys())
            flat = flatten(captured, self._naming(own))
        if wrong and chosen != self._rank:
            _log.warning("of %s the copy of rank %s is saved", ", ".join(wrong), chosen)
            flat = flat.without(wrong)
        return flat

    def _arrange(self, operation: Operation, flat: Flat) -> Arrangement:
        options = self._options
        own: list[list[OwnLeaf]] = []
        if options.format is CheckpointFormat.SINGLE_FILE:
            mine = [
                OwnLeaf(name=held.name, dtype=held.dtype.code, shape=held.shape, file=0)
                for held in flat.own.values()
            ]
            own = [
                msgspec.json.decode(each, type=list[OwnLeaf])
                for each in operation.all_gather(msgspec.json.encode(mine))
            ]
        try:
            groups = share_lists(
                operation, list_leaves(flat.shared.values(), self._tools.rank_of())
            )
            key = (options.format, *((group.ranks, group.leaves.digest()) for group in groups))
            key = (*key, tuple(tuple(each) for each in own))
            found: Arrangement = self._tools.plans.get(
                key,
                lambda: arrange(
                    groups,
                    options.format,
                    model=flat.model,
                    own=own,
                    world_size=operation.world_size,
                ),
            )
        except ValueError as error:
            raise SaveError(
                f"the ranks do not hold parts of one state: {error}; nothing was saved"
            ) from error
        return found

    def _begin(
        self,
        operation: Operation,
        arrangement: Arrangement,
        flat: Flat,
        tree: object,
        facts: Facts,
    ) -> None:
        storage = self._tools.storage
        if self._rank == _COMMITTER:
            check_record_size(tree, facts.custom, storage, self._options.checkpoint_prefix or "")
            self._attempt = self._announce()
            intent = self._attempt.intent
            self._begun = _Begun(prefix=intent.prefix, attempt=intent.attempt)
        told = operation.broadcast(
            None if self._begun is None else msgspec.json.encode(self._begun), source=_COMMITTER
        )
        self._begun = msgspec.json.decode(told, type=_Begun)
        if self._rank != _COMMITTER:
            self._look_for_intent(self._begun)
        needed = sum(
            int(each)
            for each in operation.all_gather(
                str(self._writer(arrangement, flat).total_bytes()).encode()
            )
        )
        if self._rank == _COMMITTER and self._options.compression_level is CompressionLevel.NONE:
            free = storage.free_bytes()
            if free is not None and needed > free:
                raise NoSpaceError(
                    f"the checkpoint needs {needed:,} bytes and there are {free:,} free; nothing "
                    "was written. Delete older checkpoints, or save to another place",
                    path=f"{storage.url}/{self.prefix}",
                )

    def _announce(self) -> Attempt:
        options, catalog = self._options, self._tools.catalog
        if options.checkpoint_prefix is not None:
            attempt = catalog.begin(options.checkpoint_prefix, overwrite=options.overwrite)
        else:
            attempt = self._announce_new()
        if options.format is CheckpointFormat.CONSOLIDATED:
            try:
                check_index(catalog.storage, attempt.intent.prefix)
            except BaseException:
                attempt.abort()
                raise
        return attempt

    def _announce_new(self) -> Attempt:
        """Begin under a name that is made here, and that nobody uses."""
        catalog = self._tools.catalog
        made = f"checkpoint_{dt.datetime.now(dt.UTC):%Y%m%d_%H%M%S}"
        number = 1
        while True:
            prefix = made if number == 1 else f"{made}-{number}"
            number += 1
            if next(catalog.storage.list(f"{prefix}/"), None) is not None:
                continue
            with contextlib.suppress(CheckpointExistsError):
                return catalog.begin(prefix)

    def _look_for_intent(self, begun: _Begun) -> None:
        """See what rank 0 wrote: a root that is local to each host holds a part of everything."""
        storage = self._tools.storage
        until = time.monotonic() + _SEEN_WITHIN_S
        while True:
            try:
                storage.stat(f"{begun.prefix}/{intent_name(begun.attempt)}")
            except ObjectNotFoundError as error:
                if time.monotonic() >= until:
                    raise SaveError(
                        "this rank does not see what rank 0 wrote here: the storage is not the "
                        "same on all hosts, and what was saved could not be loaded. Use one that "
                        "all ranks share. Nothing was saved",
                        path=f"{storage.url}/{begun.prefix}",
                    ) from error
                time.sleep(_PAUSE_S)
            else:
                return

    def _writer(self, arrangement: Arrangement, flat: Flat) -> RankWriter:
        begun = self._begun or _Begun(prefix="", attempt="")
        return RankWriter(
            storage=self._tools.storage,
            prefix=begun.prefix,
            attempt=begun.attempt,
            rank=self._rank,
            form=self._options.format,
            level=self._options.compression_level,
            flat=flat,
            arrangement=arrangement,
        )

    def _write(
        self, operation: Operation, arrangement: Arrangement, flat: Flat, timeout_s: float
    ) -> Summary:
        writer = self._writer(arrangement, flat)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the training has queued is part of the state
        with self._meter.phase("write", writer.total_bytes()):

            def work(proceed: Callable[[], None]) -> Summary:
                def tick(nbytes: int) -> None:
                    proceed()
                    self._meter.tick(nbytes)

                course = None
                if arrangement.is_sending():
                    self._tools.bulk.open(timeout_s)
                    course = self._tools.bulk.course(proceed)
                return writer.write(
                    tick=tick, retry=self._tools.handler.execute_with_retry, course=course
                )

            return Watch(operation).run(work)

    def _record(
        self,
        facts: Facts,
        tree: object,
        arrangement: Arrangement,
        summaries: Sequence[Summary],
    ) -> CommitRecord:
        tensors = {
            step.leaf.name: whole_tensor(step.leaf.dtype, step.leaf.shape, step.file)
            for step in arrangement.steps
        }
        tensors |= tensors_of(arrangement.rest, summaries)
        attempt = self._attempt
        assert attempt is not None  # noqa: S101 -- only the committer makes records
        return record_of(
            attempt,
            facts,
            tree=tree,
            files=files_of(summaries),
            tensors=tensors,
            world_size=len(summaries),
            shard_format=self._options.format.value,
        )

    def _commit(self, record: CommitRecord) -> None:
        attempt, storage = self._attempt, self._tools.storage
        assert attempt is not None  # noqa: S101 -- only the committer commits
        if attempt.replaces is None and record.shard_format == CheckpointFormat.CONSOLIDATED.value:
            write_index(storage, self.prefix, record)
        self._tools.catalog.commit(attempt, record)

    def _abort(self, attempt: Attempt, error: BaseException) -> None:
        try:
            attempt.abort()
        except CheckpointError as problem:
            error.add_note(f"What the save had written could not be removed: {problem}")

    def _remove_own(self, begun: _Begun, error: BaseException) -> None:
        """Without this rank's word nobody commits, so the files of all ranks are nobody's."""
        storage = self._tools.storage
        try:
            for key in written_in(storage, begun.prefix, begun.attempt):
                storage.delete(key)
        except CheckpointError as problem:
            error.add_note(f"What this rank had written could not be removed: {problem}")


def _place_of(held: Held) -> str:
    """Ranks with the same place hold the same part of a leaf."""
    if held.like is None or held.like.mesh is None:
        return ""
    return str(held.like.shard_coordinate())


def _is_of_committer(error: BaseException) -> bool:
    """Whether an error is about rank 0 having fallen silent, died or left, or about time."""
    ranks: Any = getattr(error, "ranks", None)
    return isinstance(error, TimeoutError | KeyboardInterrupt) or bool(
        ranks and _COMMITTER in ranks
    )


def _say(error: BaseException, sentence: str) -> None:
    if isinstance(error, CheckpointError):
        error.args = (f"{error.message}. {sentence}", *error.args[1:])
    else:
        error.add_note(sentence)
