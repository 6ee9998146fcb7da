"""Whether somebody agrees. Knows terminals, not what is at stake."""

import sys

import typer

from holdfast.cli._exits import MisuseError


def agreed(question: str, *, yes: bool) -> bool:
    """Whether it was agreed to beforehand, or is when asked. Where nobody can answer, it is not."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise MisuseError(f"nobody is there to answer, so give --yes: {question}")
    return typer.confirm(question, err=True)
