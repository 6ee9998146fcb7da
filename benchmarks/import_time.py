"""What ``import holdfast`` adds to the start of an interpreter, in fresh processes."""

import subprocess
import sys

from _measure import Measurement, interleaved, median, spread

TARGET_S = 0.15


def measure() -> list[Measurement]:
    bare()
    with_holdfast()
    seconds = interleaved({"bare": bare, "with": with_holdfast}, repeats=20)
    added = [with_it - bare for with_it, bare in zip(seconds["with"], seconds["bare"], strict=True)]
    return [
        Measurement(
            name="import holdfast, over a bare interpreter",
            value=median(added),
            unit="s",
            target=f"<= {TARGET_S} s",
            met=median(added) <= TARGET_S,
            spread=spread(added),
        )
    ]


def bare() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def with_holdfast() -> None:
    subprocess.run([sys.executable, "-c", "import holdfast"], check=True)
