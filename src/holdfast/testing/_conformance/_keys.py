"""Tests of keys: which are refused, and that every other is just a name."""

# ruff: noqa: S101 -- tests, though they are shipped

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.contracts import ReadRange, Storage
from holdfast.errors import StorageError
from holdfast.testing._conformance._shared import Tests, put

NOT_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", "./a", "a/.", "a\0b"]
NOT_EVEN_TEXT = [None, 3, b"a"]

ODD_KEYS = [
    " leading and trailing ",
    "#?&=+,;:@!$",
    "%41",
    "%2F",
    "%",
    "100%",
    "(x)[x]{x}<x>|x|",
    "*",
    "-",
    "--option",
    "...",
    "..a",
    ".hidden",
    "A",
    "a.",
    "a.tmp",
    "a\\b",
    "con",
    "e\u0301",
    "folder/.hidden/x",
    "folder/with space/x y",
    "q'q\"q`q",
    "x" * 200,
    "~tilde~",
    "\u00e9",
    "日本/語",
    "\U0001f642/\U0001f642",
    "/".join(["deep"] * 30),
]


class KeyTests(Tests):
    @pytest.mark.parametrize("key", [*NOT_KEYS, *NOT_EVEN_TEXT], ids=repr)
    def test_what_cannot_be_a_key_is_refused_everywhere(self, storage: Storage, key: Any) -> None:
        uses: list[Callable[[], Any]] = [
            lambda: storage.open_writer(key),
            lambda: storage.create(key, b""),
            lambda: storage.replace(key, b"", "1"),
            lambda: storage.read(key),
            lambda: storage.read_into(key, [ReadRange(start=0, into=memoryview(bytearray(1)))]),
            lambda: storage.stat(key),
            lambda: storage.delete(key),
            lambda: storage.delete(key, expected="1"),
        ]
        for use in uses:
            with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the key is looked for below
                use()
            assert repr(key) in str(caught.value)
        assert list(storage.list()) == []

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_a_key_is_any_relative_name(self, storage: Storage, key: str) -> None:
        info = storage.create(key, b"created")
        assert (info.key, storage.stat(key).key) == (key, key)
        assert [info.key for info in storage.list()] == [key]
        assert [info.key for info in storage.list(key)] == [key]
        assert storage.read(key) == b"created"
        info = storage.replace(key, b"replaced", info.version)
        assert storage.read(key) == b"replaced"
        assert put(storage, key, b"written").key == key
        memory = bytearray(7)
        storage.read_into(key, [ReadRange(start=0, into=memoryview(memory))])
        assert memory == b"written"
        storage.delete(key)
        assert list(storage.list()) == []

    def test_keys_that_look_alike_are_different(self, storage: Storage) -> None:
        for key in ODD_KEYS:
            storage.create(key, key.encode())
        assert [info.key for info in storage.list()] == sorted(ODD_KEYS)
        for key in ODD_KEYS:
            assert storage.read(key) == key.encode()

    @pytest.mark.parametrize(("first", "second"), [("a", "a/b"), ("a/b", "a"), ("a", "a/b/c")])
    def test_a_key_below_another_works_or_is_refused(
        self, storage: Storage, first: str, second: str
    ) -> None:
        storage.create(first, b"first")
        for store in (storage.create, put_in(storage)):
            try:
                store(second, b"second")
            except StorageError:
                assert [info.key for info in storage.list()] == [first]
            else:
                assert storage.read(second) == b"second"
                assert [info.key for info in storage.list()] == sorted([first, second])
                storage.delete(second)
            assert storage.read(first) == b"first"


def put_in(storage: Storage) -> Callable[[str, bytes], Any]:
    return lambda key, data: put(storage, key, data)
