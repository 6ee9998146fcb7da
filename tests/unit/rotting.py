"""Bytes that go wrong where they are stored, and a checkpoint of which every one of them must be
noticed, and located to file and tensor.

A ``Wound`` knows files as bytes and no format; ``Rotten`` is a checkpoint of holdfast's, in memory.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from catalog_tools import files_of, grid_parts, memory_of, put, write_parts

from holdfast.catalog import Catalog
from holdfast.errors import CorruptedError, IncompatibleVersionError
from holdfast.format import CompressionLevel
from holdfast.reshard import Grid
from holdfast.storage import MemoryStorage

RECORD = "a/metadata.json"
BLOCK = 4096
TRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Wound:
    """What is stored instead: the new contents of some files. ``words`` tell the case."""

    kind: str
    files: Mapping[str, bytes]
    words: str


Files = Mapping[str, bytes]


def flipped(files: Files, rng: random.Random) -> Wound:
    """A bit, anywhere."""
    key = _key(files, rng)
    offset = rng.randrange(len(files[key]))
    return flip(files, key, offset, rng.randrange(8))


def flip(files: Files, key: str, offset: int, bit: int) -> Wound:
    data = bytearray(files[key])
    data[offset] ^= 1 << bit
    words = f"bit {bit} of byte {offset} of {key} is flipped"
    return Wound(kind="flipped bits", files={key: bytes(data)}, words=words)


def zeroed(files: Files, rng: random.Random) -> Wound:
    """A block of zeros, where a sector was lost."""
    key = _key(files, rng)
    block = rng.randrange(_blocks(files[key]))
    data = bytearray(files[key])
    size = len(data[block * BLOCK : (block + 1) * BLOCK])
    data[block * BLOCK : block * BLOCK + size] = bytes(size)
    words = f"block {block} of {key} is zeros"
    return Wound(kind="zeroed blocks", files={key: bytes(data)}, words=words)


def exchanged(files: Files, rng: random.Random) -> Wound:
    """Two blocks in each other's place, of one file or of two."""
    one, other = _key(files, rng), _key(files, rng)
    first, second = rng.randrange(_blocks(files[one])), rng.randrange(_blocks(files[other]))
    changed = {key: bytearray(files[key]) for key in (one, other)}
    here = files[one][first * BLOCK : (first + 1) * BLOCK]
    there = files[other][second * BLOCK : (second + 1) * BLOCK]
    size = min(len(here), len(there))
    changed[one][first * BLOCK : first * BLOCK + size] = there[:size]
    changed[other][second * BLOCK : second * BLOCK + size] = here[:size]
    words = f"block {first} of {one} and block {second} of {other} are exchanged"
    kept = {key: bytes(data) for key, data in changed.items()}
    return Wound(kind="exchanged blocks", files=kept, words=words)


def cut(files: Files, rng: random.Random) -> Wound:
    """A file that is shorter than it was, or longer."""
    key = _key(files, rng)
    data = files[key]
    if rng.random() < 0.9:
        size = rng.choice([0, len(data) - 1, rng.randrange(len(data)), len(data) // BLOCK * BLOCK])
        words = f"{key} is cut off after {size} bytes"
        return Wound(kind="wrong lengths", files={key: data[:size]}, words=words)
    more = rng.choice([b"\0", bytes(BLOCK), data])
    words = f"{key} is {len(more)} bytes longer"
    return Wound(kind="wrong lengths", files={key: data + more}, words=words)


def misplaced(files: Files, rng: random.Random) -> Wound:
    """Two files under each other's name."""
    one, other = rng.sample(sorted(files), 2)
    words = f"{one} and {other} are exchanged"
    kept = {one: files[other], other: files[one]}
    return Wound(kind="exchanged files", files=kept, words=words)


def stale(files: Files, older: Files, rng: random.Random) -> Wound:
    """A file as an older save had left it: it was never overwritten, or put back."""
    key = rng.choice(sorted(files.keys() & older.keys()))
    words = f"{key} is that of an older save"
    return Wound(kind="stale files", files={key: older[key]}, words=words)


WAYS: tuple[tuple[float, Callable[[Files, random.Random], Wound]], ...] = (
    (0.55, flipped),
    (0.15, zeroed),
    (0.15, exchanged),
    (0.1, cut),
)


def wound(files: Files, rng: random.Random, older: Files | None = None) -> Wound:
    """One of all kinds; something is always different from what was written."""
    ways = [*WAYS]
    if len(files) > 1:
        ways.append((0.03, misplaced))
    if older is not None and files.keys() & older.keys():
        ways.append((0.02, lambda files, rng: stale(files, older, rng)))
    for _ in range(TRIES):
        (way,) = rng.choices([way for _, way in ways], [weight for weight, _ in ways])
        found = way(files, rng)
        if any(files[key] != data for key, data in found.files.items()):
            return found
    raise ValueError(f"{TRIES} wounds changed nothing: are all files alike?")


def _key(files: Files, rng: random.Random) -> str:
    """Long files more often, and short ones often enough."""
    keys = sorted(key for key, data in files.items() if data)
    return rng.choices(keys, [len(files[key]) + 2000 for key in keys])[0]


def _blocks(data: bytes) -> int:
    return -(-len(data) // BLOCK)


# --- a checkpoint of holdfast's


def state_of(seed: int, scale: int = 1) -> dict:
    """Several tensors, of which one is in three files."""
    rng = np.random.default_rng(seed)
    rows = Grid.of_cuts((30 * scale, 8), [[10 * scale, 20 * scale], []])
    ids = Grid.whole((40 * scale,))
    return {
        "w": (
            rng.integers(0, 4, (30 * scale, 8)).astype(np.float32),
            rows,
            grid_parts(rows, [0, 1, 2]),
        ),
        "ids": (rng.integers(0, 99, 40 * scale), ids, grid_parts(ids, [1])),
        "flag": (np.array(True), Grid((), ()), grid_parts(Grid((), ()), [2])),
    }


class Rotten:
    """A checkpoint ``a`` in memory that is harmed and healed, again and again."""

    def __init__(self, seed: int, level=CompressionLevel.NONE, scale: int = 1) -> None:
        state = state_of(seed, scale)
        storage, before = MemoryStorage(), MemoryStorage()
        write_parts(storage, "a", state, level=level, created="2026-01-31T12:00:00Z")
        self.files = files_of(storage)
        older = write_parts(before, "a", state_of(seed + 1, scale), level=level, attempt="b" * 16)
        self.older = files_of(before)  # of a save that this one has replaced
        self._older_places = {(f"a/{file.name}", None) for file in older.files}
        self.arrays = {name: array for name, (array, _, _) in state.items()}
        self.is_compressed = level is not CompressionLevel.NONE
        self.catalog = Catalog(storage)
        self._storage = storage
        opened = Catalog(memory_of(self.files)).open("a")
        self._places = {
            f"a/{file.name}": [
                (placed.offset, placed.offset + placed.stored_bytes, placed.entry.name)
                for placed in opened._reader.shard(index).layout.entries
            ]
            for index, file in enumerate(opened._found.record.files)
        }

    def harm(self, wound: Wound) -> str | None:
        """Put the wound there, look, and heal it. What is wrong with what was said of it, or
        ``None``; ``"nothing"`` if it is rightly taken for none, which only compressed bytes allow,
        and not what is around them: a few bits of a frame mean nothing to a decompressor, and
        digests are over what was compressed."""
        for key, data in wound.files.items():
            put(self._storage, key, data)
        try:
            return self._said(wound)
        finally:
            for key in wound.files:
                put(self._storage, key, self.files[key])

    def expected(self, wound: Wound) -> set[tuple[str, str | None]]:
        """Which files and tensors are to be named. Of a file whose frame is harmed, only that."""
        changed = [key for key, data in wound.files.items() if data != self.files[key]]
        if RECORD in changed:
            # One of an older save is whole, and names files that are gone.
            is_older = wound.files[RECORD] == self.older[RECORD]
            return self._older_places if is_older else {(RECORD, None)}
        return {(key, name) for key in changed for name in self._names(key, wound.files[key])}

    def _names(self, key: str, data: bytes) -> set[str | None]:
        if len(data) != len(self.files[key]):
            return {None}
        new, old = (np.frombuffer(each, np.uint8) for each in (data, self.files[key]))
        differs = new != old
        names: set[str | None] = set()
        for start, stop, name in self._places[key]:
            if differs[start:stop].any():
                names.add(name)
                differs[start:stop] = False
        return {None} if differs.any() else names

    def _said(self, wound: Wound) -> str | None:
        expected = self.expected(wound)
        report = self.catalog.verify("a")
        if report.is_intact:
            if not self.is_compressed or None in {name for _, name in expected}:
                return "verify found nothing"
            return self.misread() or "nothing"
        named = {(damage.file, damage.tensor) for damage in report.damage}
        if named != expected:
            return f"verify named {_shown(named)}, not {_shown(expected)}"
        try:
            self.catalog.read("a")
        except (CorruptedError, IncompatibleVersionError) as error:
            if not any(error.path == key and _names_tensor(error, name) for key, name in expected):
                return f"read named {error.path}, not {_shown(expected)}: {error}"
            return None
        return "read without an error"

    def misread(self) -> str | None:
        """Whether all that is read is what was written."""
        found = self.catalog.read("a")
        if found.keys() != self.arrays.keys():
            return f"read {sorted(found)}, not {sorted(self.arrays)}"
        wrong = [
            name
            for name, array in self.arrays.items()
            if found[name].dtype != array.dtype or found[name].tobytes() != array.tobytes()
        ]
        return f"read wrong values of {', '.join(wrong)}" if wrong else None


def _names_tensor(error: Exception, name: str | None) -> bool:
    return name is None or f"tensor {name!r} is damaged" in str(error)


def _shown(places: set[tuple[str, str | None]]) -> str:
    return ", ".join(sorted(f"{key} {name or '(whole)'}" for key, name in places)) or "nothing"
