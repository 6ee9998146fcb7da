"""Tests of listings: which keys a prefix means, their order, and listing while others write."""

# ruff: noqa: S101 -- tests, though they are shipped

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast.contracts import Storage
from holdfast.testing._conformance._shared import Tests, put, require_same, shared_out, while_others

SORTED_KEYS = [
    "A",
    "a b/x",
    "a-b/x",
    "a.b",
    "a/b",
    "a/b.c/d",
    "a/b0",
    "a0",
    "aB/x",
    "ab",
    "b",
    "é",
    "\uff5e",
    "\U0001f642",
]


def keys_of(storage: Storage, prefix: str = "") -> list[str]:
    return [info.key for info in storage.list(prefix)]


class ListingTests(Tests):
    def test_a_new_storage_is_empty(self, storage: Storage) -> None:
        assert keys_of(storage) == []
        assert keys_of(storage, "a") == []
        assert keys_of(storage, "a/b/") == []

    def test_a_listing_is_ordered_by_key(self, storage: Storage) -> None:
        for key in SORTED_KEYS[::-2] + SORTED_KEYS[-2::-2]:
            storage.create(key, b"")
        assert keys_of(storage) == sorted(SORTED_KEYS) == SORTED_KEYS

    def test_a_prefix_is_characters_not_a_folder(self, storage: Storage) -> None:
        keys = ["other", "step_1/a", "step_1/b/c", "step_10/a", "step_10/b", "step_2"]
        for key in keys:
            storage.create(key, b"")
        assert keys_of(storage, "step_1") == ["step_1/a", "step_1/b/c", "step_10/a", "step_10/b"]
        assert keys_of(storage, "step_1/") == ["step_1/a", "step_1/b/c"]
        assert keys_of(storage, "step_1/b") == ["step_1/b/c"]
        assert keys_of(storage, "step_1/b/c") == ["step_1/b/c"]
        assert keys_of(storage, "step_1/b/c/") == []
        assert keys_of(storage, "step_2/") == []
        assert keys_of(storage, "st") == keys[1:]
        assert keys_of(storage, "tep") == []
        assert keys_of(storage, "/") == []

    def test_a_listing_says_what_stat_says(self, storage: Storage) -> None:
        storage.create("a", b"1")
        put(storage, "b/c", b"22")
        for info, size_bytes in zip(storage.list(), (1, 2), strict=True):
            assert info.size_bytes == size_bytes
            require_same(info, storage.stat(info.key))

    def test_only_finished_objects_are_listed(self, storage: Storage) -> None:
        storage.create("b", b"")
        with storage.open_writer("a"), storage.open_writer("c/d") as writer:
            writer.write_at(0, bytes(100_000))
            assert keys_of(storage) == ["b"]
        assert keys_of(storage) == ["b"]
        storage.delete("b")
        assert keys_of(storage) == []

    def test_many_objects_are_listed(self, storage: Storage) -> None:
        keys = [f"folder/{n:05d}" for n in range(self.many_objects)]
        shared_out(keys, lambda key: storage.create(key, b"x"))
        assert keys_of(storage) == keys
        assert keys_of(storage, "folder/0000") == keys[:10]

    def test_any_keys_and_any_prefix(self, storage: Storage) -> None:
        parts = st.text("ab-0.", min_size=1, max_size=3).filter(lambda part: set(part) != {"."})
        names = st.lists(parts, min_size=1, max_size=3).map("/".join)

        @self.some_examples()
        @given(names=st.sets(names, max_size=8), prefix=st.text("ab-0./", max_size=4))
        def check(names: set[str], prefix: str) -> None:
            keys = sorted(
                name for name in names if not any(other.startswith(f"{name}/") for other in names)
            )
            for key in keys:
                storage.create(key, key.encode())
            assert keys_of(storage) == keys
            assert keys_of(storage, prefix) == [key for key in keys if key.startswith(prefix)]
            for key in keys:
                storage.delete(key)

        check()

    def test_objects_may_be_deleted_while_listing(self, storage: Storage) -> None:
        for n in range(10):
            storage.create(f"folder/{n}", b"")
        for info in storage.list():
            storage.delete(info.key)
        assert keys_of(storage) == []

    def test_a_listing_has_every_object_that_stays_whatever_others_do(
        self, storage: Storage
    ) -> None:
        staying = [f"{folder}/{n}" for folder in ("a", "c", "e") for n in range(5)]
        for key in staying:
            storage.create(key, b"")

        def come_and_go(n: int) -> None:
            for folder in ("a", "b", "d"):
                put(storage, f"{folder}/passing {n}", b"")
            for folder in ("a", "b", "d"):
                storage.delete(f"{folder}/passing {n}")

        def look() -> None:
            found = keys_of(storage)
            assert [key for key in found if "passing" not in key] == staying
            assert all(a < b for a, b in itertools.pairwise(found)), found

        while_others(come_and_go, look, times=self.random_examples)
        assert keys_of(storage) == staying
