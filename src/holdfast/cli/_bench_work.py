"""What ``holdfast bench`` times: saves and loads of a state, the bare storage, and torch.save.

With torch they are ``holdfast.save`` and ``holdfast.load`` of tensors, without it a catalog's of
arrays. A load fills a state that is there, as that of a training that goes on does.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

import holdfast
from holdfast.catalog import Catalog
from holdfast.cli._bench_disk import bare_read, bare_write, drop_from_cache, take_into_cache
from holdfast.cli._bench_rounds import Work
from holdfast.cli._doctor_storage import write_object
from holdfast.cli._scratch import Scratch
from holdfast.contracts import ReadRange, Storage
from holdfast.errors import CorruptedError

SMALL: Final = "2,000 tensors of 1 KiB"
_SMALL_TENSORS: Final = 2_000
_SMALL_ELEMENTS: Final = 256
_LARGE_ELEMENTS: Final = 4 * 1024 * 1024
_LEAST_TENSORS: Final = 4
_BARE_WRITE: Final = "bare write"
_BARE_READ: Final = "bare read"
_BARE_KEY: Final = "bare"

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A state, another of the same shape to load into, and the name it is saved by."""

    name: str
    state: State
    into: State

    @property
    def nbytes(self) -> int:
        return sum(int(each.nbytes) for each in self.state.values())


class _Saver(Protocol):
    """One way to keep a state. ``saves`` and ``loads`` are what it is called, ``ending`` is what
    follows a state's name in that of the file or folder it is kept in."""

    saves: str
    loads: str
    ending: str

    def save(self, subject: Subject) -> None: ...
    def load(self, subject: Subject) -> None: ...
    def remove(self, subject: Subject) -> None: ...


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """All there is to be timed, in groups, in the order that it is done in: of a state of so many
    bytes, and of one of many small tensors."""

    size_bytes: int
    large: list[list[Work]]
    small: list[list[Work]]


def works_of(own: Scratch, nbytes: int) -> Works:
    """What there is to be timed with a state of about ``nbytes``.

    On a disk, what is read is first dropped from the page cache, and then once more taken into it.
    An object store has no such cache, and no torch.save.
    """
    torch = importlib.import_module("torch") if has_torch() else None
    each = min(_LARGE_ELEMENTS, max(1, nbytes // 4 // _LEAST_TENSORS))
    large = _subject(torch, "large", max(1, nbytes // 4 // each), each)
    small = _subject(torch, "small", _SMALL_TENSORS, _SMALL_ELEMENTS)
    catalog = Catalog(own.url)
    savers: list[_Saver] = [_OfTensors(own.url, catalog) if torch else _OfArrays(catalog)]
    if torch is not None and own.folder is not None:
        savers.append(_TorchSave(torch, own.folder))
    cold = partial(drop_from_cache, own.folder) if own.folder is not None else _nothing
    write, read = _bare(own, large.nbytes)
    is_cold = "" if own.folder is None else ", cold"

    def reading(name: str, call: Callable[[], object]) -> Work:
        bare = f"{_BARE_READ}{is_cold}"
        return Work(name=name, call=call, nbytes=large.nbytes, before=cold, bare=bare)

    def warm_works(folder: Path) -> Iterator[Work]:
        for saver in savers:
            yield Work(
                name=f"{saver.loads}, warm",
                call=partial(saver.load, large),
                nbytes=large.nbytes,
                before=partial(take_into_cache, folder / f"{large.name}{saver.ending}"),
            )

    large_works = [
        [
            Work(name=_BARE_WRITE, call=write, nbytes=large.nbytes),
            *(_saving(saver, large, saver.saves, large.nbytes, _BARE_WRITE) for saver in savers),
        ],
        [
            Work(name=f"{_BARE_READ}{is_cold}", call=read, nbytes=large.nbytes, before=cold),
            *(reading(f"{saver.loads}{is_cold}", partial(saver.load, large)) for saver in savers),
            reading(f"verify{is_cold}", partial(_verified, catalog, large)),
        ],
        *([[*warm_works(own.folder)]] if own.folder is not None else []),
    ]
    small_works = [
        [_saving(saver, small, f"{saver.saves}, {SMALL}") for saver in savers],
        [Work(name=f"{s.loads}, {SMALL}", call=partial(s.load, small)) for s in savers],
    ]
    return Works(size_bytes=large.nbytes, large=large_works, small=small_works)


def _nothing() -> None:
    pass


def _saving(
    saver: _Saver, subject: Subject, name: str, nbytes: int | None = None, bare: str | None = None
) -> Work:
    return Work(
        name=name,
        call=partial(saver.save, subject),
        nbytes=nbytes,
        before=partial(saver.remove, subject),
        bare=bare,
    )


def _subject(torch: Any, name: str, tensors: int, elements: int) -> Subject:
    """Bits that nothing can compress, as float32; those of a state are never looked at as such."""

    def made(seed: int) -> Iterator[tuple[str, Any]]:
        random = np.random.default_rng(seed)
        for nth in range(tensors):
            bits = random.integers(0, 2**31, elements, dtype=np.int32)
            yield f"tensor.{nth}", bits if torch is None else torch.from_numpy(bits)

    return Subject(name=name, state=dict(made(1)), into=dict(made(2)))


@dataclass(slots=True)
class _OfTensors:
    """holdfast's own, of torch's tensors."""

    url: str
    catalog: Catalog
    saves: str = "save"
    loads: str = "load"
    ending: str = ""

    def save(self, subject: Subject) -> None:
        holdfast.save(dict(subject.state), f"{self.url}/{subject.name}")

    def load(self, subject: Subject) -> None:
        holdfast.load(f"{self.url}/{subject.name}", into=dict(subject.into))

    def remove(self, subject: Subject) -> None:
        self.catalog.rollback(subject.name)


@dataclass(slots=True)
class _OfArrays:
    """holdfast's own, without torch."""

    catalog: Catalog
    saves: str = "save"
    loads: str = "load"
    ending: str = ""

    def save(self, subject: Subject) -> None:
        self.catalog.write(subject.name, dict(subject.state))

    def load(self, subject: Subject) -> None:
        self.catalog.open(subject.name).read_into(dict(subject.into))

    def remove(self, subject: Subject) -> None:
        self.catalog.rollback(subject.name)


@dataclass(slots=True)
class _TorchSave:
    """``torch.save`` into a file that is synced, and ``torch.load`` with the copy into the state
    that ``load_state_dict`` makes."""

    torch: Any
    folder: Path
    saves: str = "torch.save, fsync"
    loads: str = "torch.load"
    ending: str = ".pt"

    def save(self, subject: Subject) -> None:
        with self._path(subject).open("wb") as file:
            self.torch.save(dict(subject.state), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, subject: Subject) -> None:
        found = self.torch.load(self._path(subject), weights_only=True)
        for name, tensor in subject.into.items():
            tensor.copy_(found[name])

    def remove(self, subject: Subject) -> None:
        self._path(subject).unlink(missing_ok=True)

    def _path(self, subject: Subject) -> Path:
        return self.folder / f"{subject.name}{self.ending}"


def _verified(catalog: Catalog, subject: Subject) -> None:
    report = catalog.verify(subject.name)
    if not report.is_intact:
        raise CorruptedError(f"this storage does not keep what it is given: {report.damage[0]}")


def _bare(own: Scratch, nbytes: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """As many bytes written and read, without anything that makes a checkpoint of them."""
    if own.folder is not None:
        path = own.folder / _BARE_KEY
        return partial(bare_write, path, nbytes), partial(bare_read, path, nbytes)
    return partial(_write_object, own.storage, nbytes), partial(_read_object, own.storage, nbytes)


def _write_object(storage: Storage, nbytes: int) -> None:
    storage.delete(_BARE_KEY)
    write_object(storage, _BARE_KEY, nbytes)


def _read_object(storage: Storage, nbytes: int) -> None:
    into = memoryview(bytearray(nbytes))
    storage.read_into(_BARE_KEY, [ReadRange(start=0, into=into)])
