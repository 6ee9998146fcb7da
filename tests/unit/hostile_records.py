"""Commit records made to break a reader, most with a fitting digest, and a word of what each is
refused with. Used by tests and by the campaign of hostile files."""

import io
import json
import pickle
import zipfile

import xxhash

PATH = "step_1/metadata.json"
ATTEMPT = "0123456789abcdef"
FILE = {"name": f"shard-0-{ATTEMPT}.safetensors", "size": 8192, "digest": "0f" * 16}
TENSOR = {
    "dtype": "F32",
    "shape": [4, 6],
    "placement": {"cuts": [{"step": 4}, {"step": 6}], "files": [[0, 0, 1]]},
}
BODY = {
    "state": "committed",
    "ordinal": 1,
    "attempt": ATTEMPT,
    "created": "2026-01-31T12:00:00Z",
    "world_size": 2,
    "writer": "holdfast 0.1.0",
    "files": [FILE, FILE | {"name": f"shard-1-{ATTEMPT}.safetensors"}],
    "tensors": {"w": TENSOR},
}


def wrapped(body: bytes | str) -> bytes:
    text = body.encode() if isinstance(body, str) else body
    digest = xxhash.xxh3_128_hexdigest(b"holdfast\x001\x00" + text).encode()
    return b'{"format":"holdfast","version":1,"digest":"%b","record":%b}' % (digest, text)


def body(**given) -> bytes:
    return wrapped(json.dumps(BODY | given))


def without(field: str) -> bytes:
    return wrapped(json.dumps({key: value for key, value in BODY.items() if key != field}))


def one_file(**given) -> bytes:
    return body(files=[FILE | given], tensors={})


def one_tensor(**given) -> bytes:
    return body(tensors={"w": TENSOR | given})


def placed(shape: list, files: list, **placement) -> bytes:
    return one_tensor(shape=shape, placement={"files": files} | placement)


def cut(*cuts: dict, files: list | None = None, shape: list | None = None) -> bytes:
    return placed(shape or [4, 6], files or [[0, 0, 1]], cuts=list(cuts))


def cut_at(*runs: object) -> bytes:
    return cut({"at": list(runs)}, shape=[9])


def good() -> bytes:
    return wrapped(json.dumps(BODY))


def zip_file() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"b")
    return file.getvalue()


DEEP = "[" * 100_000 + "]" * 100_000
NOT_OURS = "not a holdfast commit record"
HUGE = 4611686018427387904

CORRUPTED = {
    "empty": (b"", NOT_OURS),
    "zeros": (bytes(4096), NOT_OURS),
    "other JSON": (b'{"version":1}', NOT_OURS),
    "space in front": (b" " + good(), NOT_OURS),
    "byte order mark": (b"\xef\xbb\xbf" + good(), NOT_OURS),
    "pretty JSON": (json.dumps(json.loads(good()), indent=1).encode(), NOT_OURS),
    "pickle": (pickle.dumps(BODY), NOT_OURS),
    "zip": (zip_file(), NOT_OURS),
    "UTF-16": (good().decode().encode("utf-16"), NOT_OURS),
    "a shard": ((4088).to_bytes(8, "little") + b"{}".ljust(4088), NOT_OURS),
    "version 0": (good().replace(b'"version":1', b'"version":0'), NOT_OURS),
    "version -1": (good().replace(b'"version":1', b'"version":-1'), NOT_OURS),
    "version 01": (good().replace(b'"version":1', b'"version":01'), NOT_OURS),
    "version 1.0": (good().replace(b'"version":1', b'"version":1.0'), NOT_OURS),
    "too large": (b"x" * (64 * 2**20 + 1), "at most 67108864"),
    "cut short": (good()[:-1], "(digest)"),
    "cut in its head": (good()[:50], "first or its last bytes"),
    "digest in capitals": (good().replace(good()[43:75], good()[43:75].upper()), "damaged"),
    "trailing zip": (good() + zip_file(), "last bytes"),
    "trailing object": (good() + b"{}", "(digest)"),
    "digest of nothing": (good().replace(good()[43:75], b"0" * 32), "(digest)"),
    "no body": (wrapped(""), "is wrong"),
    "body is a list": (wrapped("[]"), "Expected `object`"),
    "body is null": (wrapped("null"), "Expected `object`"),
    "body not UTF-8": (wrapped(b'{"state":"\xff"}'), "not UTF-8"),
    "body ends early": (wrapped(json.dumps(BODY)[:-1]), "ends inside"),
    "two bodies": (wrapped(json.dumps(BODY) * 2), "trailing"),
    "duplicate field": (wrapped('{"state":"committed","state":"tombstone"}'), "occurs twice"),
    "duplicate tensor": (wrapped('{"tensors":{"w":1,"\\u0077":1}}'), "'w' occurs twice"),
    "deep tree": (wrapped('{"tree":%s}' % DEEP), "nested more than"),  # noqa: UP031
    "NaN": (wrapped('{"ordinal":NaN}'), "NaN"),
    "endless number": (wrapped('{"ordinal":%s}' % ("9" * 9999)), "more than 640 digits"),
    "lone surrogate": (body(writer="\ud800"), "is wrong"),
    "no state": (without("state"), "missing required field `state`"),
    "no ordinal": (without("ordinal"), "missing required field `ordinal`"),
    "no attempt": (without("attempt"), "missing required field `attempt`"),
    "no created": (without("created"), "missing required field `created`"),
    "further field": (body(run="rm"), "unknown field `run`"),
    "unknown state": (body(state="pending"), "Invalid enum value 'pending'"),
    "tombstone with files": (body(state="tombstone"), "tombstone has no files"),
    "tombstone with tensors": (body(state="tombstone", files=[]), "tombstone has no files"),
    "ordinal -1": (body(ordinal=-1), "`int` >= 0"),
    "ordinal true": (body(ordinal=True), "got `bool`"),
    "ordinal 1.5": (body(ordinal=1.5), "got `float`"),
    "ordinal 2**63": (body(ordinal=2**63), "`int` <="),
    "fence -1": (body(fence=-1), "`int` >= 0"),
    "step as text": (body(step="1"), "got `str`"),
    "world of 0": (body(world_size=0), "`int` >= 1"),
    "attempt too short": (body(attempt="0f"), "attempt must be 16 hex digits"),
    "attempt with a newline": (body(attempt=ATTEMPT + "\n"), "attempt must be 16 hex digits"),
    "created in no time": (body(created="yesterday"), "created must be a time"),
    "created on a day that is none": (body(created="2026-02-30T00:00:00Z"), "created must be"),
    "created elsewhere": (body(created="2026-01-31T12:00:00+01:00"), "created must be"),
    "created in other digits": (body(created="٢٠٢٦-01-31T12:00:00Z"), "created must be"),
    "writer of no end": (body(writer="x" * 201), "length <= 200"),
    "metric as text": (body(metrics={"loss": "1"}), "metric 'loss' is no number"),
    "metric true": (body(metrics={"loss": True}), "metric 'loss' is no number"),
    "metric null": (body(metrics={"loss": None}), "metric 'loss' is no number"),
    "metric of 2**64": (body(metrics={"loss": 2**64}), "metric 'loss' is no number"),
    "metric of 1e999": (wrapped(json.dumps(BODY)[:-1] + ',"metrics":{"a":1e999}}'), "range"),
    "metric with a tag": (body(metrics={"a": {"$": ["tuple", []]}}), "metric 'a' is no number"),
    "metric with two tags": (
        body(metrics={"a": {"$": ["float", "nan"], "b": 1}}),
        "metric 'a' is no number",
    ),
    "metric without a name": (body(metrics={"": 1}), "name of a metric"),
    "file is a path": (one_file(name=f"../shard-0-{ATTEMPT}.safetensors"), "no name of a shard"),
    "file is absolute": (one_file(name="/etc/passwd"), "no name of a shard"),
    "file of another kind": (one_file(name="metadata.json"), "no name of a shard"),
    "file of rank 01": (one_file(name=f"shard-01-{ATTEMPT}.safetensors"), "no name of a shard"),
    "file with a newline": (one_file(name=FILE["name"] + "\n"), "no name of a shard"),
    "file of many digits": (
        one_file(name=f"shard-{'9' * 5000}-{ATTEMPT}.safetensors"),
        "no name of a shard",
    ),
    "file of size -1": (one_file(size=-1), "`int` >= 0"),
    "file of 4095 bytes": (one_file(size=4095), "no shard is of 4095 bytes"),
    "file of 2**63 bytes": (one_file(size=2**63), "`int` <="),
    "file digest too short": (one_file(digest="0f"), "digest must be 32 hex digits"),
    "file digest in capitals": (one_file(digest="0F" * 16), "digest must be 32 hex digits"),
    "file in a parent": (one_file(prefix="../other"), "prefix must be"),
    "file in a root": (one_file(prefix="/other"), "prefix must be"),
    "file in nothing": (one_file(prefix=""), "prefix must be"),
    "file behind a NUL": (one_file(prefix="a\0b"), "prefix must be"),
    "file far away": (one_file(prefix="a" * 1025), "prefix must be"),
    "file twice": (body(files=[FILE, FILE]), "file 1 ('shard-0-0123456789abcdef.safetensors')"),
    "file with mode": (one_file(mode=777), "unknown field `mode`"),
    "tensor without a name": (body(tensors={"": TENSOR}), "tensor '': name must be"),
    "tensor name too long": (body(tensors={"n" * 65_537: TENSOR}), "65537 characters"),
    "tensor is a list": (body(tensors={"a": TENSOR, "w": []}), "tensor 'w': Expected `object`"),
    "tensor without shape": (body(tensors={"w": {"dtype": "F32"}}), "tensor 'w': "),
    "tensor of size -1": (one_tensor(shape=[-1, 6]), "tensor 'w': Expected `int` >= 0"),
    "tensor of size 4.0": (one_tensor(shape=[4.0, 6]), "tensor 'w': Expected `int`, got `float`"),
    "tensor of 65 dimensions": (
        cut(*[{"step": 1}] * 65, shape=[1] * 65),
        "tensor 'w': the shape has 65 dimensions",
    ),
    "tensor beyond 2**64": (
        cut(*[{"step": 9}] * 3, shape=[4194305, 4194305, 211106198978564]),
        "tensor 'w': a tensor of shape",
    ),
    "tensor beyond, times 0": (
        cut(*[{"step": HUGE}] * 2, {"step": 0}, shape=[HUGE, HUGE, 0]),
        "tensor 'w': a tensor of shape",
    ),
    "no cuts and no boxes": (placed([4, 6], [[0, 0, 1]]), "either cuts or boxes"),
    "cuts and boxes": (
        placed([4], [[0, 0, 1]], cuts=[{"step": 4}], boxes=[[[0, 4]]]),
        "either cuts or boxes",
    ),
    "too few cuts": (cut({"step": 4}), "2 dimensions, but cuts for 1"),
    "too many cuts": (cut({"step": 4}, {"step": 6}, {"step": 1}), "but cuts for 3"),
    "a cut of nothing": (cut({}, {"step": 6}), "dimension 0 must have either step or at"),
    "a cut of both": (cut({"step": 4}, {"step": 6, "at": []}), "dimension 1 must have either"),
    "step 0": (cut({"step": 0}, {"step": 6}), "dimension 0 of size 4 has no step 0"),
    "step beyond": (cut({"step": 5}, {"step": 6}), "dimension 0 of size 4 has no step 5"),
    "step -1": (cut({"step": -1}, {"step": 6}), "tensor 'w': Expected `int` >= 0"),
    "cut at 0": (cut_at([0, 0, 1]), "cuts of dimension 0 do not rise from 0 to 9 in the run [0,"),
    "cut at the end": (cut_at([9, 0, 1]), "do not rise from 0 to 9 in the run [9, 0, 1]"),
    "cut past the end": (cut_at([3, 3, 3]), "do not rise from 0 to 9 in the run [3, 3, 3]"),
    "cut in the other dimension": (
        cut({"step": 4}, {"at": [[6, 0, 1]]}),
        "cuts of dimension 1 do not rise from 0 to 6",
    ),
    "cut backwards": (cut_at([3, 0, 1], [2, 0, 1]), "do not rise from 0 to 9 in the run [2,"),
    "cut twice": (cut_at([3, 0, 1], [3, 0, 1]), "do not rise from 0 to 9 in the run [3,"),
    "cut with step 0": (cut_at([3, 0, 2]), "do not rise from 0 to 9 in the run [3, 0, 2]"),
    "cut with step -1": (cut_at([3, -1, 2]), "tensor 'w': Expected `int` >= 0"),
    "cut at -1": (cut_at([-1, 2, 3]), "tensor 'w': Expected `int` >= 0"),
    "cut run of none": (cut_at([3, 1, 0]), "do not rise from 0 to 9 in the run [3, 1, 0]"),
    "cut run of -1": (cut_at([3, 1, -1]), "tensor 'w': Expected `int` >= 0"),
    "cut run of many": (cut_at([1, 1, 2**63 - 1]), "do not rise from 0 to 9 in the run [1, 1, 9"),
    "cut run of 2**63": (cut_at([1, 1, 2**63]), "tensor 'w': Expected `int` <="),
    "cut run with a huge step": (cut_at([1, 2**63 - 1, 3]), "in the run [1, 9223372036854775807, "),
    "cut runs that overlap": (cut_at([1, 2, 3], [4, 1, 3]), "in the run [4, 1, 3]"),
    "cut runs that touch": (cut_at([1, 2, 3], [5, 1, 2]), "in the run [5, 1, 2]"),
    "cut runs in the wrong order": (cut_at([5, 1, 2], [1, 1, 2]), "in the run [1, 1, 2]"),
    "cut run of two": (cut_at([3, 1]), "length 3"),
    "cut at a number": (cut_at(3), "tensor 'w': Expected `array`, got `int`"),
    "cut at a float": (cut_at([3.0, 1, 1]), "tensor 'w': Expected `int`, got `float`"),
    "cut of nothing": (
        cut({"at": [[1, 1, 1]]}, shape=[0], files=[[0, 0, 2]]),
        "do not rise from 0 to 0",
    ),
    "cut into more cells than a record has": (
        cut({"at": [[2, 1, 2**40]]}, shape=[2**41], files=[[0, 0, 2**40 + 1]]),
        "more than 50000000 parts",
    ),
    "cuts that make too many cells together": (
        cut(
            *[{"at": [[2, 1, 9_999]]}] * 2,
            shape=[20_000, 20_000],
            files=[[0, 0, 100_000_000]],
        ),
        "more than 50000000 parts",
    ),
    "a tensor of nothing cut": (
        cut({"step": 2}, {"step": 0}, shape=[4, 0], files=[[0, 0, 2]]),
        "without elements has one part",
    ),
    "too few files": (cut({"step": 2}, {"step": 6}), "2 parts, but files for 1"),
    "too many files": (
        cut({"step": 4}, {"step": 6}, files=[[0, 0, 1], [0, 0, 1]]),
        "1 parts, but files for 2",
    ),
    "no files": (placed([4], [], cuts=[{"step": 4}]), "1 parts, but files for 0"),
    "file index beyond": (cut({"step": 4}, {"step": 6}, files=[[2, 0, 1]]), "leaves the 2"),
    "file index -1": (cut({"step": 4}, {"step": 6}, files=[[-1, 0, 1]]), "Expected `int` >= 0"),
    "file run beyond": (cut({"step": 1}, {"step": 6}, files=[[0, 1, 4]]), "leaves the 2"),
    "file run beyond by one": (cut({"step": 2}, {"step": 6}, files=[[1, 1, 2]]), "leaves the 2"),
    "file run below": (cut({"step": 1}, {"step": 6}, files=[[1, -1, 4]]), "leaves the 2"),
    "file run of none": (
        cut({"step": 4}, {"step": 6}, files=[[0, 0, 1], [1, 0, 0]]),
        "leaves the 2",
    ),
    "file run of four": (cut({"step": 4}, {"step": 6}, files=[[0, 0, 1, 1]]), "length 3"),
    "more cells than a record has": (
        cut({"step": 1}, shape=[2**40], files=[[0, 0, 2**40]]),
        "more than 50000000 parts",
    ),
    "many cells in many tensors": (
        body(
            tensors={
                f"t{i}": {
                    "dtype": "U8",
                    "shape": [10_000_001],
                    "placement": {"cuts": [{"step": 1}], "files": [[0, 0, 10_000_001]]},
                }
                for i in range(5)
            }
        ),
        "tensor 't4': the record has more than 50000000",
    ),
    "box of other dimensions": (placed([4], [[0, 0, 1]], boxes=[[[0, 4], [0, 1]]]), "2 dimensions"),
    "box outside": (placed([4], [[0, 0, 1]], boxes=[[[1, 5]]]), "box 0 is not inside"),
    "box backwards": (placed([4], [[0, 0, 1]], boxes=[[[4, 0]]]), "box 0 is not inside"),
    "box of nothing": (
        placed([4], [[0, 0, 2]], boxes=[[[0, 4]], [[2, 2]]]),
        "box 1 is not inside",
    ),
    "boxes of too little": (placed([4], [[0, 0, 1]], boxes=[[[0, 3]]]), "3 elements"),
    "boxes of too much": (
        placed([4], [[0, 0, 2]], boxes=[[[0, 4]], [[0, 4]]]),
        "8 elements, and the tensor 4",
    ),
    "no boxes": (placed([0], [], boxes=[]), "0 boxes"),
    "two boxes of nothing": (placed([0], [[0, 0, 2]], boxes=[[[0, 0]], [[0, 0]]]), "2 boxes"),
}

NEWER = {
    "version 2": (good().replace(b'"version":1', b'"version":2'), "format 2, .*up to 1"),
    "version 2, no more": (b'{"format":"holdfast","version":2}', "format 2, .*up to 1"),
    "version 12, unreadable": (
        b'{"format":"holdfast","version":12,\xff\xfe',
        "format 12, .*up to 1",
    ),
    "a dtype unknown": (one_tensor(dtype="F128"), "tensor 'w': there is no dtype 'F128'"),
}
