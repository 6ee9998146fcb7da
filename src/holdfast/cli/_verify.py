"""``holdfast verify``: whether checkpoints are what was written. Changes nothing in a store."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.catalog import Catalog, Damage
from holdfast.catalog._committed import Found
from holdfast.cli._arguments import AsJson, CheckpointArgument
from holdfast.cli._exits import Exit, MisuseError
from holdfast.cli._glance import glance
from holdfast.cli._parts import Extent, choose_parts
from holdfast.cli._place import check_folder, find_checkpoint, find_store, nothing_in
from holdfast.cli._progress import bar
from holdfast.cli._text import clean, counted, put, put_json, say, size
from holdfast.cli._verify_state import VerifyState
from holdfast.errors import (
    CheckpointNotFoundError,
    CorruptedError,
    IncompatibleVersionError,
    LoadError,
)
from holdfast.format import dtype_of
from holdfast.reshard import Box


def run(
    checkpoint: CheckpointArgument = ".",
    *,
    all_: Annotated[
        bool, typer.Option("--all", help="Every checkpoint of the store, the newest first.")
    ] = False,
    sample: Annotated[
        str, typer.Option(metavar="SHARE", help="Read only that much of the data, as 10%.")
    ] = "100%",
    seed: Annotated[int, typer.Option(help="Which sample: another number, another one.")] = 0,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Remember in this file what was read, so that an interrupted run goes on. It is "
            "removed when all was read.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Every fault is named with its tensor and its file, and the exit code is 1 if there is any.
    One of a newer holdfast cannot be verified, which is 4. Headers, digests and the commit record
    are always checked, whatever the sample."""
    share = _share(sample)
    if state is not None:
        check_folder(state)
    catalog, names = _chosen(checkpoint, everything=all_)
    remembered = VerifyState.open(
        state, store=catalog.storage.url, sample=f"{share * 100}%", seed=seed
    )
    results: list[_Result] = []
    newer: dict[str, IncompatibleVersionError] = {}
    try:
        for name in names:
            try:
                result = _verified(catalog, name, share, seed, remembered, keep=bool(state))
            except (CheckpointNotFoundError, _ReplacedError, IncompatibleVersionError) as error:
                if not all_:
                    raise
                say(f"passed over: {error}")
                if isinstance(error, IncompatibleVersionError):
                    newer[name] = error  # else a training that goes on has deleted it
                continue
            results.append(result)
            if not as_json:
                _put(result)
    except KeyboardInterrupt:
        more = f"the same command goes on from {state}" if state else "--state FILE would remember"
        raise KeyboardInterrupt(f"interrupted; {more}") from None
    remembered.end()
    if as_json:
        put_json(
            {
                "store": catalog.storage.url,
                "checkpoints": [_told(each) for each in results],
                "newer": [{"name": name, "problem": why.message} for name, why in newer.items()],
            }
        )
    return _exit(results, newer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What was found in one checkpoint. ``share`` is how much of its data was read, in all, and
    ``read_bytes`` and ``seconds`` are of this run."""

    name: str
    files: int = 0
    share: float = 1.0
    checked_bytes: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    damage: tuple[Damage, ...]


class _ReplacedError(LoadError):
    """It is not there any more as it was when its verification began."""


def _exit(results: Sequence[_Result], newer: Collection[str]) -> Exit:
    if any(each.damage for each in results):
        return Exit.FOUND
    return Exit.DAMAGED if newer else Exit.OK


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise MisuseError(f"--sample must be a share, as 10% or 0.1, not {text!r}")
    return share


def _chosen(text: str, *, everything: bool) -> tuple[Catalog, list[str]]:
    if not everything:
        catalog, name = find_checkpoint(text)
        return catalog, [name]
    catalog = find_store(text)
    scan = glance(catalog)
    names = [info.prefix for info in scan.infos] + [each.prefix for each in scan.unreadable]
    if not names:
        raise nothing_in(catalog)
    return catalog, names


def _verified(
    catalog: Catalog, name: str, share: Fraction, seed: int, state: VerifyState, *, keep: bool
) -> _Result:
    begun = time.monotonic()
    try:
        found = catalog.find(name)
    except CorruptedError:
        return _Result(name=name, damage=catalog.verify(name).damage)
    attempt = found.record.attempt
    extent = _extent(found)
    parts = choose_parts(extent, share=share, seed=f"{seed} {attempt}", resumable=keep)
    seen = state.seen(name, attempt, parts.of)
    before = seen.checked_bytes
    with bar(clean(name), int(extent.nbytes * parts.share), before) as tick:
        for nth in (part for part in parts.chosen if part not in seen.done):
            try:
                report = catalog.verify(name, part=(nth, parts.of), progress=tick)
            except LoadError as error:
                if catalog.find(name).record.attempt == attempt:  # as for want of memory
                    raise
                raise _ReplacedError(error.message, path=name) from error
            if parts.of > 1 and catalog.find(name).record.attempt != attempt:
                raise _ReplacedError(
                    "saved again while it was verified; verify it again", path=name
                )
            seen.done.add(nth)
            seen.checked_bytes += report.checked_bytes
            seen.damage.update(dict.fromkeys(report.damage))
            state.keep(name, attempt, parts.of, seen)
    return _Result(
        name=name,
        files=extent.files,
        share=parts.share,
        checked_bytes=seen.checked_bytes,
        read_bytes=seen.checked_bytes - before,
        seconds=time.monotonic() - begun,
        damage=tuple(seen.damage),
    )


def _extent(found: Found) -> Extent:
    tensors = found.record.tensors.values()
    nbytes = sum(Box.whole(each.shape).size * dtype_of(each.dtype).itemsize for each in tensors)
    return Extent(nbytes=nbytes, tensors=len(tensors), files=len(found.record.files))


def _put(result: _Result) -> None:
    for damage in result.damage:
        put(f"DAMAGED {clean(damage)}")
    word = counted(len(result.damage), "fault") if result.damage else "intact"
    part = f" (a sample, {result.share:.0%})" if result.share < 1 else ""
    speed = size(result.read_bytes / result.seconds) if result.seconds else "-"
    put(
        f"{clean(result.name)}: {word}, {counted(result.files, 'file')}, "
        f"{size(result.checked_bytes)} of data verified{part}, {result.seconds:.1f} s, {speed}/s"
    )


def _told(result: _Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "intact": not result.damage,
        "files": result.files,
        "share": result.share,
        "checked_bytes": result.checked_bytes,
        "read_bytes": result.read_bytes,
        "seconds": result.seconds,
        "damage": [
            {"file": each.file, "tensor": each.tensor, "problem": each.problem}
            for each in result.damage
        ],
    }
