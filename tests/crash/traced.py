"""A recorder's log from what strace saw of any process: what reached the disk below one folder,
also by libraries that know nothing of us. Knows system calls; knows no crashes.

Of marks it knows lines that the process writes to a pipe: ``begin 7`` and ``saved 7``.
"""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from recorder import Op

CALLS = (
    "open", "openat", "creat", "close", "dup", "dup2", "dup3", "fcntl", "lseek", "write",
    "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "truncate", "fallocate", "fsync",
    "fdatasync", "syncfs", "rename", "renameat", "renameat2", "link", "linkat", "unlink",
    "unlinkat", "mkdir", "mkdirat", "rmdir", "copy_file_range", "sendfile", "splice", "symlink",
    "symlinkat", "mmap", "chdir",
)  # fmt: skip


class Untraceable(Exception):  # noqa: N818 -- what it is
    """strace cannot be used here, or saw something that the log has no word for."""


def unavailable() -> str | None:
    """Why no program can be traced here, or ``None``."""
    strace = shutil.which("strace")
    if strace is None:
        return "looks at system calls by strace, which is not installed: install strace"
    done = subprocess.run(
        [strace, "-o", os.devnull, "-e", "trace=none", "true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        return f"looks at system calls by strace, which may not trace here: {done.stderr.strip()}"
    return None


@dataclass(slots=True)
class _Open:
    """What a descriptor stands for."""

    node: int
    offset: int = 0
    appends: bool = False


@dataclass(slots=True)
class Traced:
    """As much of a ``RecordingSystem`` as a ``Disk`` needs: what was found, and the log since."""

    base: int = 0
    found_files: dict[int, bytes] = field(default_factory=dict)
    found_entries: dict[int, dict[str, int]] = field(default_factory=dict)
    log: list[Op] = field(default_factory=list)


@contextlib.contextmanager
def attached(pid: int, output: Path, *options: str) -> Iterator[None]:
    """strace on a process that is already there, until that ends."""
    command = ["strace", "-f", "-y", "-xx", "-s", str(1 << 24), "-o", str(output), *options]
    with subprocess.Popen(
        [*command, "-p", str(pid)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as strace:
        try:
            while not _is_traced(pid):
                if strace.poll() is not None:
                    raise Untraceable(strace.stderr.read() if strace.stderr else "strace ended")
                time.sleep(0.001)
            yield
            strace.wait(60)
        finally:
            strace.kill()


def _is_traced(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("TracerPid:"):
            return line.split()[1] != "0"
    return False


class Trace:
    """Snapshots ``base``, and reads what strace said since into a log."""

    def __init__(self, base: Path) -> None:
        self._base = str(base.resolve())
        self._nodes = 0
        self._sizes: dict[int, int] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._open: dict[str, _Open] = {}
        self.result = Traced()
        self.result.base = self._adopt(self._base)
        self.result.found_entries = {node: dict(names) for node, names in self._entries.items()}

    def read(self, output: Path) -> Traced:
        with output.open(encoding="ascii") as lines:
            for name, arguments, answer in _calls(lines):
                if not answer.startswith(("-1 ", "?")):
                    self._take(name, arguments, answer)
        return self.result

    def _take(  # noqa: C901, PLR0912, PLR0915 -- a list: what every call does
        self, name: str, arguments: list[str], answer: str
    ) -> None:
        match name:
            case "open" | "creat":
                flags = "O_CREAT|O_TRUNC" if name == "creat" else arguments[1]
                self._opened(self._path("AT_FDCWD", arguments[0]), flags, answer)
            case "openat":
                self._opened(self._path(arguments[0], arguments[1]), arguments[2], answer)
            case "close":
                self._open.pop(_number(arguments[0]), None)
            case "dup" | "dup2" | "dup3":
                self._duplicate(arguments[0], answer)
            case "fcntl":
                if arguments[1].startswith("F_DUPFD"):
                    self._duplicate(arguments[0], answer)
            case "lseek":
                if (file := self._file(arguments[0])) is not None:
                    file.offset = int(answer)
            case "write" | "writev":
                self._written(arguments[0], _data(arguments[1])[: int(answer)])
            case "pwrite64" | "pwritev" | "pwritev2":
                data = _data(arguments[1])[: int(answer)]
                self._written(arguments[0], data, int(arguments[3]))
            case "ftruncate":
                if (file := self._file(arguments[0])) is not None:
                    self._resize(file.node, int(arguments[1]))
            case "fallocate":
                self._allocated(arguments)
            case "truncate":
                if (found := self._at(self._path("AT_FDCWD", arguments[0]))) is not None:
                    self._resize(self._entries[found[0]][found[1]], int(arguments[1]))
            case "fsync" | "fdatasync":
                if (file := self._file(arguments[0])) is not None:
                    kind = "sync folder" if file.node in self._entries else "sync file"
                    self._log(Op(kind, file.node))
            case "mkdir":
                self._made(self._path("AT_FDCWD", arguments[0]))
            case "mkdirat":
                self._made(self._path(arguments[0], arguments[1]))
            case "unlink" | "rmdir":
                self._removed(self._path("AT_FDCWD", arguments[0]), name)
            case "unlinkat":
                kind = "rmdir" if "AT_REMOVEDIR" in arguments[2] else "unlink"
                self._removed(self._path(arguments[0], arguments[1]), kind)
            case "rename" | "link":
                self._moved(
                    self._path("AT_FDCWD", arguments[0]), self._path("AT_FDCWD", arguments[1]), name
                )
            case "renameat" | "renameat2" | "linkat":
                old, new = self._path(*arguments[:2]), self._path(*arguments[2:4])
                self._moved(old, new, "link" if name == "linkat" else "rename")
            case "mmap":
                if "MAP_SHARED" in arguments[3] and "PROT_WRITE" in arguments[2]:
                    self._refuse(name, arguments)
            case _:
                self._refuse(name, arguments)

    def _refuse(self, name: str, arguments: list[str]) -> None:
        if any(self._is_inside(_text(argument)) for argument in arguments):
            raise Untraceable(f"the log has no word for {name} of {_text(arguments[0])}")

    def _opened(self, path: str, flags: str, answer: str) -> None:
        self._open.pop(_number(answer), None)
        found = self._at(path)
        if found is None:
            if path == self._base:
                self._open[_number(answer)] = _Open(self.result.base)
            return
        folder, name = found
        if "O_TMPFILE" in flags:
            raise Untraceable("the log has no word for files without a name")
        if name not in self._entries[folder]:
            node = self._node()
            self._sizes[node] = 0
            self._entries[folder][name] = node
            self._log(Op("create", folder, name, node))
        node = self._entries[folder][name]
        if "O_TRUNC" in flags and self._sizes.get(node):
            self._resize(node, 0)
        self._open[_number(answer)] = _Open(node, appends="O_APPEND" in flags)

    def _duplicate(self, fd: str, answer: str) -> None:
        self._open.pop(_number(answer), None)
        if (file := self._file(fd)) is not None:
            self._open[_number(answer)] = file

    def _written(self, fd: str, data: bytes, offset: int | None = None) -> None:
        if _text(fd).startswith("pipe:"):
            self._marked(data)
            return
        file = self._file(fd)
        if file is None or not data:
            return
        start = offset
        if start is None:
            start = self._sizes[file.node] if file.appends else file.offset
            file.offset = start + len(data)
        self._sizes[file.node] = max(self._sizes[file.node], start + len(data))
        self._log(Op("write", file.node, offset=start, data=data))

    def _marked(self, data: bytes) -> None:
        found = re.match(rb"(begin|saved) (\d+)", data)
        if found is not None:
            kind = {b"begin": "begin", b"saved": "promised"}[found[1]]
            self._log(Op(kind, value=int(found[2])))

    def _allocated(self, arguments: list[str]) -> None:
        file = self._file(arguments[0])
        if file is None or "KEEP_SIZE" in arguments[1]:
            return
        if arguments[1] != "0":
            raise Untraceable(f"the log has no word for fallocate with {arguments[1]}")
        self._resize(file.node, max(self._sizes[file.node], int(arguments[2]) + int(arguments[3])))

    def _resize(self, node: int, size: int) -> None:
        self._sizes[node] = size
        self._log(Op("size", node, offset=size))

    def _made(self, path: str) -> None:
        if (found := self._at(path)) is not None:
            node = self._node()
            self._entries[node] = {}
            self._entries[found[0]][found[1]] = node
            self._log(Op("mkdir", *found, node))

    def _removed(self, path: str, kind: str) -> None:
        if (found := self._at(path)) is not None:
            del self._entries[found[0]][found[1]]
            self._log(Op(kind, *found))

    def _moved(self, old: str, new: str, kind: str) -> None:
        source, target = self._at(old), self._at(new)
        if source is None and target is None:
            return
        if source is None or target is None or source[0] != target[0]:
            raise Untraceable(f"the log has no word for a {kind} from one folder to another")
        names = self._entries[source[0]]
        names[target[1]] = node = names[source[1]]
        if kind == "rename":
            del names[source[1]]
        self._log(Op(kind, *source, node, new=target[1]))

    def _log(self, op: Op) -> None:
        self.result.log.append(op)

    def _file(self, fd: str) -> _Open | None:
        """What a descriptor leads to, if that is inside."""
        number = _number(fd)
        if number not in self._open and self._is_inside(path := _text(fd)):
            folder, name = self._at(path) or (None, None)
            node = self.result.base if folder is None else self._entries[folder][name]
            self._open[number] = _Open(node)
        return self._open.get(number)

    def _path(self, fd: str, path: str) -> str:
        inner = _text(path)
        if fd == "AT_FDCWD":
            if not inner.startswith("/"):
                raise Untraceable("a path from the working folder, which is not known")
            return os.path.normpath(inner)
        return os.path.normpath(os.path.join(_text(fd), inner))  # noqa: PTH118 -- no file's path

    def _is_inside(self, path: str) -> bool:
        return path == self._base or path.startswith(f"{self._base}/")

    def _at(self, path: str) -> tuple[int, str] | None:
        """Folder and name of a path inside."""
        if not path.startswith(f"{self._base}/"):
            return None
        *folders, name = path.removeprefix(f"{self._base}/").split("/")
        node = self.result.base
        for folder in folders:
            node = self._entries[node][folder]
        return node, name

    def _node(self) -> int:
        self._nodes += 1
        return self._nodes

    def _adopt(self, path: str) -> int:
        node = self._node()
        self._entries[node] = {}
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    self._entries[node][entry.name] = self._adopt(entry.path)
                else:
                    inner = self._node()
                    self.result.found_files[inner] = Path(entry.path).read_bytes()
                    self._sizes[inner] = len(self.result.found_files[inner])
                    self._entries[node][entry.name] = inner
        return node


def _calls(lines: Iterator[str]) -> Iterator[tuple[str, list[str], str]]:
    """Name, arguments and answer of every call, in the order in which they were answered."""
    begun: dict[str, str] = {}
    for raw in lines:
        line = raw.rstrip("\n")
        thread, _, rest = line.partition(" ")
        rest = rest.lstrip()
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>")
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", rest, re.DOTALL)
        if resumed is not None:
            rest = begun.pop(thread) + resumed[1]
        whole = re.match(r"(\w+)\((.*)\) += (.+)$", rest, re.DOTALL)
        if whole is not None:
            yield whole[1], _split(whole[2]), whole[3]


def _split(arguments: str) -> list[str]:
    """At the commas that are in no brackets, names or strings."""
    found, depth, start, quoted = [], 0, 0, False
    for at, letter in enumerate(arguments):
        if letter == '"':
            quoted = not quoted  # -xx leaves no quote inside a string
        elif not quoted and letter in "[{<":
            depth += 1
        elif not quoted and letter in "]}>":
            depth -= 1
        elif letter == "," and not quoted and not depth:
            found.append(arguments[start:at].strip())
            start = at + 1
    return [*found, arguments[start:].strip()]


def _number(fd: str) -> str:
    """``3`` of ``3</tmp/a>``."""
    return fd.partition("<")[0]


def _text(argument: str) -> str:
    """A path, of a string or of a descriptor."""
    inner = re.search(r'[<"]((?:\\x[0-9a-f]{2})*)[>"]', argument)
    if inner is None:
        return argument
    return bytes.fromhex(inner[1].replace("\\x", "")).decode(errors="replace")


def _data(argument: str) -> bytes:
    """What was written: a string, or a list of them."""
    if '"...' in argument:
        raise Untraceable("a write longer than strace shows")
    pieces = re.findall(r'"((?:\\x[0-9a-f]{2})*)"', argument)
    return b"".join(bytes.fromhex(piece.replace("\\x", "")) for piece in pieces)
