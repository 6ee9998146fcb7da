"""Runs the documents: every ```python block of README.md and docs/ is a test.

The blocks of one document share one namespace and run in order, in an empty folder. A block is
left out only by a comment that says why: ``<!-- skip: next "needs four GPUs" -->``.
"""

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Iterable
from typing import Any

import hypothesis
from sybil import Document, Region, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Shells start what is in the background with Ctrl-C ignored, and so would be the programs that
# tests interrupt. A handler of our own is not inherited.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A store of torch's answers nobody while it waits for a DNS server, 5 seconds and then again, and
# ranks that are given two to show a sign of life would be taken for lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A machine that stands still for a moment is no slow example. What hypothesis chooses by itself,
# as it does where it sees that it runs for CI, stays.
_chosen = hypothesis.settings.get_profile(hypothesis.settings.get_current_profile_name())
hypothesis.settings.register_profile("unhurried", _chosen, deadline=None)
hypothesis.settings.load_profile("unhurried")

# Read by mypy, never run; and a program, which finds more modules than tests do.
collect_ignore = ["tests/typing", "tests/crash/short_campaigns.py"]

_skips = SkipParser()
_lookalike = re.compile(r"(?m)^[ \t>*+\d.)-]*(?:`{3,}|~{3,})(?!python$)[ \t{]*[pP][yY].*$")


def _skips_with_a_reason(document: Document) -> Iterable[Region]:
    for region in _skips(document):
        action, reason = region.parsed
        if action != "next" or not re.fullmatch(r'"[^"]+"', reason or ""):
            line = document.line_column(region.start)
            raise ValueError(f'{document.path}, {line}: write <!-- skip: next "the reason" -->')
        yield region


def _no_block_escapes(document: Document) -> Iterable[Region]:
    """Refuse fences that read as Python but are not spelt so: they would never run."""
    for found in _lookalike.finditer(document.text):
        line = document.line_column(found.start())
        raise ValueError(f"{document.path}, {line}: {found[0]!r} should be ```python")
    return ()


def _enter_empty_folder(namespace: dict[str, Any]) -> None:
    stack = contextlib.ExitStack()
    namespace["_leave"] = stack.close
    stack.callback(os.chdir, os.getcwd())  # noqa: PTH109 -- only to come back to
    os.chdir(stack.enter_context(tempfile.TemporaryDirectory()))


def _leave_folder(namespace: dict[str, Any]) -> None:
    namespace["_leave"]()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), _skips_with_a_reason, _no_block_escapes],
    patterns=["*.md"],
    setup=_enter_empty_folder,
    teardown=_leave_folder,
).pytest()
