"""The command line, ``holdfast``. One file per verb; a verb's file is loaded when it runs.

Importing this room loads nothing: typer and rich come with the extra ``holdfast[cli]``.
"""

import importlib.util
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line that the process was started with, and end the process.

    Exit codes are those of ``docs/cli.md``.
    """
    if any(importlib.util.find_spec(needed) is None for needed in ("typer", "rich")):
        sys.stderr.write('holdfast: the command line needs more: pip install "holdfast[cli]"\n')
        sys.exit(2)
    try:
        from holdfast.cli._app import run  # noqa: PLC0415 -- typer is an optional dependency

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before any verb ran
        code = 130
    sys.exit(code)
