"""How the examples print what they see."""

import sys


def show(what: str, result: str) -> None:
    say(f"  {what:<46} {result}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
