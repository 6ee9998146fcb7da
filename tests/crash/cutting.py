"""Cuts the power of a real disk at every kind of moment of a catalog's life, and judges what is
left. Knows what a catalog promises; the disk is ``mounts``'s.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from campaign import observe, state_of
from mounts import Ext4, cut_power

from holdfast.catalog import Catalog
from holdfast.contracts import Storage
from holdfast.errors import CheckpointError
from holdfast.storage import LocalStorage
from holdfast.storage._system import System

MIB = 1024 * 1024
JOURNALS = ("ordered", "writeback", "journal")
"""How ext4 treats data: its three modes."""


class CutSystem(System):
    """Cuts the power before one of the calls that change the disk. What the process does after
    that fails, as nothing a dead machine does reaches a disk."""

    def __init__(self, path: Path, call: int) -> None:
        self._path = path
        self._cut_at = call
        self._calls = itertools.count(1)  # several threads take the next
        self.is_cut = False

    def _tick(self) -> None:
        if next(self._calls) == self._cut_at:
            self.is_cut = True  # before the cut: another thread may fail of it at once
            cut_power(self._path)

    def create_file(self, name, folder, *, direct=False):
        self._tick()
        return super().create_file(name, folder, direct=direct)

    def write(self, fd, data, offset):
        self._tick()
        return super().write(fd, data, offset)

    def sync(self, fd):
        self._tick()
        super().sync(fd)

    def rename(self, old, new, folder):
        self._tick()
        super().rename(old, new, folder)

    def link(self, old, new, folder):
        self._tick()
        super().link(old, new, folder)

    def unlink(self, name, folder):
        self._tick()
        super().unlink(name, folder)


CALLS_OF_A_SAVE = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """How many acts were promised something, how many were broken off by their cut, and every
    promise that was not kept."""

    promised: int
    broken: int
    violations: list[str]


def cut_again_and_again(
    folder: Path, cuts: int, seed: int, make: Callable[[Storage], Catalog] = Catalog
) -> Cuts:
    """Every save, overwrite, delete and gc ends with a cut: during it, or just after. ``make`` is
    who does them."""
    rng = random.Random(seed)
    promised = broken = 0
    violations: list[str] = []
    disk = Ext4(folder, 512 * MIB)
    allowed: dict[str, set[object]] = {}
    for cut in range(cuts):
        options = f"loop,data={rng.choice(JOURNALS)}"
        with disk.mounted(options) as path:
            found = observe(LocalStorage(path / "runs"))
            violations += _broken(found, allowed, f"seed {seed}, after cut {cut}")
            allowed = {subject: {value} for subject, value in found.items()}
            system = CutSystem(path, rng.randrange(1, CALLS_OF_A_SAVE))
            catalog = make(LocalStorage(path / "runs", system=system))
            try:
                subject, value = _act(catalog, cut, rng, allowed)
            except CheckpointError as error:
                broken += system.is_cut
                if not system.is_cut:  # else one that refuses everything would break no promise
                    violations.append(f"seed {seed}, cut {cut}: with the power on, {error!r}")
            else:
                promised += 1
                allowed[subject] = {value}
            cut_power(path)
    with disk.mounted() as path:
        found = observe(LocalStorage(path / "runs"))
        violations += _broken(found, allowed, f"seed {seed}, after cut {cuts}")
    return Cuts(promised=promised, broken=broken, violations=violations)


def _broken(found: dict[str, object], allowed: dict[str, set[object]], when: str) -> list[str]:
    return [
        f"{when}: {subject} is {found.get(subject)}, not one of {allowed.get(subject)}"
        for subject in sorted(found.keys() | allowed.keys())
        if found.get(subject) not in allowed.get(subject, {None})
    ]


def _act(
    catalog: Catalog, cut: int, rng: random.Random, allowed: dict[str, set[object]]
) -> tuple[str, object]:
    """Do something, having said what may be found if it is cut short."""
    act = rng.choice(["save", "save", "overwrite", "delete", "delete", "gc"]) if allowed else "save"
    if act == "gc":
        catalog.gc()
        return "checkpoint none", None
    subject = f"checkpoint step_{cut}" if act == "save" else rng.choice([*allowed])
    value = None if act == "delete" else f"value {cut}"
    allowed.setdefault(subject, {None}).add(value)
    if value is None:
        catalog.delete(subject.split()[1])
    else:
        elements = rng.choice([2000, 2000, 700_000])
        catalog.write(subject.split()[1], state_of(cut, elements), overwrite=act != "save")
    return subject, value
