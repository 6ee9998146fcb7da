"""``holdfast bench``: what it measures is real, its time and size are bounded, nothing is left."""

import functools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_tools import COMMAND, holdfast, refused
from convert_tools import with_torch

from holdfast.catalog import Catalog
from holdfast.cli._bench_disk import bare_read, bare_write
from holdfast.cli._bench_rounds import Timed, Work, timed_rounds
from holdfast.cli._bench_work import works_of
from holdfast.cli._scratch import scratch

OURS = {
    "bare write",
    "save",
    "bare read, cold",
    "load, cold",
    "verify, cold",
    "load, warm",
    "save, 2,000 tensors of 1 KiB",
    "load, 2,000 tensors of 1 KiB",
}
TORCHS = {
    "torch.save, fsync",
    "torch.load, cold",
    "torch.load, warm",
    "torch.save, fsync, 2,000 tensors of 1 KiB",
    "torch.load, 2,000 tensors of 1 KiB",
}


@pytest.mark.parametrize("torch", [False, True])
def test_it_measures_in_a_folder_and_leaves_nothing(tmp_path, torch):
    ran = (with_torch if torch else holdfast)(
        *("bench", tmp_path / "new" / "store", "--size", "1", "--seconds", "1", "--json")
    )
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["store"] == (tmp_path / "new" / "store").as_uri()
    assert told["torch"] is torch
    assert told["size_bytes"] == 2**20
    assert 1 <= told["rounds"] <= 5
    measured = {each["what"]: each for each in told["measured"]}
    assert measured.keys() == (OURS | TORCHS if torch else OURS)
    for each in measured.values():
        assert 0 < each["least_s"] <= each["median_s"] <= each["most_s"] < told["seconds"]
    compared = {name for name, each in measured.items() if each["of_bare"] is not None}
    assert compared & OURS == {"save", "load, cold", "verify, cold"}
    share = measured["bare write"]["median_s"] / measured["save"]["median_s"]
    assert measured["save"]["of_bare"] == pytest.approx(share)
    assert [*tmp_path.iterdir()] == []


def test_people_get_a_table(own_store):
    before = {path.name for path in own_store.iterdir()}
    ran = holdfast("bench", own_store, "--size", "1", "--seconds", "1")
    head, *rows, last = ran.out.splitlines()
    assert head.split() == ["what", "speed", "time", "least", "most", "of", "bare"]
    assert len(rows) == len(OURS)
    assert last.startswith("1.0 MiB, ")
    assert last.endswith("nothing was left there; torch is not installed")
    assert {path.name for path in own_store.iterdir()} == before


def test_on_an_object_store(bucket, monkeypatch):
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    told = holdfast(
        *["bench", "s3://bucket/bench", "--size", "1", "--seconds", "1", "--json"], env=bucket
    ).json
    names = [each["what"] for each in told["measured"]]
    assert names[:5] == ["bare write", "save", "bare read", "load", "verify"]
    assert [*Catalog("s3://bucket/bench").storage.list()] == []
    away = bucket | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    refused("bench", "s3://bucket/bench", "--size", 1, code=5, saying="holdfast: ", env=away)


def test_what_cannot_be_measured_is_one_line(tmp_path):
    refused("bench", tmp_path, "--size", "1048576", code=5, saying="give a smaller --size")
    refused("bench", tmp_path, "--size", "0", code=2, saying="--size")
    for memory in ("memory://", "MEMORY://", "memory://a"):
        said = refused("bench", memory, code=2, saying="bench measures folders and object stores")
        assert said.err.endswith(f"and {memory} is neither\n")
    refused("bench", "ftp://host/x", code=2, saying="no storage is known for ftp://")
    (tmp_path / "closed").mkdir(mode=0o500)
    refused(
        *("bench", tmp_path / "closed", "--size", "1"),
        code=5,
        saying="permission denied",
        powerless=True,
    )


@pytest.mark.parametrize("nbytes", [1, 4096, 2**20, 4 * 2**20, 17 * 2**20 + 5])
def test_the_bare_disk_moves_what_is_counted(tmp_path, nbytes):
    """By what the process asked the system for: direct I/O moves whole pages, and no more."""
    pages = -(-nbytes // 4096) * 4096
    path = tmp_path / "bare"
    path.touch()
    os.truncate(path, nbytes + 8 * 2**20)  # a longer one, to be replaced
    before = moved()
    bare_write(path, nbytes)
    between = moved()
    bare_read(path, nbytes)
    after = moved()
    assert path.stat().st_size == pages
    slack = 2**18  # for reading the counters, and for other threads
    assert pages <= between["wchar"] - before["wchar"] <= pages + slack
    assert pages <= after["rchar"] - between["rchar"] <= pages + slack
    if nbytes > 2**16:
        assert len({*path.read_bytes()}) > 200


def test_a_bare_file_that_is_too_short_is_an_error(tmp_path):
    bare_write(tmp_path / "bare", 5 * 2**20)
    with pytest.raises(OSError, match="less than a block"):
        bare_read(tmp_path / "bare", 6 * 2**20)


def test_a_warm_load_has_its_own_files_in_the_cache_and_no_others(tmp_path):
    """By what is read before it: with another's files there, its own may have to go."""
    nbytes = 8 * 2**20
    with scratch(str(tmp_path), "bench") as own:
        saving, _, warm = works_of(own, nbytes).large
        for work in saving:
            work.call()
        for work in warm:
            before = moved()["rchar"]
            work.before()
            assert nbytes <= moved()["rchar"] - before <= nbytes + 2**18, work.name


def moved():
    """Bytes that this process has read and written so far."""
    with Path("/proc/self/io").open(encoding="ascii") as file:
        return {name: int(value) for name, value in (line.split(": ") for line in file)}


def test_ctrl_c_leaves_nothing(tmp_path):
    with subprocess.Popen(
        [*COMMAND, "bench", tmp_path, "--size", "64", "--seconds", "600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not [*tmp_path.glob("*/large")] and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "holdfast: interrupted\n")
    assert [*tmp_path.iterdir()] == []


class Clock:
    """Each piece of work takes the seconds it says."""

    def __init__(self):
        self.now, self.done = 0.0, []

    def __call__(self):
        return self.now

    def take(self, seconds, name):
        self.now += seconds
        self.done.append(name)


def test_shares_of_the_bare_speed_agree_with_the_medians():
    ours, bare = Work(name="save", call=list), Work(name="bare write", call=list)
    save = Timed(work=ours, seconds=(2.0, 3.0, 9.0))
    assert save.of(Timed(work=bare, seconds=(3.0, 1.0, 1.0))) == 1.0 / 3.0


def test_rounds_end_in_time_and_take_turns():
    clock = Clock()

    def work(name, seconds):
        before = functools.partial(clock.take, 0.5, "before")
        return Work(name=name, call=functools.partial(clock.take, seconds, name), before=before)

    groups = [[work("a", 1.0), work("b", 2.0)], [work("c", 3.0)]]
    timed = timed_rounds(groups, seconds=23.0, clock=clock)
    # A round takes 7.5 s: three of them, and a fourth would end after 30.
    assert clock.now == 22.5
    assert [each.seconds for each in timed] == [(1.0,) * 3, (2.0,) * 3, (3.0,) * 3]
    assert [name for name in clock.done if name != "before"] == [*"abc", *"bac", *"abc"]
    assert timed[0].of(timed[1]) == 2.0
    assert len(timed_rounds(groups, seconds=0.0, clock=clock)[0].seconds) == 1
    assert len(timed_rounds(groups, seconds=1e9, clock=clock)[0].seconds) == 5
