"""Processes that are killed or stopped in the middle of it, for real; and disks without locks."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from campaign import observe, state_of

from holdfast.catalog import Catalog
from holdfast.errors import StorageError
from holdfast.storage import LocalStorage
from holdfast.storage._system import System

_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
from campaign import state_of
from holdfast.catalog import Catalog

catalog = Catalog(sys.argv[1])
print("ready", flush=True)
for number in range(int(sys.argv[3]), 10**9):
    catalog.write(f"step_{number}", state_of(number))
    print(f"saved step_{number} {number}", flush=True)
    catalog.write("latest", state_of(number), overwrite=True)
    print(f"saved latest {number}", flush=True)
"""


def _kill_again_and_again(root: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    promised: dict[str, int] = {}
    for kill in range(kills):
        here = str(Path(__file__).parent)
        command = [sys.executable, "-c", _PROGRAM, str(root), here, str(kill * 1000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.15))
            child.kill()
            for line in child.stdout:
                _, prefix, value = line.split()
                promised[prefix] = int(value)
        found = observe(LocalStorage(root))
        for prefix, value in promised.items():
            kept = found.pop(f"checkpoint {prefix}")
            if prefix == "latest" and kept.startswith("value "):
                assert int(kept.split()[1]) >= value  # a later one may be there, if not promised
            else:
                assert kept == f"value {value}"
        for subject, value in found.items():
            assert value.startswith("value "), subject
            assert subject in {f"checkpoint step_{value.split()[1]}", "checkpoint latest"}


def test_a_killed_process_leaves_all_it_promised(tmp_path):
    _kill_again_and_again(tmp_path / "runs", kills=4, seed=1)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_so_do_fifty(tmp_path):
    seed = int(os.environ.get("HOLDFAST_CRASH_SEED", "2"))
    _kill_again_and_again(tmp_path / "runs", kills=50, seed=seed)


def test_who_is_stopped_while_it_names_an_object_makes_others_wait(tmp_path):
    naming, go_on, deleted = threading.Event(), threading.Event(), threading.Event()

    class Stopped(System):
        def rename(self, old, new, folder):
            naming.set()
            assert go_on.wait(30)
            super().rename(old, new, folder)

    LocalStorage(tmp_path).create("a", b"old")
    stopped = LocalStorage(tmp_path, system=Stopped())
    version = stopped.stat("a").version

    def delete() -> None:
        LocalStorage(tmp_path).delete("a")
        deleted.set()

    threads = [
        threading.Thread(target=lambda: stopped.replace("a", b"new", version)),
        threading.Thread(target=delete),
    ]
    threads[0].start()
    assert naming.wait(30)
    threads[1].start()
    waited = not deleted.wait(0.2)
    go_on.set()
    for thread in threads:
        thread.join()
    assert waited
    assert [*LocalStorage(tmp_path).list()] == []


class WithoutLocks(System):
    def locked(self, fd):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_disk_without_locks_takes_saves_but_replaces_nothing(tmp_path):
    storage = LocalStorage(tmp_path, system=WithoutLocks())
    catalog = Catalog(storage)
    catalog.write("step_1", state_of(1))
    catalog.write("step_2", state_of(2))
    for act in (
        lambda: catalog.write("step_1", state_of(3), overwrite=True),
        lambda: catalog.delete("step_1"),
        lambda: storage.replace(
            "step_1/metadata.json", b"", storage.stat("step_1/metadata.json").version
        ),
    ):
        with pytest.raises(StorageError, match="no locks"):
            act()
    assert observe(storage) == {"checkpoint step_1": "value 1", "checkpoint step_2": "value 2"}
    assert [path.name for path in tmp_path.rglob(".holdfast-*")] == []
