"""What a disk may hold after a crash. Knows a log of operations; knows no checkpoints.

The model is weaker than every Linux filesystem we know, so what survives it survives those:

- An fsync of a file keeps its bytes and its size, but no name of it.
- Bytes written since then are kept in any subset of 512-byte blocks, also of one write; a block
  that was not kept is as before, or zeros. The size is any that the file had since then.
- A file that was truncated to nothing is as it may have been before, or has nothing that was
  written before.
- An fsync of a folder keeps its entries, but neither the folder's own name nor what they lead to.
- Of the entries changed since then each name is, independently, at any point of its own history.
  Only a rename never takes the old name away before the new one is there.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from recorder import Op, Recorded

BLOCK_BYTES = 512

Image = Mapping[str, bytes]
"""Every file that can be reached, by its path below the base."""


@dataclass(slots=True)
class _File:
    synced: bytes = b""
    size: int = 0
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    emptied: "list[_File]" = field(default_factory=list)
    """As it was before each time that it was truncated to nothing."""

    def change(self, op: Op) -> None:
        if op.kind == "size" and op.offset == 0 and self.size:
            self.emptied.append(_File(synced=self.synced, kept=self.kept, sizes=self.sizes))
            self.synced, self.size, self.kept, self.sizes = b"", 0, [], []
        elif op.kind == "size":
            self.size = op.offset
        else:
            self.size = max(self.size, op.offset + len(op.data))
            for start in range(0, len(op.data), BLOCK_BYTES):
                block = op.data[start : start + BLOCK_BYTES]
                self.kept.append((op.offset + start, block))
        if self.size not in self.sizes:
            self.sizes.append(self.size)

    def sync(self) -> None:
        self.synced = self.content((1 << len(self.kept)) - 1, self.size)
        self.kept, self.sizes, self.emptied = [], [self.size], []

    @property
    def states(self) -> int:
        return (len(self.sizes) << len(self.kept)) + sum(file.states for file in self.emptied)

    def state(self, index: int) -> bytes:
        for file in self.emptied:
            if index < file.states:
                return file.state(index)
            index -= file.states
        return self.content(index // len(self.sizes), self.sizes[index % len(self.sizes)])

    def content(self, mask: int, size: int) -> bytes:
        if not self.kept:
            return self.synced[:size].ljust(size, b"\0")
        data = bytearray(self.synced)
        for nth, (start, block) in enumerate(self.kept):
            if mask >> nth & 1:
                if len(data) < start:
                    data += bytes(start - len(data))
                data[start : start + len(block)] = block
        return bytes(data[:size]).ljust(size, b"\0")


Change = tuple[int, int | None, int]
"""An operation's number, what the name leads to after it, and which kind of change it was."""

_SET, _DROP, _MOVED_AWAY = range(3)


@dataclass(slots=True)
class _Name:
    """One name in a folder: what the disk has for certain, and what was done to it since."""

    synced: int | None = None
    changes: list[Change] = field(default_factory=list)
    leads_to: int | None = None

    def change(self, change: Change) -> None:
        self.changes.append(change)
        self.leads_to = change[1]

    def sync(self) -> None:
        self.synced, self.changes = self.leads_to, []


class Disk:
    """The disk as the log leaves it, and everything it may be after a crash."""

    def __init__(self, recorded: Recorded) -> None:
        self.base = recorded.base
        self.files = {
            node: _File(synced=data, size=len(data), sizes=[len(data)])
            for node, data in recorded.found_files.items()
        }
        self.folders: dict[int, dict[str, _Name]] = {
            node: {name: _Name(synced=to, leads_to=to) for name, to in names.items()}
            for node, names in recorded.found_entries.items()
        }
        self._number = 0

    def apply(self, op: Op) -> None:
        self._number += 1
        match op.kind:
            case "write" | "size":
                self.files[op.at].change(op)
            case "sync file":
                self.files[op.at].sync()
            case "sync folder":
                for name in self.folders[op.at].values():
                    name.sync()
            case "mkdir":
                self.folders[op.node] = {}
                self._change(op.at, op.name, op.node, _SET)
            case "create":
                self.files[op.node] = _File(sizes=[0])
                self._change(op.at, op.name, op.node, _SET)
            case "link":
                self._change(op.at, op.new, op.node, _SET)
            case "rename":
                self._change(op.at, op.new, op.node, _SET)
                self._change(op.at, op.name, None, _MOVED_AWAY)
            case "unlink" | "rmdir":
                self._change(op.at, op.name, None, _DROP)
            case _:
                raise ValueError(op.kind)

    def _change(self, folder: int, name: str, node: int | None, kind: int) -> None:
        self.folders[folder].setdefault(name, _Name()).change((self._number, node, kind))

    def images(self, rng: random.Random, most: int, *, ordered: bool = False) -> Iterator[Image]:
        """What may be found after a crash now: all of it if that is at most ``most``, else that
        many picked at random, the two ends among them. Not free of repetitions.

        With ``ordered`` a folder keeps a prefix of what was done in it, as journals do.
        """
        torn = [file for file in self.files.values() if file.states > 1]
        folders = [
            (folder, numbers)
            for folder, names in self.folders.items()
            if (numbers := sorted({n for name in names.values() for n, _, _ in name.changes}))
        ]
        names = [
            (folder, name)
            for folder, of_folder in self.folders.items()
            for name, state in of_folder.items()
            if state.changes
        ]
        counts = [file.states for file in torn]
        if ordered:
            counts += [len(numbers) + 1 for _, numbers in folders]
        else:
            counts += [len(self.folders[folder][name].changes) + 1 for folder, name in names]
        for choice in _choices(counts, rng, most):
            contents = {
                id(file): file.state(pick) for file, pick in zip(torn, choice, strict=False)
            }
            picks = choice[len(torn) :]
            entries = self._prefixes(folders, picks) if ordered else self._independent(names, picks)
            image: dict[str, bytes] = {}
            self._collect(self.base, "", entries, contents, image)
            yield image

    def _prefixes(
        self, folders: Sequence[tuple[int, list[int]]], picks: Sequence[int]
    ) -> dict[tuple[int, str], int | None]:
        entries = {}
        for (folder, numbers), pick in zip(folders, picks, strict=True):
            last = numbers[pick - 1] if pick else -1
            for name, state in self.folders[folder].items():
                if state.changes:
                    done = [to for number, to, _ in state.changes if number <= last]
                    entries[folder, name] = done[-1] if done else state.synced
        return entries

    def _independent(
        self, names: Sequence[tuple[int, str]], picks: Sequence[int]
    ) -> dict[tuple[int, str], int | None]:
        done = dict(zip(names, picks, strict=True))
        arrived = {
            (folder, number)
            for (folder, name), pick in done.items()
            for number, _, kind in self.folders[folder][name].changes[:pick]
            if kind == _SET
        }
        entries = {}
        for (folder, name), pick in done.items():
            state = self.folders[folder][name]
            at = pick
            while at and state.changes[at - 1][2] == _MOVED_AWAY:
                if (folder, state.changes[at - 1][0]) in arrived:
                    break
                at -= 1
            entries[folder, name] = state.changes[at - 1][1] if at else state.synced
        return entries

    def _collect(
        self,
        folder: int,
        path: str,
        entries: Mapping[tuple[int, str], int | None],
        contents: Mapping[int, bytes],
        image: dict[str, bytes],
    ) -> None:
        for name, state in self.folders[folder].items():
            to = entries.get((folder, name), state.synced)
            if to is None:
                continue
            if to in self.folders:
                self._collect(to, f"{path}{name}/", entries, contents, image)
            else:
                file = self.files[to]
                torn = contents.get(id(file))
                image[f"{path}{name}"] = file.synced if torn is None else torn


def _choices(counts: Sequence[int], rng: random.Random, most: int) -> Iterator[tuple[int, ...]]:
    total = 1
    for count in counts:
        total *= count
    if total <= most:
        yield from product(*map(range, counts))
        return
    yield tuple(0 for _ in counts)
    yield tuple(count - 1 for count in counts)
    for _ in range(most - 2):
        yield tuple(_pick(count, rng) for count in counts)


def _pick(count: int, rng: random.Random) -> int:
    """Anything, but nothing and all of it more often than the rest."""
    lot = rng.random()
    if lot < 0.25:
        return 0
    return count - 1 if lot < 0.5 else rng.randrange(count)
