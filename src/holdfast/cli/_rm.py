"""``holdfast rm``: deletes the checkpoints that are named, and none that others refer to."""

from collections.abc import Mapping
from itertools import chain
from typing import Annotated

import typer

from holdfast.catalog import Catalog
from holdfast.catalog._needed import needed_in
from holdfast.catalog._survey import Folder, survey
from holdfast.cli._arguments import Yes
from holdfast.cli._asking import agreed
from holdfast.cli._exits import Exit, MisuseError, NothingThereError
from holdfast.cli._place import Place, find_place
from holdfast.cli._text import clean, put, say, size
from holdfast.errors import CorruptedError, StorageError


def run(
    checkpoints: Annotated[
        list[str],
        typer.Argument(metavar="CHECKPOINT...", help="Their paths, as runs/a/step_100."),
    ],
    *,
    yes: Yes = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also one whose record cannot be read, or whose files others refer to; what they "
            "need of it stays.",
        ),
    ] = False,
) -> int:
    """Asks first, unless --yes is given. In an object store say where the store ends, with two
    slashes: s3://bucket/run//step_100."""
    for catalog, names in _by_store([_named(text) for text in checkpoints]):
        folders = survey(catalog.storage, 0.0)
        for name in names:
            _check(catalog, folders, name, names, force=force)
        told = ", ".join(f"{clean(name)} ({_size(folders[name])})" for name in names)
        if not agreed(f"Delete {told} from {catalog.storage.url}?", yes=yes):
            say("nothing was deleted")
            return Exit.FOUND
        for name in names:
            (catalog.rollback if folders[name].problem is not None else catalog.delete)(name)
            put(f"deleted {clean(name)}")
    return Exit.OK


def _named(text: str) -> Place:
    place = find_place(text)
    if place.name is None:
        raise NothingThereError("this is no checkpoint", path=text)
    if not place.sure:
        root = place.catalog.storage.url
        raise MisuseError(
            f"where does the store end? If it is {root}, write {root}//{place.name}; what others "
            "refer to is looked up in all of it"
        )
    return place


def _by_store(places: list[Place]) -> list[tuple[Catalog, list[str]]]:
    stores: dict[str, tuple[Catalog, list[str]]] = {}
    for place in places:
        _, names = stores.setdefault(place.catalog.storage.url, (place.catalog, []))
        if place.name is not None and place.name not in names:
            names.append(place.name)
    return [*stores.values()]


def _check(
    catalog: Catalog, folders: Mapping[str, Folder], name: str, going: list[str], *, force: bool
) -> None:
    """Refuse what is not there, cannot be read, or is referred to by one that stays."""
    folder = folders.get(name)
    path = f"{catalog.storage.url}/{name}"
    committed = folder is not None and folder.found is not None and folder.found.is_committed
    if folder is None or not (committed or folder.problem is not None):
        raise NothingThereError("there is no committed checkpoint of this name", path=path)
    if force:
        return
    if folder.problem is not None:
        raise CorruptedError(
            f"{folder.problem.message}; nothing was deleted, --force deletes it", path=path
        )
    own = (key for key in folder.named() if key.startswith(f"{name}/"))
    files = {*own, *chain.from_iterable(folder.shards.values())}
    referring = [
        other.prefix
        for other in folders.values()
        if other.prefix not in going and not files.isdisjoint(needed_in([other]).keys)
    ]
    if referring:
        raise StorageError(
            f"{', '.join(referring)} needs files of it; nothing was deleted (--force deletes it "
            "and leaves those files)",
            path=path,
        )


def _size(folder: Folder) -> str:
    found = folder.found
    return "unreadable" if found is None else size(sum(f.size_bytes for f in found.record.files))
