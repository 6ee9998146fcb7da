"""Which code is run: what stands in its files, and of which commit it is. Knows git, and nothing
else."""

import contextlib
import functools
import hashlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

# What a batch depends on. Results and documents may change, and be committed, while a run goes on.
WATCHED = (
    *("src", "tests", "proof", "conftest.py", "pyproject.toml", "constraints.txt"),
    ":!proof/results",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """``key`` is the same exactly if the code is; ``shown`` is for people."""

    key: str
    shown: str


def code_of(root: Path) -> Code:
    """The code in ``root`` as it is now. Where there is no git, no run goes on with another's
    batches: the key is the process's."""
    commit = _git(root, "rev-parse", "HEAD")
    files = _git(root, "ls-files", "-z", "-co", "--exclude-standard", "--", *WATCHED)
    if commit is None or files is None:
        return Code(key=_this_process(), shown="unknown: there is no git here")
    digest = hashlib.sha256()
    for name in sorted({*filter(None, files.split(b"\0"))}):
        with contextlib.suppress(FileNotFoundError):  # deleted, or a moment ago
            data = (root / os.fsdecode(name)).read_bytes()
            digest.update(name + b"\0" + hashlib.sha256(data).digest())
    key = digest.hexdigest()
    short = commit.decode()[:12]
    is_committed = not _git(root, "status", "--porcelain", "--", *WATCHED)
    return Code(key=key, shown=short if is_committed else f"{short} with changes {key[:12]}")


@functools.cache
def _this_process() -> str:
    return f"no git, {os.getpid()} at {time.time_ns()}"


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=60
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
