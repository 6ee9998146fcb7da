"""Which code is run: the commit, and what differs from it. Knows git, and nothing else."""

import hashlib
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

# What a batch depends on. Results and documents may change while a run goes on.
WATCHED = ("src", "tests", "proof", ":!proof/results", "pyproject.toml", "constraints.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """``key`` is the same exactly if the code is; ``shown`` is for people."""

    key: str
    shown: str


def code_of(root: Path) -> Code:
    """The code in ``root`` as it is now. Where there is no git, no run goes on with another's
    batches: the key is the moment's."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return Code(key=f"no git, {time.time_ns()}", shown="unknown: there is no git here")
    short = commit.decode().strip()
    changes = _git(root, "diff", "--binary", "HEAD", "--", *WATCHED) or b""
    unknown = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *WATCHED) or b""
    if not changes and not unknown:
        return Code(key=short, shown=short[:12])
    digest = hashlib.sha256(changes)
    for name in sorted(filter(None, unknown.split(b"\0"))):
        digest.update(name + b"\0")
        digest.update((root / name.decode()).read_bytes())
    mark = digest.hexdigest()[:12]
    return Code(key=f"{short}+{mark}", shown=f"{short[:12]} with changes {mark}")


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=60
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
