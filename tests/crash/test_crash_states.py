"""Whatever a crash leaves: what was promised is there, and nothing is a mixture.

The explorer is first shown to find bugs, on systems that are broken on purpose.
"""

import os
import random
import stat
from pathlib import Path

import pytest
from campaign import ENDLESS, FINITE, MOST_VIOLATIONS, ROOT, WORKLOADS, explore, observe, recorded
from explorer import BLOCK_BYTES, Disk
from recorder import RecordingSystem
from recovered import Recovered, visible

from holdfast.storage import LocalStorage

SEED = int(os.environ.get("HOLDFAST_CRASH_SEED", "1"))
BY_NAME = {workload.name: workload for workload in WORKLOADS}
STATES = dict.fromkeys(BY_NAME, 2200) | {"first save": 3000, "overwrite": 3000}


@pytest.fixture(scope="module")
def reports():
    return {
        name: explore(workload, states=STATES[name], seed=SEED)
        for name, workload in BY_NAME.items()
    }


@pytest.mark.parametrize("name", BY_NAME)
def test_what_was_promised_survives_every_crash(reports, name):
    assert reports[name].violations == []


def test_the_crashes_were_many(reports):
    assert sum(report.states for report in reports.values()) >= 20_000


def test_those_that_run_out_are_known(reports):
    """Else their states would be counted again in every batch of a campaign."""
    ran_out = {name for name, report in reports.items() if report.states < STATES[name]}
    assert ran_out == {workload.name for workload in FINITE}


def test_real_files_look_as_the_explorer_says(reports, tmp_path):
    images = [
        image
        for name in ("overwrite", "gc", "plain objects", "save after a kill")
        for image in reports[name].images
    ]
    assert len(images) >= 10
    for number, image in enumerate(images):
        base = tmp_path / str(number)
        materialise(image, base)
        expected = observe(Recovered(visible(image, ROOT)))
        assert observe(LocalStorage(base / ROOT)) == expected


def materialise(image, base: Path) -> None:
    for path, data in image.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_bytes(data)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_a_million_crashes_break_no_promise():
    wanted = int(os.environ.get("HOLDFAST_CRASH_STATES", "1000000"))
    reports = [explore(workload, states=wanted // 20, seed=SEED) for workload in FINITE]
    left = wanted - sum(report.states for report in reports)
    each = left // len(ENDLESS) + 1
    reports += [explore(workload, states=each, seed=SEED) for workload in ENDLESS]
    assert [problem for report in reports for problem in report.violations] == []
    states, looks = (sum(getattr(r, what) for r in reports) for what in ("states", "looks"))
    print(f"seed {SEED}: {states} crash states, {looks} of them visibly different, 0 violations")  # noqa: T201
    assert states >= wanted


def _is_folder(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


class WithoutFileSync(RecordingSystem):
    def sync(self, fd):
        if _is_folder(fd):
            super().sync(fd)


class WithoutFolderSync(RecordingSystem):
    def sync(self, fd):
        if not _is_folder(fd):
            super().sync(fd)


class WithLateShardSync(RecordingSystem):
    """Publishes the record before the shards, the only files of more than a block, are synced."""

    def sync(self, fd):
        if os.fstat(fd).st_size < 8 * BLOCK_BYTES or _is_folder(fd):
            super().sync(fd)


class WithUnsyncedNewFolders(RecordingSystem):
    """Syncs every folder but the ones that got a new folder."""

    def sync(self, fd):
        if not self.log or self.log[-1].kind != "mkdir":
            super().sync(fd)


class WithEarlyPublication(RecordingSystem):
    """Renames and links first, and syncs the file afterwards."""

    def __init__(self, base, **options):
        super().__init__(base, **options)
        self._late = []

    def sync(self, fd):
        if _is_folder(fd):
            super().sync(fd)
            while self._late:
                super().sync(self._late.pop())
        else:
            self._late.append(fd)


@pytest.mark.parametrize(
    "make",
    [
        WithoutFileSync,
        WithoutFolderSync,
        WithLateShardSync,
        WithUnsyncedNewFolders,
        WithEarlyPublication,
    ],
)
def test_the_explorer_finds_systems_that_lose_data(make):
    report = explore(BY_NAME["first save"], states=500, seed=SEED, make=make)
    assert report.violations


@pytest.mark.parametrize("make", [WithoutFileSync, WithoutFolderSync])
def test_the_explorer_finds_overwrites_that_lose_the_old_one(make):
    report = explore(BY_NAME["overwrite"], states=500, seed=SEED, make=make)
    assert report.violations


def test_every_violation_is_counted_and_the_first_are_told():
    report = explore(BY_NAME["first save"], states=500, seed=SEED, make=WithoutFileSync)
    assert MOST_VIOLATIONS == len(report.violations) < report.violated <= report.states


def test_a_journalled_disk_hides_what_a_weaker_one_shows():
    """The order in which names reach the disk is not relied on, so the model does not give it."""
    (log,) = recorded(BY_NAME["first save"])
    disk = Disk(log)
    looks = {False: set(), True: set()}
    for op in log.log:
        if op.kind not in {"begin", "promised", "start"}:
            disk.apply(op)
        for ordered, found in looks.items():
            for image in disk.images(random.Random(SEED), 200, ordered=ordered):
                found.add(frozenset(image))
    assert looks[True] < looks[False]
