"""What ``import holdfast`` adds to the start of an interpreter, in fresh processes."""

import subprocess
import sys

from _measure import FULL, Extent, Measurement, at_most, interleaved

TARGET_S = 0.15


def measure(extent: Extent = FULL) -> list[Measurement]:
    bare()
    with_holdfast()
    seconds = interleaved({"bare": bare, "with": with_holdfast}, repeats=extent.repeats(20))
    added = [with_it - bare for with_it, bare in zip(seconds["with"], seconds["bare"], strict=True)]
    return [at_most("import holdfast, over a bare interpreter", added, "s", TARGET_S)]


def bare() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def with_holdfast() -> None:
    subprocess.run([sys.executable, "-c", "import holdfast"], check=True)
