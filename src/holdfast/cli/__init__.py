"""The command line, ``holdfast``. One file per verb; a verb's file is loaded when it runs.

Importing this room loads nothing: typer and rich come with the extra ``holdfast[cli]``.
"""

import importlib.util
import io
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line that the process was started with, and end the process.

    Exit codes are those of ``docs/cli.md``.
    """
    _open_streams()
    if any(importlib.util.find_spec(needed) is None for needed in ("typer", "rich")):
        sys.stderr.write('holdfast: the command line needs more: pip install "holdfast[cli]"\n')
        sys.exit(2)
    try:
        from holdfast.cli._app import run  # noqa: PLC0415 -- typer is an optional dependency

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before any verb ran
        code = 130
    sys.exit(code)


def _open_streams() -> None:
    """Have all three standard streams, also where a shell has closed some (``2>&-``): what they
    are for goes nowhere then, and no file that is opened later gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the least number that is free, which is this one
        if getattr(sys, name) is None:
            raw = io.FileIO(number, "r" if name == "stdin" else "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8"))
