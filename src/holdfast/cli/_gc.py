"""``holdfast gc``: removes leftovers of saves that never finished.

Which those are is decided by the catalog, with a look at leases; without ``--yes`` this only shows
what it would look at.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from holdfast.catalog import Catalog
from holdfast.catalog._names import is_own_name
from holdfast.catalog._needed import needed_in
from holdfast.catalog._survey import survey
from holdfast.cli._arguments import AsJson, StoreArgument
from holdfast.cli._exits import Exit
from holdfast.cli._place import find_store, nothing_in, path_of
from holdfast.cli._text import clean, counted, put, put_json, size
from holdfast.contracts import COMMIT_RECORD
from holdfast.storage._roots import ROOT_MARK


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loose:
    """A file of a save that no commit record names, or the intent of one."""

    key: str
    size_bytes: int


def run(
    store: StoreArgument,
    *,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove; without it nothing is changed.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Never touches a committed checkpoint, nor a save that is alive on any host: one that has
    renewed its lease within 10 minutes."""
    catalog = find_store(store, whole=True)
    if not _is_store(store, catalog):
        raise nothing_in(catalog)
    if not yes:
        loose = _loose(catalog)
        if as_json:
            put_json(_document(catalog, done=False, loose=loose))
        else:
            _put_loose(loose)
        return Exit.OK
    report = catalog.gc()
    if as_json:
        put_json(
            _document(catalog, done=True)
            | {
                "deleted": report.deleted,
                "kept": dict(report.kept),
                "swept": report.swept,
            }
        )
        return Exit.OK
    for key in report.deleted:
        put(f"deleted {clean(key)}")
    for prefix, why in report.kept.items():
        put(f"stays   {clean(prefix)}: {clean(why)}")
    put(f"{counted(len(report.deleted), 'file')} deleted, {report.swept} hidden ones swept")
    return Exit.OK


def _is_store(text: str, catalog: Catalog) -> bool:
    """Whether anything was ever saved there: one that was emptied may have hidden leftovers."""
    path = path_of(text)
    if path is not None and (path / ROOT_MARK).exists():
        return True
    names = (_last(info.key) for info in catalog.storage.list())
    return any(is_own_name(name) or name == COMMIT_RECORD for name in names)


def _loose(catalog: Catalog) -> list[_Loose]:
    """What is in the store and no commit record names. Living saves have such files, too."""
    needed = needed_in(survey(catalog.storage, 0.0).values())
    return [
        _Loose(key=info.key, size_bytes=info.size_bytes)
        for info in catalog.storage.list()
        if info.key not in needed.keys and is_own_name(_last(info.key))
    ]


def _last(key: str) -> str:
    return key.rpartition("/")[2]


def _put_loose(loose: list[_Loose]) -> None:
    for each in loose:
        put(f"no checkpoint names {clean(each.key)} ({size(each.size_bytes)})")
    if loose:
        total = size(sum(each.size_bytes for each in loose))
        put(
            f"{counted(len(loose), 'file')}, {total}; nothing was changed. With --yes those go "
            "whose save is not alive any more, and hidden files of interrupted writes"
        )
    else:
        put("no file here is without a checkpoint; --yes also sweeps hidden ones")


def _document(catalog: Catalog, *, done: bool, loose: list[_Loose] | None = None) -> dict[str, Any]:
    told = {"store": catalog.storage.url, "done": done}
    if loose is None:
        return told
    return told | {"loose": [{"key": e.key, "size_bytes": e.size_bytes} for e in loose]}
