"""What a hostile case is, and those that a catalog of holdfast's reads. Knows no limits and no
processes; those of other formats are in ``_hostile_torch``.

A case has a folder to itself: ``root`` is what a reader is given, ``outside`` is nobody's business.
"""

# ruff: noqa: E501 -- tables of bytes are read as tables

import contextlib
import functools
import hashlib
import json
import os
import shutil
import socket
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Makes the folders of the tests importable, so before what is in them.
import _paths

# isort: split

import catalog_tools
import hostile_checkpoints
import hostile_frames
import hostile_records
import hostile_shards
import hostile_values
import made_shards
import numpy as np

from _confined import unwatched
from holdfast.catalog import Catalog
from holdfast.cli._converting import safetensors_read
from holdfast.errors import CheckpointError
from holdfast.format import CHUNK_BYTES, codec_for, decompress_chunk
from holdfast.storage import LocalStorage

GOLDEN = _paths.TESTS / "golden"
RECORD, SHARD = hostile_checkpoints.RECORD, hostile_checkpoints.SHARD
WANTED = np.arange(100.0)
"""What the honest checkpoint holds that the hostile ones are made from."""


class Broken(Exception):  # noqa: N818 -- a promise that was not kept, told in words
    """A reader did something else than to refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``plant`` fills the folder, ``read`` is what somebody innocent does with it, in another
    process. It must end in a ``CheckpointError``, or, if it ``may_read``, return."""

    name: str
    plant: Callable[[Path], None]
    read: Callable[[Path], object]
    may_read: bool = False


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Everything in a folder, by what it is and what is in it."""
    found = {}
    for path, info, entry in entries(folder):
        text = ""
        if stat.S_ISREG(info.st_mode) and info.st_size > info.st_blocks * 512 + 4096:
            text = f"{info.st_size} bytes, most of them nowhere"
        elif stat.S_ISREG(info.st_mode):
            with open(entry.name, "rb", opener=entry.opener) as file:
                text = hashlib.file_digest(file, "sha256").hexdigest()
        elif stat.S_ISLNK(info.st_mode):
            text = os.readlink(entry.name, dir_fd=entry.folder)
        found[path] = (stat.S_IFMT(info.st_mode), text)
    return found


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in an open folder: a path may be too long to be used."""

    name: str
    folder: int

    def opener(self, name: str, flags: int) -> int:
        return os.open(name, flags, dir_fd=self.folder)


def entries(folder: Path) -> Iterator[tuple[str, os.stat_result, Entry]]:
    """Everything in a folder, nothing followed."""
    for inner, folders, files, opened in os.fwalk(folder):
        for name in (*folders, *files):
            info = os.stat(name, dir_fd=opened, follow_symlinks=False)
            yield f"{os.path.relpath(inner, folder)}/{name}", info, Entry(name, opened)


def planted(files: Mapping[str, bytes], place: Path) -> Path:
    return Path(hostile_checkpoints.on_disk(place, files))


def read_catalog(place: Path, storage: Any = None) -> object:
    """Read it in every way, see that nothing changed, then clean up in every way."""
    root = place / "root"
    catalog = Catalog(storage or LocalStorage(root))
    before = snapshot(root)
    errors: list[CheckpointError] = []
    report = None
    try:
        errors, report = hostile_checkpoints.everything(catalog)
    except CheckpointError as error:
        errors.append(error)
    catalog.list()
    after = snapshot(root)
    changed = [key for key in before if after.get(key) != before[key]]
    if changed and storage is None:
        raise Broken(f"reading changed {changed[:3]}")
    _clean_up(catalog)
    if not errors:
        return "it was read"
    if report is not None and report.is_intact:
        raise Broken("it cannot be read, and verify says that it is intact")
    raise errors[0]


def _clean_up(catalog: Catalog) -> None:
    for call in (catalog.gc, lambda: catalog.rollback("a"), lambda: catalog.delete("a")):
        with contextlib.suppress(CheckpointError):
            call()


def records() -> Iterator[Case]:
    """Every record, beside a good shard."""
    for name, (data, _) in (hostile_records.CORRUPTED | hostile_records.NEWER).items():
        files = {**hostile_checkpoints.HONEST, RECORD: data}
        yield Case(
            name=f"record: {name}", plant=functools.partial(_plant, files), read=read_catalog
        )
    for name, made in _LARGE_RECORDS.items():
        yield Case(
            name=f"record: {name}",
            plant=functools.partial(_plant_made, made),
            read=read_catalog,
            may_read=name in _HARMLESS,
        )


def _plant_made(made: Callable[[], Mapping[str, bytes]], place: Path) -> None:
    planted(made(), place)


def _plant(files: Mapping[str, bytes], place: Path) -> None:
    planted(files, place)


def _many_files(count: int) -> Any:
    file = hostile_checkpoints.BODY["files"][0]
    names = (f"shard-{rank}-00000000000000aa.safetensors" for rank in range(1, count + 1))
    return hostile_checkpoints.record(
        files=[hostile_checkpoints.BODY["files"][0], *(file | {"name": name} for name in names)]
    )


def _many_tensors(count: int) -> Any:
    tensor = hostile_checkpoints.BODY["tensors"]["w"]
    return hostile_checkpoints.record(tensors={f"t{index}": tensor for index in range(count)})


def _many_keys(count: int) -> Any:
    return hostile_checkpoints.record(custom={f"k{index}": 0 for index in range(count)} | {"$": 1})


def _many_lists(count: int) -> Any:
    return hostile_checkpoints.record(tree=[[[]] for _ in range(count)], tensors={"v": 1})


_LARGE_RECORDS: Mapping[str, Callable[[], Mapping[str, bytes]]] = {
    "20,000 files that are not there": lambda: _many_files(20_000),
    "20,000 tensors that are not there": lambda: _many_tensors(20_000),
    "300,000 keys": lambda: _many_keys(300_000),
    "300,000 lists": lambda: _many_lists(300_000),
}


_HARMLESS = {"20,000 files that are not there", "300,000 keys"}
"""What is asked for is there all the same: no tensor is in those files, no state in those keys."""


def shards() -> Iterator[Case]:
    """Every shard file, read as a shard and as a file of another program's."""
    for name, (data, _) in (hostile_shards.CORRUPTED | hostile_shards.NEWER).items():
        yield Case(
            name=f"shard: {name}",
            plant=functools.partial(_plant, {"a.safetensors": data}),
            read=read_shard,
        )
    entry = ':{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    many = hostile_shards.file_of("{" + ",".join(f'"{i}"{entry}' for i in range(600_000)) + "}")
    yield Case(
        name="shard: 600,000 entries",
        plant=functools.partial(_plant, {"a.safetensors": many}),
        read=read_shard,
    )


def read_shard(place: Path) -> object:
    path = place / "root" / "a.safetensors"
    with contextlib.suppress(CheckpointError):
        for tensor in safetensors_read.read_file(path).tree.values():
            for _ in tensor.pieces():
                pass
    return made_shards.open_shard(path.read_bytes(), str(path)).file_bytes


def checkpoints() -> Iterator[Case]:
    for name, files in hostile_checkpoints.HOSTILE.items():
        yield Case(
            name=f"checkpoint: {name}", plant=functools.partial(_plant, files), read=read_catalog
        )


def values() -> Iterator[Case]:
    """Every damaged value, as the state of a checkpoint and as what a user kept beside it."""
    for number, (encoded, why) in enumerate(hostile_values.HOSTILE):
        if isinstance(encoded, bytes | float):
            continue  # no JSON says that
        for field in ("tree", "custom"):
            yield Case(
                name=f"value {number} in {field}: {why[:50]}",
                plant=functools.partial(_plant_value, field, encoded),
                read=_read_values,
            )


def _plant_value(field: str, encoded: object, place: Path) -> None:
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # some are deeper than json writes
    try:
        files = hostile_checkpoints.record(**{field: {"a": [encoded]}})
    finally:
        sys.setrecursionlimit(usual)
    planted(files, place)


def _read_values(place: Path) -> object:
    catalog = Catalog(LocalStorage(place / "root"))
    return catalog.read("a"), catalog.open("a").custom


def frames() -> Iterator[Case]:
    for name, payload in hostile_frames.BOMBS.items():
        for mode in (1, 3):
            frame = hostile_frames.one_plane(mode, payload)
            yield Case(
                name=f"frame: {name}, mode {mode}",
                plant=functools.partial(_plant, {"frame": frame}),
                read=_read_frame,
            )


def _read_frame(place: Path) -> object:
    frame = (place / "root" / "frame").read_bytes()
    into = memoryview(bytearray(CHUNK_BYTES))
    codec = codec_for("fast", "F32")
    assert codec is not None
    decompress_chunk(memoryview(frame), into, codec=codec, path="frame")
    return "decoded"


# --- what only a disk can hold


def _link_out(path: Path, outside: Path) -> None:
    (outside / "copy").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside / "copy")


def _link_relative(path: Path, outside: Path) -> None:
    (outside / "copy").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to("../../outside/copy")


def _link_to(target: str, path: Path, _: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def _hard_link(path: Path, outside: Path) -> None:
    (outside / "copy").write_bytes(path.read_bytes())
    path.unlink()
    path.hardlink_to(outside / "copy")


def _pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()


def _socket(path: Path, _: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")  # a path may be too long for it
        finally:
            os.close(folder)


def _sparse(path: Path, _: Path) -> None:
    """A terabyte of nothing."""
    os.truncate(path, 2**40)


_ODD: Mapping[str, Callable[[Path, Path], None]] = {
    "a link out of the root": _link_out,
    "a relative link out of the root": _link_relative,
    "a link to itself": lambda path, outside: _link_to(path.name, path, outside),
    "a link to nothing": functools.partial(_link_to, "/nonexistent/file"),
    "a link to /dev/zero": functools.partial(_link_to, "/dev/zero"),
    "a link to /dev/stdin": functools.partial(_link_to, "/dev/stdin"),
    "a link to the process's memory": functools.partial(_link_to, "/proc/self/mem"),
    "a pipe": _pipe,
    "a socket": _socket,
    "a folder": _folder,
    "a file of a terabyte": _sparse,
}


def places() -> Iterator[Case]:
    for what, make in _ODD.items():
        for key in (SHARD, RECORD):
            yield _odd_place(what, make, key, may_read=False)
    for key in (SHARD, RECORD):
        yield _odd_place("a hard link to another file", _hard_link, key, may_read=True)
    for what, change in _FOLDERS.items():
        yield Case(
            name=f"place: {what}",
            plant=functools.partial(_changed, change),
            read=read_catalog,
            may_read=what.startswith("beside it, "),
        )
    for what, data in _INTENTS.items():
        intent = {"a/intent-00000000000000bb.json": data}
        yield Case(
            name=f"place: an intent that is {what}",
            plant=functools.partial(_plant, {**hostile_checkpoints.HONEST, **intent}),
            read=read_catalog,
            may_read=True,
        )
    yield Case(
        name="place: two names that look alike", plant=_plant_alike, read=_read_alike, may_read=True
    )
    for what in ("a link out of the root", "a pipe", "a folder", "a link to /dev/zero"):
        yield Case(
            name=f"place: the index of a model is {what}",
            plant=functools.partial(_plant_index, _ODD[what]),
            read=_read_model,
            may_read=True,
        )
    for what in _ODD:
        yield Case(
            name=f"place: the table of a model is {what}",
            plant=functools.partial(_plant_table, _ODD[what]),
            read=_read_model,
        )


def _odd_place(what: str, make: Callable[[Path, Path], None], key: str, *, may_read: bool) -> Case:
    def plant(place: Path) -> None:
        make(planted(hostile_checkpoints.HONEST, place) / key, place / "outside")

    which = "shard" if key == SHARD else "record"
    return Case(
        name=f"place: the {which} is {what}", plant=plant, read=read_catalog, may_read=may_read
    )


def _changed(change: Callable[[Path, Path], None], place: Path) -> None:
    change(planted(hostile_checkpoints.HONEST, place), place / "outside")


def _folder_linked(root: Path, outside: Path) -> None:
    (root / "a").rename(outside / "a")
    (root / "a").symlink_to(outside / "a")


def _folder_linked_inside(root: Path, _: Path) -> None:
    (root / "a").rename(root / "b")
    (root / "a").symlink_to("b")


def _borrowed_through_a_link(root: Path, outside: Path) -> None:
    """The record names a file of another prefix, which is a link."""
    file = {**hostile_checkpoints.BODY["files"][0], "prefix": "link"}
    (outside / "b").mkdir()
    (root / SHARD).rename(outside / "b" / Path(SHARD).name)
    (root / "link").symlink_to(outside / "b")
    (root / RECORD).write_bytes(hostile_checkpoints.record(files=[file])[RECORD])


def _beside(link: str, root: Path, _: Path) -> None:
    (root / "loop").symlink_to(link)


def _deep_folders(root: Path, _: Path) -> None:
    """Folders deeper than a path may be long."""
    folder = os.open(root, os.O_RDONLY)
    for _depth in range(300):
        os.mkdir("d" * 100, dir_fd=folder)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)


def _strange_names(root: Path, _: Path) -> None:
    for name in (b"\xff\xfe", b"new\nline", b"\x1b[2J", b"-rf", b"a\\..\\b", b"..."):
        (root / os.fsdecode(name)).mkdir()
        (root / os.fsdecode(name) / "metadata.json").write_bytes(b"{}")


def _lock(kind: str, root: Path, outside: Path) -> None:
    path = root / ".holdfast.lock"
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(outside / "made")
    else:
        path.mkdir()


def _swapped(what: str, root: Path, _: Path) -> None:
    """Another checkpoint whose files have the same names, and one of its files in this one."""
    parts = [catalog_tools.Part(catalog_tools.Box((0,), (100,)), 0)]
    other = LocalStorage(root.parent / "other")
    grid = catalog_tools.Grid.whole((100,))
    catalog_tools.write_parts(other, "a", {"w": (WANTED[::-1].copy(), grid, parts)})
    shutil.copyfile(root.parent / "other" / what, root / what)


_FOLDERS: Mapping[str, Callable[[Path, Path], None]] = {
    "its folder is a link out of the root": _folder_linked,
    "its folder is a link inside of the root": _folder_linked_inside,
    "a file of another prefix, which is a link": _borrowed_through_a_link,
    "the record of another checkpoint": functools.partial(_swapped, RECORD),
    "the shard of another checkpoint": functools.partial(_swapped, SHARD),
    "beside it, a link to the root": functools.partial(_beside, "."),
    "beside it, a link to what is above": functools.partial(_beside, ".."),
    "beside it, a link to /proc": functools.partial(_beside, "/proc/self"),
    "beside it, folders deeper than a path": _deep_folders,
    "beside it, names that are no text": _strange_names,
    "beside it, a lock that is a pipe": functools.partial(_lock, "pipe"),
    "beside it, a lock that is a link": functools.partial(_lock, "link"),
    "beside it, a lock that is a folder": functools.partial(_lock, "folder"),
}

_INTENT = '{"format":"holdfast-intent","version":1,"attempt":"00000000000000bb","lease_s":%s,"refers":%s,"host":"h","pid":1}'
_INTENTS: Mapping[str, bytes] = {
    "empty": b"",
    "a pickle": b"cos\nsystem\n(S'true'\ntR.",
    "deep JSON": b"[" * 100_000,
    "of a lease without end": (_INTENT % ("1e308", "[]")).encode(),
    "of a lease that is no number": (_INTENT % ("NaN", "[]")).encode(),
    "of a lease below nothing": (_INTENT % ("-1", "[]")).encode(),
    "referring to what is outside": (_INTENT % ("600", '["../../outside"]')).encode(),
    "referring to a million things": (_INTENT % ("600", json.dumps(["a"] * 10**6))).encode(),
    "17 MiB of spaces": b" " * (17 * 1024 * 1024),
}  # fmt: skip


def _plant_alike(place: Path) -> None:
    catalog = Catalog(LocalStorage(place / "root"))
    for number, name in enumerate(_alike()):
        catalog.write(name, {"w": np.full(10, number)})


def _alike() -> list[str]:
    accented = "caf\u00e9"
    return ["A", "a", accented, unicodedata.normalize("NFD", accented), "\u212b", "\u00c5", "a "]


def _read_alike(place: Path) -> object:
    catalog = Catalog(LocalStorage(place / "root"))
    names = _alike()
    for number, name in enumerate(names):
        state: Any = catalog.read(name)
        if set(state["w"].tolist()) != {number}:
            raise Broken(f"{name!r} is another checkpoint")
    for number, name in enumerate(names):
        catalog.delete(name)
        left = {info.prefix for info in catalog.list()}
        if left != set(names[number + 1 :]):
            raise Broken(f"to delete {name!r} left {left}")
    return "all were kept apart"


def _golden_model(place: Path) -> Path:
    shutil.copytree(GOLDEN / "v1" / "consolidated", place / "root" / "a")
    return place / "root" / "a"


def _plant_index(make: Callable[[Path, Path], None], place: Path) -> None:
    make(_golden_model(place) / "model.safetensors.index.json", place / "outside")


def _plant_table(make: Callable[[Path, Path], None], place: Path) -> None:
    make(next(_golden_model(place).glob("model-00001*.chunks")), place / "outside")


def _read_model(place: Path) -> object:
    return read_catalog(place)


# --- what changes while it is read


def changing() -> Iterator[Case]:
    """At one of the calls of a reader, something is put in the place of what it reads."""
    for what in _CHANGES:
        for moment in range(1, 9):
            yield Case(
                name=f"while read, at call {moment}: {what}",
                plant=_plant_changing,
                read=functools.partial(_read_changing, what, moment),
                may_read=True,
            )


def _plant_changing(place: Path) -> None:
    root = planted(hostile_checkpoints.HONEST, place)
    shutil.copytree(root, place / "outside", dirs_exist_ok=True)


def _link_folder(root: Path, outside: Path) -> None:
    (root / "a").rename(root / "gone")
    (root / "a").symlink_to(outside / "a")


def _read_changing(what: str, moment: int, place: Path) -> object:
    root = place / "root"
    calls = 0

    def change(_method: str, _key: str | None) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            with unwatched():
                _CHANGES[what](root, place / "outside")

    storage = catalog_tools.Observed(LocalStorage(root), before=change)
    state: Any = Catalog(storage).read("a")
    found = state["w"]
    if not np.array_equal(found, WANTED):
        raise Broken(f"it read {found[:5]}")
    return "what was written"


def _other_shard(root: Path, _: Path) -> None:
    data = bytearray((root / SHARD).read_bytes())
    data[4096 + 8] ^= 1
    (root / "new").write_bytes(data)
    (root / "new").rename(root / SHARD)


def _bit_in_place(root: Path, _: Path) -> None:
    with (root / SHARD).open("r+b") as file:
        file.seek(4096 + 8)
        file.write(b"\xff")


_CHANGES: Mapping[str, Callable[[Path, Path], None]] = {
    "another shard": _other_shard,
    "a bit of the shard": _bit_in_place,
    "the shard is cut": lambda root, _: os.truncate(root / SHARD, 4100),
    "the shard is emptied": lambda root, _: os.truncate(root / SHARD, 0),
    "the shard grows": lambda root, _: os.truncate(root / SHARD, 2**40),
    "a link for the shard": lambda root, outside: _link_to(
        str(outside / SHARD), root / SHARD, outside
    ),
    "a pipe for the shard": lambda root, outside: _pipe(root / SHARD, outside),
    "a pipe for the record": lambda root, outside: _pipe(root / RECORD, outside),
    "a link for the folder": _link_folder,
    "nothing": lambda root, _: shutil.rmtree(root / "a"),
}


def catalog_cases() -> list[Case]:
    makers = (records, shards, checkpoints, values, frames, places, changing)
    return [case for make in makers for case in make()]
