"""The pre-scan: what a JSON decoder lets pass and the format must not."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CorruptedError
from holdfast.format._strict_json import scan_json


def refusal(text, max_depth=64):
    with pytest.raises(CorruptedError) as caught:
        scan_json(text, max_depth=max_depth)
    start = "The JSON text is damaged or was not written by holdfast: "
    assert caught.value.message.startswith(start)
    return caught.value.message.removeprefix(start)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":1,"a":2}', "the key 'a' occurs twice in one object (byte 7)."),
        (b'{"a":1,"\\u0061":2}', "the key 'a' occurs twice in one object (byte 7)."),
        (
            b'{"\\u00e9":1 , "\xc3\xa9" : 2}',
            "the key '\u00e9' occurs twice in one object (byte 14).",
        ),
        (b'{"\\ud83d\\ude00":1,"\xf0\x9f\x98\x80":2}', "the key '\U0001f600' occurs twice"),
        (b'{"":1,"":2}', "the key '' occurs twice in one object (byte 6)."),
        (b'{"\\/":1,"/":2}', "the key '/' occurs twice"),
        (b'[{},{"x":{"a":[],"b":{},"a":0}}]', "the key 'a' occurs twice in one object (byte 24)."),
        (b'{"a":{"a":1},"b":[{"a":1}],"a":2}', "the key 'a' occurs twice in one object (byte 27)."),
        (b'{"' + b"k" * 100 + b'":1,"' + b"k" * 100 + b'":1}', f"the key '{'k' * 60}...' occurs"),
        (b'{"\\ud800":1,"\\ud800":1}', "occurs twice"),
        (b'{"a\\q":1}', "has an escape that means nothing (byte 1)."),
        (b'{"a\\u00zz":1}', "has an escape that means nothing (byte 1)."),
        (b"[NaN]", "NaN and Infinity are not JSON (byte 1)."),
        (b'{"a":-Infinity}', "NaN and Infinity are not JSON (byte 6)."),
        (b"[" * 65 + b"]" * 65, "it is nested more than 64 deep (byte 64)."),
        (b'{"a":' * 65 + b"0" + b"}" * 65, "it is nested more than 64 deep (byte 320)."),
        (b"[" * 1_000_000, "it is nested more than 64 deep (byte 64)."),
        (b"[}", "'}' closes nothing (byte 1)."),
        (b'{"a":0]', "']' closes nothing (byte 6)."),
        (b"]", "']' closes nothing (byte 0)."),
        (b"0}", "'}' closes nothing (byte 1)."),
        (b"[[]", "it ends inside an object or a list (byte 3)."),
        (b'["abc', "a string does not end (byte 1)."),
        (b'["a\\"', "a string does not end (byte 1)."),
        (b'["a":1]', "the key 'a' is in no object (byte 1)."),
        (b'"a":1', "the key 'a' is in no object (byte 0)."),
        (b"[" + b"1" * 641 + b"]", "a number has more than 640 digits (byte 1)."),
        (b"0." + b"1" * 100_000, "a number has more than 640 digits (byte 2)."),
        (b'["\xff"]', "it is not UTF-8 (byte 2)."),
        (b'{"\xed\xa0\x80":1}', "it is not UTF-8 (byte 2)."),
        (b"\xef\xbb\xbf{}", "the character '\\\\xef' is out of place (byte 0)."),
        (b"{'a':1}", 'the character "\'" is out of place (byte 1).'),
        (b"[1] // no", "the character '/' is out of place (byte 4)."),
        (b"\x00{}", "the character '\\x00' is out of place (byte 0)."),
    ],
)
def test_it_is_refused_and_told_where(text, message):
    assert message in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        b"0",
        b'"a"',
        b"[" * 64 + b"]" * 64,
        b'{"a":{"a":{"a":[{"a":1},{"a":2}]}},"b":"a"}',
        b'{"a":"a:","b":"{[\\"]}","c":"\\\\"}',
        b' { "NaN" : "Infinity" , "\\n" : [ true , false , null , -1.5e+10 ] } \r\n\t',
        b"[" + b"1" * 640 + b"]",
        b'["' + b"1" * 100_000 + b'"]',
        b'{"\\u0061":1,"\\u0041":2,"a\\u0000":3,"b":4}',
        '{"\u00e9":1,"e\u0301":2}'.encode(),
    ],
)
def test_it_passes(text):
    scan_json(text, max_depth=64)
    scan_json(memoryview(text), max_depth=64)


def test_no_depth_means_no_object_and_no_list():
    scan_json(b"1", max_depth=0)
    assert "it is nested more than 0 deep (byte 0)." in refusal(b"[]", max_depth=0)


def test_wrong_arguments_are_programming_errors():
    with pytest.raises(TypeError, match="data must be bytes, not str"):
        scan_json("{}", max_depth=1)
    with pytest.raises(ValueError, match="max_depth must be a whole number, at least 0, not -1"):
        scan_json(b"{}", max_depth=-1)


@pytest.mark.parametrize(
    "text",
    [
        b'"' + b"a" * 5_000_000,
        b'["' + b'\\"' * 2_500_000,
        b'"' * 2_000_001,
        b'{"' + b"\\n" * 2_500_000 + b'":0}',
        b'{"a" ' + b" " * 5_000_000 + b":0}",
        b"[" + b"[]," * 300_000 + b"0]",
        b"1" * 5_000_000,
        b"\\" * 5_000_000,
    ],
    ids=["open", "escaped", "quotes", "key", "spaces", "lists", "digits", "backslashes"],
)
def test_megabytes_of_anything_are_scanned_in_linear_time(text):
    try:
        scan_json(text, max_depth=64)
    except CorruptedError:
        return


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
)


@given(JSON, st.booleans(), st.sampled_from([None, 1]))
@settings(deadline=None)
def test_whatever_json_writes_passes(value, ascii_only, indent):
    if "Infinity" in json.dumps(value):
        return
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    scan_json(text, max_depth=64)


class Found(Exception):  # noqa: N818 -- not an error of the test
    pass


def has_duplicates(text):
    def look(pairs):
        if len(dict(pairs)) < len(pairs):
            raise Found

    try:
        json.loads(text, object_pairs_hook=look)
    except Found:
        return True
    return False


PIECES = ['"a"', '"\\u0061"', '"b"', '"', "\\", "{", "}", "[", "]", ":", ",", "1"]


@given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.data(),
)
@settings(max_examples=1000, deadline=None)
def test_a_text_that_passes_and_decodes_has_no_duplicate_key(pieces, data):
    keys = data.draw(st.lists(st.sampled_from(['"a"', '"\\u0061"', '"b"', '"\\b"']), max_size=4))
    inside = ",".join(f"{key}:{pieces or 0}" for key in keys)
    for text in (pieces, f"{{{inside}}}", f'[{{"x":{{{inside}}}}}]'):
        try:
            scan_json(text.encode(), max_depth=8)
            msgspec.json.decode(text.encode())
        except (CorruptedError, msgspec.DecodeError):
            continue
        assert not has_duplicates(text)
