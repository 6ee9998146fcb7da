"""``holdfast bench``: what checkpoints cost on a storage, beside its bare speed and torch.save."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from holdfast.cli._arguments import AsJson
from holdfast.cli._bench_rounds import Timed, timed_rounds
from holdfast.cli._bench_work import has_torch, works_of
from holdfast.cli._doctor_disk import MEMORY, filesystem
from holdfast.cli._exits import Exit, MisuseError
from holdfast.cli._place import path_of
from holdfast.cli._progress import status
from holdfast.cli._scratch import is_memory, nearest_folder, scratch
from holdfast.cli._text import clean, counted, put, put_json, put_table, size
from holdfast.errors import NoSpaceError
from holdfast.storage import open_storage

_MIB: Final = 1024 * 1024
_PILOT_BYTES: Final = 4 * _MIB
_TIMES: Final = 4
"""How much larger each next state is."""

_COPIES: Final = 4
"""How many times the state is on the disk, with what is being replaced."""

_KEPT: Final = 6
"""How many times it is in memory: saved from, loaded into, staged, copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    size_bytes: int
    rounds: int
    seconds: float
    timed: list[Timed]

    @property
    def shares(self) -> list[float | None]:
        """Of the bare speed, of those that have one to be compared with."""
        by_name = {each.work.name: each for each in self.timed}
        return [
            None if each.work.bare is None else each.of(by_name[each.work.bare])
            for each in self.timed
        ]


def run(
    store: Annotated[
        str,
        typer.Argument(metavar="STORE", help="A folder or URL. It need not be there yet."),
    ] = ".",
    *,
    mib: Annotated[
        int,
        typer.Option(
            "--size", metavar="MIB", min=1, max=1024 * 1024, help="How large a state to save."
        ),
    ] = 256,
    seconds: Annotated[
        int,
        typer.Option(
            metavar="S",
            min=1,
            help="About how long it may take. On a storage that is too slow for that, the state is "
            "made smaller.",
        ),
    ] = 60,
    as_json: AsJson = False,
) -> int:
    """Saves, loads and verifies a state of its own there, in turns with the same bytes written and
    read as they are and, on a disk and where torch is installed, with torch.save. All of them are
    durable. Whatever it wrote is removed.

    Up to five rounds are made; told is the middle one.
    """
    if is_memory(store):
        raise MisuseError(f"bench measures folders and object stores, and {store} is neither")
    path = path_of(store)
    if path is not None:
        _check_room(nearest_folder(path), mib * _MIB)
    _check_memory(mib * _MIB)
    with status("preparing") as tell:
        result = _measured(store, mib * _MIB, seconds, tell)
    if as_json:
        put_json(_document(open_storage(store).url, result))
    else:
        _put(result, note=_note(path))
    return Exit.OK


def _measured(store: str, nbytes: int, seconds: int, tell: Callable[[str], None]) -> _Result:
    """A small state first, which loads all that has to be loaded, then larger ones, as long as
    a round of the next would leave time for two more."""
    begun = time.monotonic()
    with scratch(store, "bench") as own:
        wanted = min(nbytes, _PILOT_BYTES)
        works = works_of(own, wanted)
        timed_rounds(works.small, seconds=0)
        while True:
            tried = time.monotonic()
            timed_rounds(works.large, seconds=0, tell=tell)
            took, left = time.monotonic() - tried, seconds - (time.monotonic() - begun)
            if wanted == nbytes or 3 * _TIMES * took > left:
                break
            wanted = min(nbytes, _TIMES * wanted)
            works = works_of(own, wanted)
        timed = timed_rounds(works.large + works.small, seconds=left, tell=tell)
    return _Result(
        size_bytes=works.size_bytes,
        rounds=len(timed[0].seconds),
        seconds=time.monotonic() - begun,
        timed=timed,
    )


def _check_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < _COPIES * nbytes:
        raise NoSpaceError(
            f"{size(_COPIES * nbytes)} are needed and {size(free)} are free; give a smaller --size",
            path=str(folder),
        )


def _check_memory(nbytes: int) -> None:
    told = Path("/proc/meminfo")
    lines = told.read_text(encoding="ascii").splitlines() if told.exists() else []
    sizes = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    free = next((kib * 1024 for kib in sizes), None)
    if free is not None and free < _KEPT * nbytes:
        raise NoSpaceError(
            f"{size(_KEPT * nbytes)} of memory are needed and {size(free)} are free; give a "
            "smaller --size"
        )


def _note(path: Path | None) -> str:
    if path is None:
        return ""
    kind = filesystem(nearest_folder(path), Path("/proc/self/mountinfo"))
    return f"; {kind} is memory, where nothing is cold" if kind in MEMORY else ""


def _put(result: _Result, *, note: str) -> None:
    rows = [
        (
            each.work.name,
            *_told(each),
            "" if share is None else f"{share:.2f}",
        )
        for each, share in zip(result.timed, result.shares, strict=True)
    ]
    header = ("what", "speed", "time", "least", "most", "of bare")
    put_table(header, rows, right=header[1:])
    torch = "" if has_torch() else "; torch is not installed"
    put(
        f"{size(result.size_bytes)}, {counted(result.rounds, 'round')}, {result.seconds:.0f} s in "
        f"all; nothing was left there{clean(note)}{torch}"
    )


def _told(timed: Timed) -> tuple[str, ...]:
    return (
        "" if timed.work.nbytes is None else f"{size(timed.work.nbytes / timed.median_s)}/s",
        *(_time(each) for each in (timed.median_s, min(timed.seconds), max(timed.seconds))),
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _document(url: str, result: _Result) -> dict[str, Any]:
    return {
        "store": url,
        "size_bytes": result.size_bytes,
        "rounds": result.rounds,
        "seconds": result.seconds,
        "torch": has_torch(),
        "measured": [
            {
                "what": each.work.name,
                "nbytes": each.work.nbytes,
                "median_s": each.median_s,
                "least_s": min(each.seconds),
                "most_s": max(each.seconds),
                "of_bare": share,
            }
            for each, share in zip(result.timed, result.shares, strict=True)
        ],
    }
