"""Pickles that do harm to whoever loads them, by hand, byte by byte. Knows what a pickle can say,
not where it will lie.

Each that runs code makes the folder that it is given, so that nobody need guess whether it ran.
"""

# ruff: noqa: E501 -- tables of bytes are read as tables

import struct
from collections.abc import Callable, Mapping

Pickle = Callable[[str], bytes]
"""From the folder that it is to make if it runs."""


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _name(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def called(module: str, name: str, *arguments: bytes) -> bytes:
    """A call of something that is found by its name."""
    return _name(module, name) + b"(" + b"".join(arguments) + b"tR"


def _whole(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def _command(made: str) -> bytes:
    return _text(f"mkdir '{made}'")


def _python(made: str) -> bytes:
    return _text(f"__import__('os').mkdir({made!r})")


RUNNING: Mapping[str, Pickle] = {
    "os.mkdir": lambda made: _whole(called("os", "mkdir", _text(made))),
    "posix.mkdir": lambda made: _whole(called("posix", "mkdir", _text(made))),
    "os.system": lambda made: _whole(called("os", "system", _command(made))),
    "nt or posix system": lambda made: _whole(called("posix", "system", _command(made))),
    "eval": lambda made: _whole(called("builtins", "eval", _python(made))),
    "exec": lambda made: _whole(called("builtins", "exec", _python(made))),
    "eval of protocol 0": lambda made: b"c__builtin__\neval\n(V" + f"__import__('os').mkdir({made!r})".encode() + b"\ntR.",
    "subprocess.call": lambda made: _whole(
        called("subprocess", "call", b"](" + _text("mkdir") + _text(made) + b"e")
    ),
    "subprocess.Popen": lambda made: _whole(
        called("subprocess", "Popen", b"](" + _text("mkdir") + _text(made) + b"e")
    ),
    "an instance by its name": lambda made: b"(S" + repr(made).encode() + b"\nios\nmkdir\n.",
    "an object with arguments": lambda made: _whole(b"(" + _name("os", "mkdir") + _text(made) + b"o"),
    "a new object": lambda made: _whole(
        _name("subprocess", "Popen") + b"(](" + _text("mkdir") + _text(made) + b"et\x81"
    ),
    "a name made of two texts": lambda made: b"\x80\x04"
     b"\x8c\x02os\x8c\x05mkdir\x93("
    + _text(made)
    + b"tR.",
    "a name with dots": lambda made: b"\x80\x04"
     b"\x8c\x05torch\x8c\x08os.mkdir\x93("
    + _text(made)
    + b"tR.",
    "through operator": lambda made: _whole(
        called("operator", "methodcaller", _text("mkdir"), _text(made)) + b"(" + _name("os", "path") + b"tR"
    ),
    "through functools": lambda made: _whole(
        called("functools", "partial", _name("os", "mkdir"), _text(made)) + b")R"
    ),
    "through getattr": lambda made: _whole(
        called("builtins", "getattr", called("importlib", "import_module", _text("os")), _text("mkdir"))
        + b"(" + _text(made) + b"tR"
    ),
    "a pickle in a pickle": lambda made: _whole(
        called("pickle", "loads", _bytes(RUNNING["os.mkdir"](made)))
    ),
    "torch's own way into pickle": lambda made: _whole(
        called("torch.storage", "_load_from_bytes", _bytes(RUNNING["os.mkdir"](made)))
    ),
    "a state that is set": lambda made: _whole(
        called("collections", "OrderedDict") + b"}" + _text("x") + called("os", "mkdir", _text(made)) + b"sb"
    ),
    "in a list, behind much": lambda made: _whole(
        b"](" + b"K\1" * 1000 + called("os", "mkdir", _text(made)) + b"e"
    ),
    "as the key of a dict": lambda made: _whole(
        b"}(" + called("os", "mkdir", _text(made)) + b"K\1u"
    ),
    "and then a good end": lambda made: _whole(called("os", "mkdir", _text(made)) + b"0}"),
    "code made of bytes": lambda made: _whole(
        called("types", "FunctionType", called("builtins", "compile", _python(made), _text("x"), _text("eval")), b"}")
        + b")R"
    ),
    "timeit": lambda made: _whole(called("timeit", "timeit", _python(made), _text("pass"), _name("timeit", "default_timer"), b"K\1")),
    "runpy": lambda made: _whole(called("runpy", "_run_code", called("builtins", "compile", _python(made), _text("x"), _text("exec")), b"}")),
    "webbrowser": lambda made: _whole(called("webbrowser", "open", _text(f"file://{made}"))),
    "torch.hub": lambda made: _whole(called("torch.hub", "load", _text(made), _text("x"), _text("local"))),
}  # fmt: skip


def _bytes(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


def _doubling(depth: int) -> bytes:
    """Lists of the one before twice: few bytes, and 2 to the power of ``depth`` ways through it."""
    body = b"]q\0"
    for level in range(depth):
        body += b"](h" + bytes([level]) + b"h" + bytes([level]) + b"eq" + bytes([level + 1])
    return body


def _doubling_late(depth: int) -> bytes:
    """The same, of lists that are in each other before anything is in them."""
    body = b"".join(b"]q" + bytes([level]) for level in range(depth + 1))
    for level in reversed(range(depth)):
        body += b"h" + bytes([level + 1]) + b"(h" + bytes([level]) + b"h" + bytes([level]) + b"e"
    return body + b"h" + bytes([depth])


_PAIRS = b")" + b"q\0h\0\x86" * 60
"""The same of tuples, in one place of the memo."""


HARMFUL: Mapping[str, bytes] = {
    "lists of lists twice": _whole(_doubling(60)),
    "a call of lists of lists twice": _whole(_doubling(60) + b")R"),
    "a call of lists that are filled late": _whole(_doubling_late(60) + b")R"),
    "a new object of lists of lists twice": _whole(_doubling(60) + b")\x81"),
    "a call of lists that are forgotten then": _whole(_doubling(60) + b")R0" + b"Nr\x3c\0\0\0"),
    "a layout of lists of lists twice": _whole(
        _doubling(60) + called("torch._utils", "_rebuild_sparse_tensor", b"h\x3c", b"N")
    ),
    "a key of pairs of pairs": _whole(b"}" + _PAIRS + b"K\1s"),
    "a member of pairs of pairs": b"\x80\x04\x8f(" + _PAIRS + b"\x90.",
    "many keys of some pairs of pairs": _whole(
        b"}(" + b")" + b"q\0h\0\x86" * 16 + b"q\1" + b"K\1" + b"h\1K\1" * 100_000 + b"u"
    ),
    "a list in itself": _whole(b"]q\0h\0a"),
    "a dict in itself": _whole(b"}q\0K\1h\0s"),
    "a tuple of a list of itself": _whole(b"]q\0h\0\x85q\1h\1ah\1"),
    "a hundred thousand lists in each other": _whole(b"](" * 100_000 + b"e" * 100_000),
    "a hundred thousand tuples in each other": _whole(b")" + b"\x85" * 100_000),
    "a key of a million tuples in each other": _whole(b"})" + b"\x85" * 1_000_000 + b"K\1s"),
    "a member of a million tuples in each other": b"\x80\x04\x8f()" + b"\x85" * 1_000_000 + b"\x90.",
    "a key of a million pairs of texts and pairs": _whole(b"})" + b"X\1\0\0\0a\x86" * 1_000_000 + b"K\1s"),
    "a hundred thousand marks": _whole(b"(" * 100_000 + b"t"),
    "a memo of 2^31": _whole(b"Nr\xff\xff\xff\x7f0N"),
    "a text of 2^32 bytes": _whole(b"X\xff\xff\xff\xff"),
    "a text of 2^63 bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",
    "bytes of 2^62": b"\x80\x04\x8e" + b"\0" * 7 + b"\x40.",
    "a frame of 2^63": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
    "a number of 2^31 bytes": _whole(b"\x8b\xff\xff\xff\x7f"),
    "a number of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "nothing on the stack": _whole(b"0"),
    "a mark that is missing": _whole(b"t"),
    "an extension": _whole(b"\x82\1"),
    "a persistent id": _whole(b"NQ"),
    "a persistent id as text": b"Pfile:///etc/passwd\n.",
    "protocol 255": b"\x80\xff.",
    "an opcode that is none": b"\x80\x02\xfe.",
    "no end": b"\x80\x02}",
    "keys that cannot be": _whole(b"}]K\1s"),
    "one million empty tuples": _whole(b"](" + b")" * 1_000_000 + b"e"),
    "a build on a number": _whole(b"K\1}b"),
    "append to a number": _whole(b"K\1K\2a"),
    "set on a list": _whole(b"]K\1K\2s"),
    "a call of a number": _whole(b"K\1)R"),
    "a call of a text": _whole(_text("os.system") + b")R"),
    "a size of minus one": _whole(called("torch", "Size", b"](J\xff\xff\xff\xffe")),
    "an ordered dict of numbers": _whole(called("collections", "OrderedDict", b"K\5")),
    "a dtype as a state": _whole(b"}" + _text("w") + _name("torch", "float32") + b"s"),
    "a parameter of nothing": _whole(called("torch._utils", "_rebuild_parameter", b"NNN")),
    "a tensor of no storage": _whole(called("torch._utils", "_rebuild_tensor_v2", b"NK\0)", b")", b"\x89", b"}")),
    "a sparse tensor of nothing": _whole(called("torch._utils", "_rebuild_sparse_tensor", b"NN")),
    "a generator that is set": _whole(called("torch", "Generator")),
}  # fmt: skip
