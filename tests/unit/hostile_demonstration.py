"""Run as a program: some hostile files, and readers that are broken in every way the campaign is to
see. Prints what it saw as JSON. A process of its own, as it forks."""

import json
import os
import pathlib
import pickle
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "proof"))

import _confined
import hostile_files
from _hostile import Case, catalog_cases


def plant(place):
    (place / "root").mkdir()
    (place / "root" / "a").write_bytes(b"harmless")


def unpickles(place):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(place / "outside" / "made"),)

    pickle.loads(pickle.dumps(Evil()))


def starts_a_program(place):
    os.system("true")


def writes_beside(place):
    pathlib.Path("relative").write_text("written where it stood")


def takes_memory(place):
    return len(bytearray(2**31))


def hangs(place):
    time.sleep(60)


BROKEN = {
    "takes it": lambda place: "what it holds",
    "another error": lambda place: {}["key"],
    "unpickles": unpickles,
    "starts a program": starts_a_program,
    "writes beside": writes_beside,
    "takes memory": takes_memory,
    "dies": lambda place: os.kill(os.getpid(), 11),
    "hangs": hangs,
}


def main():
    told = {}
    for name, read in BROKEN.items():
        if name == "hangs":  # the others end, however long that takes on a busy machine
            hostile_files.Limits = lambda **given: _confined.Limits(**given, wall_s=3.0)
        told[name] = hostile_files.tried(Case(name=name, plant=plant, read=read))[1]
    hostile_files.Limits = _confined.Limits
    small = [case for case in catalog_cases() if "MiB" not in case.name and ",000" not in case.name]
    chosen = random.Random(7).sample(small, 40)
    outcome = hostile_files.judged(chosen, is_ours=True)
    sys.stdout.write(
        json.dumps({"broken": told, "cases": outcome.cases, "violations": outcome.violations})
        + "\n"
    )


if __name__ == "__main__":
    main()
