"""Shard files made to break a reader, and a word of what each is refused with. Used by tests and by
the campaign of hostile files."""

import io
import json
import zipfile

import torch
from made_shards import make_shard

from holdfast.format import ShardEntry

PATH = "step_1/shard-0-0123456789abcdef.safetensors"
OURS = '{"version":1,"chunk_bytes":262144}'


def file_of(header: bytes | str, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def foreign(entries: dict, data: bytes = b"") -> bytes:
    return file_of(json.dumps(entries), data)


def ours(entries: dict, data: bytes = b"", about: str | dict = OURS, *, align: int = 4096) -> bytes:
    text = about if isinstance(about, str) else json.dumps(about)
    header = json.dumps({"__metadata__": {"holdfast": text}} | entries).encode()
    size = -(-(len(header) + 8) // align) * align - 8
    return file_of(header.ljust(size), data)


def u8(start: int, stop: int, shape: list | None = None, dtype: str = "U8") -> dict:
    shape = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def table(start: int, chunks: int = 0, frames: int = 0) -> dict:
    return {"__holdfast_chunks__": u8(start, start + 16 * chunks + 4 * frames)}


def about(encoded: dict) -> dict:
    return {"version": 1, "chunk_bytes": 262144, "encoded": encoded}


def torch_save() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.ones(3)}, file)
    return file.getvalue()


def zip_file() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    return file.getvalue()


def good() -> bytes:
    return make_shard([ShardEntry(name="w", dtype="F32", shape=(2,))], [b"12345678"])


def edited(old: bytes, new: bytes) -> bytes:
    data = good()
    assert data.count(old) == 1
    longer = data.replace(old, new)
    extra = len(longer) - len(data)
    assert longer[4096 - 40 : 4096].strip() == b""
    return longer[: 4096 - 40] + b" " * (40 - extra) + longer[4096:]


DEEP = '{"w":' + "[" * 100_000 + "]" * 100_000 + "}"
U8_W = {"w": u8(0, 3)}
C = {"dtype": "C128", "shape": [1]}

CORRUPTED = {
    "empty": (b"", "cut short"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "it has 7 bytes"),
    "only a length": (b"\2" + bytes(7), "does not fit"),
    "header of 2**63": (file_of("{}", length=2**63), "more than 33554432"),
    "header of 2**64-1": (file_of("{}", length=2**64 - 1), "more than 33554432"),
    "header over the cap": (file_of("{}", length=33_554_433), "more than 33554432"),
    "header longer than the file": (file_of("{}", length=3), "does not fit"),
    "header length 0": (file_of(""), "begin with"),
    "zeros": (bytes(5000), "begin with"),
    "not UTF-8": (file_of(b'{"\xff":1}'), "UTF-8"),
    "byte order mark": (file_of(b"\xef\xbb\xbf{}"), "begin with"),
    "leading space": (file_of(" {}"), "begin with"),
    "UTF-16": (file_of("{}".encode("utf-16")), "begin with"),
    "a list": (file_of("[]"), "begin with"),
    "unfinished": (file_of('{"w":'), "ends inside"),
    "two values": (file_of("{}{}"), "trailing"),
    "comment": (file_of("{/**/}"), "'/'"),
    "duplicate key": (
        file_of('{"w":%s,"w":%s}' % ((json.dumps(u8(0, 0)),) * 2)),
        "'w' occurs twice",
    ),
    "duplicate key in disguise": (
        file_of('{"w":%s,"\\u0077":%s}' % ((json.dumps(u8(0, 0)),) * 2)),
        "'w' occurs twice",
    ),
    "duplicate field": (
        file_of('{"w":{"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,0]}}'),
        "'dtype' occurs twice",
    ),
    "deep nesting": (file_of(DEEP), "nested more than 3 deep"),
    "NaN": (file_of('{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'), "NaN"),
    "lone surrogate": (file_of('{"\\ud800":1}'), "header of the shard is wrong"),
    "negative offset": (foreign({"w": u8(-1, 2)}, b"abc"), "'w': Expected `int` >= 0"),
    "backward offsets": (foreign({"w": u8(3, 0, [3])}, b"abc"), "'w': U8 of shape"),
    "overlap": (foreign({"a": u8(0, 2), "b": u8(1, 3)}, b"abc"), "'b': it starts at byte 1"),
    "hole": (foreign({"a": u8(0, 1), "b": u8(2, 3)}, b"abc"), "'b': it starts at byte 2"),
    "hole at the start": (foreign({"a": u8(1, 3)}, b"abc"), "'a': it starts at byte 1"),
    "one range twice": (foreign({"a": u8(0, 3), "b": u8(0, 3)}, b"abc"), "'b': it starts"),
    "shape too small": (foreign({"w": u8(0, 3, [2])}, b"abc"), "'w': U8 of shape"),
    "shape too large": (foreign({"w": u8(0, 3, [4])}, b"abc"), "'w': U8 of shape"),
    "dtype of other size": (foreign({"w": u8(0, 3, [3], "F32")}, b"abc"), "are 12 bytes"),
    "product over 2**64": (
        foreign({"w": u8(0, 0, [4194305, 4194305, 211106198978564])}),
        "'w': a tensor of shape",
    ),
    "product over, times 0": (foreign({"w": u8(0, 0, [2**62, 2**62, 0])}), "a tensor of shape"),
    "extent over 2**63": (foreign({"w": u8(0, 0, [2**63])}), "'w': Expected `int` <="),
    "endless number": (
        file_of('{"w":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}}' % ("9" * 9999)),
        "more than 640 digits",
    ),
    "offset over 2**63": (foreign({"w": u8(0, 2**64)}), "'w': Expected `int` <="),
    "float offset": (foreign({"w": u8(0, 3.0, [3])}, b"abc"), "'w': Expected `int`, got `float`"),
    "float extent": (foreign({"w": u8(0, 3, [3.0])}, b"abc"), "'w': Expected `int`, got `float`"),
    "bool extent": (foreign({"w": u8(0, 1, [True])}, b"a"), "'w': Expected `int`, got `bool`"),
    "text offset": (foreign({"w": u8(0, 3, ["3"])}, b"abc"), "'w': Expected `int`, got `str`"),
    "null shape": (foreign({"w": u8(0, 3) | {"shape": None}}, b"abc"), "'w': Expected `array`"),
    "three offsets": (foreign({"w": u8(0, 3) | {"data_offsets": [0, 3, 3]}}, b"abc"), "length 2"),
    "65 dimensions": (foreign({"w": u8(0, 1, [1] * 65)}, b"a"), "'w': the shape has 65"),
    "no dtype": (foreign({"w": {"shape": [], "data_offsets": [0, 0]}}), "missing required"),
    "no shape": (foreign({"w": {"dtype": "U8", "data_offsets": [0, 0]}}), "missing required"),
    "no offsets": (foreign({"w": {"dtype": "U8", "shape": []}}), "missing required"),
    "further field": (foreign({"w": u8(0, 0) | {"evil": 1}}), "unknown field `evil`"),
    "entry is a list": (foreign({"w": []}), "'w': Expected `object`"),
    "our own code in the listing": (foreign({"w": u8(0, 16, [1], "C128")}, bytes(16)), "C128 is"),
    "metadata of numbers": (foreign({"__metadata__": {"a": 1}}), "Expected `str`"),
    "metadata is a list": (foreign({"__metadata__": []}), "Expected `object`"),
    "cut off data": (foreign(U8_W, b"ab"), "describes"),
    "trailing bytes": (foreign(U8_W, b"abc" + zip_file()), "but the file has"),
    "trailing bytes, ours": (good() + zip_file(), "but the file has"),
    "pickle": (b"\x80\x04\x95" + bytes(60), "does not fit"),
    "torch.save": (torch_save(), "more than"),
    "zip": (zip_file(), "more than"),
    "JSON": (b'{"format":"holdfast","version":1}', "more than"),
    "zero-size aliases out of order": (
        ours({"a": u8(0, 3), "b": u8(0, 0)} | table(3, 1), b"abc" + bytes(16)),
        "'b': it starts at byte 0",
    ),
    "ours out of order": (
        ours({"b": u8(1, 2), "a": u8(0, 1)} | table(2, 2), b"ab" + bytes(32)),
        "'b': it starts at byte 1",
    ),
    "ours without a table": (ours(U8_W, b"abc"), "last entry is not the chunk table"),
    "ours of nothing": (ours({}), "last entry is not the chunk table"),
    "table first": (ours(table(0, 1) | {"w": u8(16, 19)}, bytes(19)), "last entry is not"),
    "table without ours": (foreign(U8_W | table(3, 1), b"abc" + bytes(16)), "says nothing of"),
    "table too short": (ours(U8_W | table(3), b"abc"), "chunk table is not the 16 bytes"),
    "table too long": (ours(U8_W | table(3, 2), b"abc" + bytes(32)), "is not the 16 bytes"),
    "table of other dtype": (
        ours(U8_W | {"__holdfast_chunks__": u8(3, 19, [16], "I8")}, b"abc" + bytes(16)),
        "chunk table is not",
    ),
    "table of other shape": (
        ours(U8_W | {"__holdfast_chunks__": u8(3, 19, [4, 4])}, b"abc" + bytes(16)),
        "chunk table is not",
    ),
    "table after a hole": (ours(U8_W | table(4, 1), b"abc" + bytes(17)), "chunk table is not"),
    "table past the end": (ours(U8_W | table(3, 1), b"abc" + bytes(15)), "but the file has"),
    "not on a page": (ours(table(0), align=4095), "no multiple of 4096"),
    "other chunk size": (
        ours(table(0), about='{"version":1,"chunk_bytes":1}'),
        "chunks are of 1 bytes",
    ),
    "version 0": (ours(table(0), about='{"version":0,"chunk_bytes":262144}'), "`int` >= 1"),
    "version true": (ours(table(0), about='{"version":true}'), "got `bool`"),
    "version as text": (ours(table(0), about='{"version":"1"}'), "got `str`"),
    "no version": (ours(table(0), about='{"chunk_bytes":262144}'), "missing required"),
    "about is no JSON": (ours(table(0), about="pickle"), "header of the shard is wrong"),
    "about says twice": (ours(table(0), about='{"version":1,"version":2}'), "occurs twice"),
    "about nests deep": (ours(table(0), about=DEEP), "nested more than 64"),
    "about says more": (
        ours(table(0), about=OURS[:-1] + ',"run":"me"}'),
        "unknown field `run`",
    ),
    "encodes nothing listed": (ours(table(0), about=about({"q": C})), "'q' that it does not list"),
    "encodes the table": (
        ours(table(0), about=about({"__holdfast_chunks__": C | {"codec": "c"}})),
        "encodes the chunk table",
    ),
    "encoded is not U8": (
        ours({"w": u8(0, 16, [16], "I8")} | table(16, 1), bytes(32), about({"w": C})),
        "'w': it is encoded, but not",
    ),
    "encoded in two dimensions": (
        ours({"w": u8(0, 16, [4, 4])} | table(16, 1), bytes(32), about({"w": C})),
        "'w': it is encoded, but not",
    ),
    "encoded in too few bytes": (
        ours({"w": u8(0, 15)} | table(15, 1), bytes(31), about({"w": C})),
        "without a codec",
    ),
    "encoded for no reason": (
        ours(
            {"w": u8(0, 4)} | table(4, 1), bytes(20), about({"w": {"dtype": "F32", "shape": [1]}})
        ),
        "without a codec",
    ),
    "codec of no name": (
        ours({"w": u8(0, 4)} | table(4, 1, 1), bytes(24), about({"w": C | {"codec": ""}})),
        "length >= 1",
    ),
    "compressed to more than it was": (
        ours(
            {"w": u8(0, 9)} | table(9, 1, 1),
            bytes(29),
            about({"w": {"dtype": "F32", "shape": [2], "codec": "c"}}),
        ),
        "'w': it is compressed, from 8 bytes to 9",
    ),
    "bomb of one frame": (
        ours(
            {"w": u8(0, 4)} | table(4, 1, 1),
            bytes(24),
            about({"w": {"dtype": "F32", "shape": [2**50], "codec": "c"}}),
        ),
        "chunk table is not the",
    ),
    "bomb beyond any size": (
        ours(
            {"w": u8(0, 4)} | table(4, 1, 1),
            bytes(24),
            about({"w": {"dtype": "F32", "shape": [2**62], "codec": "c"}}),
        ),
        "'w': a tensor of shape",
    ),
    "empty name": (ours({"": u8(0, 3)} | table(3, 1), b"abc" + bytes(16)), "name must be"),
    "reserved name": (
        ours({"__holdfast_x": u8(0, 3)} | table(3, 1), b"abc" + bytes(16)),
        "name is reserved",
    ),
    "box of another size": (
        ours({"w[4:6]": u8(0, 3)} | table(3, 1), b"abc" + bytes(16)),
        "its name says shape",
    ),
    "box of more dimensions": (
        ours({"w[0:3,0:1]": u8(0, 3)} | table(3, 1), b"abc" + bytes(16)),
        "its name says shape",
    ),
    "box backwards": (ours({"w[3:0]": u8(0, 3)} | table(3, 1), b"abc" + bytes(16)), "no range"),
    "box not canonical": (
        ours({"w[00:3]": u8(0, 3)} | table(3, 1), b"abc" + bytes(16)),
        "no range",
    ),
    "name too long": (
        ours({"n" * 65_537: u8(0, 3)} | table(3, 1), b"abc" + bytes(16)),
        "65537 characters",
    ),
    "good but for a dtype": (edited(b'"F32"', b'"F64"'), "are 16 bytes"),
}

NEWER = {
    "version 2": (ours(table(0), about='{"version":2}'), "format 2.*up to 1"),
    "version 2, much changed": (
        ours({"w": u8(0, 0)}, about='{"version":2,"chunks":{"a":[[[1]]]}}'),
        "format 2.*up to 1",
    ),
    "version of many digits": (ours(table(0), about=f'{{"version":{10**40}}}'), "format 1000"),
    "a dtype unknown": (foreign({"w": u8(0, 3, [4], "F6_E2M3")}, b"abc"), "'F6_E2M3'"),
    "an odd number of half bytes": (foreign({"w": u8(0, 1, [1], "F4")}, b"a"), "'F4'"),
    "an encoded dtype unknown": (
        ours({"w": u8(0, 4)} | table(4, 1), bytes(20), about({"w": C | {"dtype": "Q4"}})),
        "'Q4'",
    ),
}
