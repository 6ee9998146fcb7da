"""One load, on one of its ranks: open, validate, match, read, vote, apply, settle.

Rank 0 reads the record for all. Nothing of any rank's state is changed before all ranks have read
and verified what they want; after that it is changed on all of them or on none.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from holdfast.catalog import OpenCheckpoint
from holdfast.catalog._committed import Found, find_committed, found_of, read_committed
from holdfast.catalog._names import record_key
from holdfast.catalog._opened import decoded
from holdfast.catalog._reading import TensorReader
from holdfast.contracts import ObjectInfo, Operation
from holdfast.distributed._agree import check_same
from holdfast.distributed._capture import parameters_in
from holdfast.distributed._collecting import collecting_later
from holdfast.distributed._filling import DtypesAsSaved
from holdfast.distributed._fitting import fit
from holdfast.distributed._matching import Matching
from holdfast.distributed._options import LoadOptions
from holdfast.distributed._progress import ProgressMeter
from holdfast.distributed._result import CheckpointMetadata, LoadReport, likely_renames
from holdfast.distributed._rng import RNG, RngFill
from holdfast.distributed._seeing import seen_here
from holdfast.distributed._sharing import share_reading
from holdfast.distributed._staging import Staging
from holdfast.distributed._stored import has_ranks
from holdfast.distributed._swapping import Action, undo_all
from holdfast.distributed._tools import Tools
from holdfast.distributed._validation import ValidationResult
from holdfast.distributed._watch import FOREVER_S, GRACE_S, Watch, finish
from holdfast.errors import CheckpointError, LoadError, ValidationError

_log = logging.getLogger("holdfast.distributed")


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a load has brought: the state it has ``filled``, if it was given one, and the stored
    ``tree``, with references to leaves unless all of it was loaded."""

    metadata: CheckpointMetadata
    tree: Any
    filled: Any
    report: LoadReport
    not_restored: tuple[str, ...]
    validation: ValidationResult | None
    was_resharded: bool


def load_state(
    tools: Tools,
    target: Any,
    options: LoadOptions,
    *,
    prefix: str,
    open_at: frozenset[str],
    timeout_s: float,
    rng: bool = False,
    device: torch.device | None = None,
) -> Loaded:
    """Fill a state with what is stored, or, without one, return all that is stored.

    At the places ``open_at``, what is stored and not asked for is no matter. All ranks call this.
    """
    loading = _Loading(tools, options, prefix, device)
    try:
        # What is made here outlives the caller's inference mode, and is trained on.
        with (
            torch.inference_mode(False),
            tools.coordinator.operation("load", timeout_s) as operation,
        ):
            return loading.run(operation, target, open_at, timeout_s, rng=rng)
    except BaseException as error:
        loading.give_up(error)
        raise


class _Loading:
    def __init__(
        self, tools: Tools, options: LoadOptions, prefix: str, device: torch.device | None
    ) -> None:
        self._tools = tools
        self._options = options
        self._prefix = prefix
        self._device = device
        self._rank = tools.coordinator.rank
        self._path = f"{tools.storage.url}/{prefix}"
        self._meter = ProgressMeter(options.progress, operation="load", rank=self._rank)
        self._applied: list[Action] = []
        self._settled = False
        self._sent = False  # whether the way to other ranks was used

    def run(
        self,
        operation: Operation,
        target: Any,
        open_at: frozenset[str],
        timeout_s: float,
        *,
        rng: bool,
    ) -> Loaded:
        with operation.phase("open"), self._meter.phase("open"), collecting_later():
            self._check_options(operation)
            found = self._open(operation)
            metadata = self._metadata(found)
            stored = decoded(found, found.record.tree)
        with operation.phase("validate"), self._meter.phase("validate"):
            validation = self._validate(operation, found)
        with operation.phase("match"), self._meter.phase("match"), collecting_later():
            self._apply([*DtypesAsSaved.found_in(target, stored)])
            matching = self._matching(found, operation, target)
            make = matching.whole(stored) if target is None else None
            holder = [] if make else fit(matching, target, stored, open_at=open_at)
            if rng and isinstance(stored, Mapping) and RNG in stored:
                self._match_rng(matching, stored[RNG])
            report = self._agree(operation, matching)
        with operation.phase("read"):
            staging = self._read(operation, found, matching, timeout_s)
            with collecting_later():
                actions = [action for build in matching.builds for action in build(staging)]
                tree = stored if make is None else make(staging)
        with operation.phase("vote"):
            operation.barrier()
        with operation.phase("apply"), self._meter.phase("apply"):
            self._apply(actions)
        with operation.phase("settle"):
            operation.barrier()
            self._settled = True
            self._tools.recent.prefix = self._prefix
        return Loaded(
            metadata=metadata,
            tree=tree,
            filled=holder[0] if holder else None,
            report=report,
            not_restored=tuple(matching.not_restored),
            validation=validation,
            was_resharded=found.record.world_size != operation.world_size,
        )

    def give_up(self, error: BaseException) -> None:
        """After an error: take back what was changed."""
        if self._settled:
            error.add_note("The state of this rank is loaded all the same.")
        else:
            self._undo(error)
        self._tools.locate(error)
        if self._sent:
            self._tools.bulk.discard()

    def _undo(self, error: BaseException) -> None:
        try:
            finish(lambda: undo_all(self._applied))
        except BaseException as problem:  # noqa: BLE001 -- the error at hand is the one to raise
            error.add_note(
                "Not all of the state could be put back as it was: undoing it raised "
                f"{type(problem).__name__}: {problem}. Everything else was put back."
            )

    def _check_options(self, operation: Operation) -> None:
        options = self._options
        own = {
            "checkpoint_prefix": self._prefix,
            "skip_validation": options.skip_validation,
            "resharding_strategy": options.resharding_strategy,
            "strict": options.strict,
        }
        check_same(operation, own, LoadError)

    def _open(self, operation: Operation) -> Found:
        """The record, which rank 0 reads for all. Every rank sees that it is there for it, too: a
        root that is local to each host holds a part of everything."""
        storage = self._tools.storage
        watch = Watch(operation)
        if operation.world_size == 1:
            return watch.run(lambda _: find_committed(storage, self._prefix))
        told: bytes | None = None
        if operation.rank == 0:
            data, info = watch.run(lambda _: read_committed(storage, self._prefix))
            told = msgspec.json.encode(info) + b"\n" + data
        head, _, data = operation.broadcast(told).partition(b"\n")
        info = msgspec.json.decode(head, type=ObjectInfo)
        if operation.rank != 0:
            key = record_key(self._prefix)
            seen = watch.run(lambda proceed: seen_here(storage, key, proceed))
            if seen is None:
                raise LoadError(
                    "this rank does not see the checkpoint that rank 0 sees: the storage is not "
                    "the same on all hosts. Use one that all ranks share",
                    path=self._path,
                )
            if seen.size_bytes != info.size_bytes:
                raise LoadError(
                    "this rank sees another checkpoint of this name than rank 0: it was replaced "
                    "just now, or the storage is not the same on all hosts",
                    path=self._path,
                )
        return found_of(self._prefix, data, info)

    def _validate(self, operation: Operation, found: Found) -> ValidationResult | None:
        """Ask the checks, on rank 0; the others hear what they said."""
        if self._options.skip_validation:
            return None
        told = b""
        if operation.rank == 0:
            checkpoint = OpenCheckpoint(self._tools.storage, found)
            ask = self._tools.validator.validate
            result = Watch(operation).run(
                lambda _: ask(checkpoint, world_size=operation.world_size, values_read=True)
            )
            if not result.is_valid:
                raise ValidationError(
                    "the checkpoint did not pass its validation; nothing was changed. "
                    f"{result.summary()}",
                    path=self._path,
                )
            if result.has_warnings:
                _log.warning("%s: %s", self._path, result.summary())
            told = msgspec.json.encode(result.warnings)
        warnings = msgspec.json.decode(operation.broadcast(told), type=tuple[str, ...])
        return ValidationResult(errors=(), warnings=warnings)

    def _matching(self, found: Found, operation: Operation, target: Any) -> Matching:
        return Matching(
            tensors=found.record.tensors,
            options=self._options,
            rank=operation.rank,
            world_size=operation.world_size,
            parameters={} if target is None else parameters_in(target),
            device=self._device,
        )

    def _match_rng(self, matching: Matching, stored: object) -> None:
        if not matching.is_under(RNG):
            return
        chosen = matching.own(stored, RNG)
        if has_ranks(chosen):
            return
        make = matching.whole(chosen, RNG)
        not_restored = matching.not_restored  # a build that knew the matching would keep it alive

        def build(staging: Staging) -> list[Action]:
            fill = RngFill(make(staging))
            not_restored.extend(f"{RNG}.{name}" for name in fill.left_out)
            return [fill]

        matching.builds.append(build)

    def _agree(self, operation: Operation, matching: Matching) -> LoadReport:
        """One report of all ranks, and the same judgement of it on all."""
        own = matching.report()
        told = operation.all_gather(b"" if own.is_clean else own.encode())
        report = LoadReport.merge([LoadReport.decode(each) for each in told if each])
        lost = [place for place in matching.not_restored if place != RNG]
        if self._options.strict and lost:
            sentence = (
                f"{', '.join(lost)}: each rank has its own of it, and the checkpoint was saved by "
                f"another number of ranks. Give LoadOptions(remap=...), or strict=False to go "
                "without"
            )
            report = LoadReport.merge([report, LoadReport(other=(sentence,))])
        if report.is_clean:
            return report
        renames = likely_renames(
            report.missing, report.unexpected, matching.stored_shapes, matching.wanted_shapes
        )
        report = LoadReport.merge([report, LoadReport(renames=renames)])
        if self._options.strict:
            raise ValidationError(
                "the checkpoint does not fit what it is loaded into; nothing was changed. With "
                f"strict=False what fits is loaded.\n{report.text()}",
                path=self._path,
            )
        if operation.rank == 0:
            _log.warning("%s was loaded in part:\n%s", self._path, report.text())
        return report

    def _read(
        self, operation: Operation, found: Found, matching: Matching, timeout_s: float
    ) -> Staging:
        """Read and verify everything that is wanted, into memory of its own."""
        reader = TensorReader(self._tools.storage, self._prefix, found.record)
        staging = Staging(found.record.tensors, self._path)
        with collecting_later():
            for slot in matching.slots:
                staging.add(slot)
            Watch(operation).run(lambda _: reader.check_stored(staging.boxes()))
            staging.allocate()
        strategy = self._options.resharding_strategy
        staged = [*staging.staged]
        shared = None
        if strategy == "broadcast" and operation.world_size > 1:
            shared = share_reading(operation, self._tools, staged, found.record.tensors)
        sending = shared is not None and shared.is_sending()
        if sending:
            self._tools.bulk.open(timeout_s, operation=operation)
            self._sent = True
        with collecting_later():
            holders = staged if shared is None else [shared]
            wants = [want for each in holders for want in each.wants()]
        nbytes = staging.bytes_of(wants)
        with self._meter.phase("read", nbytes), collecting_later(moved_bytes=nbytes):

            def work(proceed: Callable[[], None]) -> None:
                def tick(nbytes: int) -> None:
                    proceed()
                    self._meter.tick(nbytes)

                reader.fill(wants, tick=tick, checked=True, whole_boxes=strategy == "simple")
                if shared is not None and sending:
                    shared.exchange(self._tools.bulk.course(proceed))

            # What is read straight into the state must not arrive after the load has failed.
            is_direct = any(slot.direct is not None for slot in matching.slots)
            Watch(operation, grace_s=FOREVER_S if is_direct else GRACE_S).run(work)
        return staging

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            self._applied.append(action)
            try:
                action.apply()
            except CheckpointError:
                raise
            except Exception as error:
                raise LoadError(
                    f"the state refused what was loaded ({type(error).__name__}: {error}); it is "
                    "put back as it was",
                    path=self._path,
                ) from error

    def _metadata(self, found: Found) -> CheckpointMetadata:
        custom = decoded(found, found.record.custom, root="custom")
        return CheckpointMetadata.of(self._prefix, found.record, custom)
