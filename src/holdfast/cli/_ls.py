"""``holdfast ls``: what a listing says of every checkpoint. Reads commit records, no tensors."""

import datetime as dt
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from holdfast.catalog import CheckpointInfo, Unreadable
from holdfast.cli._arguments import AsJson, StoreArgument
from holdfast.cli._exits import Exit
from holdfast.cli._glance import Glance, glance
from holdfast.cli._place import Place, find_place, nothing_in
from holdfast.cli._text import age, number, put_json, put_table, say, size
from holdfast.errors import CorruptedError, IncompatibleVersionError

_HEADER = ("name", "step", "age", "size", "tensors", "ranks", "metrics", "format")
_RIGHT = ("step", "age", "size", "tensors", "ranks")


def run(
    store: StoreArgument = ".",
    *,
    as_json: AsJson = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Only so many of the newest.")
    ] = None,
) -> int:
    """A checkpoint whose record cannot be read is listed as DAMAGED, or as NEWER if a newer
    holdfast wrote it, and the exit code is 1."""
    place = find_place(store)
    seen = _seen(place)
    infos, broken = seen.infos[:limit], seen.unreadable
    if as_json:
        put_json(_document(place.catalog.storage.url, infos, broken))
    elif infos or broken:
        now = dt.datetime.now(dt.UTC)
        marked = [
            (each.prefix, *[""] * 5, "NEWER" if _is_newer(each) else "DAMAGED", "")
            for each in broken
        ]
        put_table(_HEADER, [*marked, *(_row(info, now) for info in infos)], right=_RIGHT)
    for each in broken:
        say(f"cannot be read: {each.error}")
    if not infos and not broken:
        raise nothing_in(place.catalog)
    return Exit.FOUND if broken else Exit.OK


def _seen(place: Place) -> Glance:
    """All checkpoints of a store, or the one that was named."""
    if place.name is None:
        return glance(place.catalog)
    try:
        return Glance(infos=(place.catalog.info(place.name),), unreadable=())
    except (CorruptedError, IncompatibleVersionError) as error:
        return Glance(infos=(), unreadable=(Unreadable(prefix=place.name, error=error),))


def _is_newer(unreadable: Unreadable) -> bool:
    return isinstance(unreadable.error, IncompatibleVersionError)


def _row(info: CheckpointInfo, now: dt.datetime) -> tuple[str, ...]:
    return (
        info.prefix,
        "-" if info.step is None else str(info.step),
        age((now - info.timestamp).total_seconds()),
        size(info.size_bytes),
        str(info.tensors),
        str(info.world_size),
        " ".join(f"{name}={number(value)}" for name, value in info.metrics.items()) or "-",
        info.format,
    )


def _document(
    url: str, infos: Sequence[CheckpointInfo], broken: Sequence[Unreadable]
) -> dict[str, Any]:
    return {
        "store": url,
        "checkpoints": [described(info) for info in infos],
        "unreadable": [
            {"name": each.prefix, "problem": each.error.message, "newer": _is_newer(each)}
            for each in broken
        ],
    }


def described(info: CheckpointInfo) -> dict[str, Any]:
    """A checkpoint in JSON, as ``ls`` and ``show`` have it."""
    return {
        "name": info.prefix,
        "step": info.step,
        "created": info.timestamp.isoformat(),
        "ordinal": info.ordinal,
        "size_bytes": info.size_bytes,
        "tensors": info.tensors,
        "world_size": info.world_size,
        "format": info.format,
        "format_version": info.version,
        "metrics": dict(info.metrics),
    }
