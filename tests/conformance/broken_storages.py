"""Storages that each break one sentence of the contract, under the suite.

Run by test_the_suite_notices.py, not collected by itself. ``noticed_by`` is a test that must fail.
"""

# ruff: noqa: N801 -- classes that stand where Suite has attributes

import contextlib
import functools
import time

from hypothesis import Phase, settings

from holdfast.contracts import SMALL_OBJECT_BYTES, ReadRange
from holdfast.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError, StorageError
from holdfast.storage import MemoryStorage
from holdfast.storage._wrapped import WrappedWriter
from holdfast.testing import StorageConformance


class Writer(WrappedWriter):
    """A writer whose storage can be reached, for breaking it."""

    def __init__(self, storage, writer, key):
        super().__init__(writer, key, lambda method, key, call: call())
        self._storage = storage


class Suite(StorageConformance):
    """Small, since it runs often."""

    large_bytes = 70_001
    many_objects = 20
    many_ranges = 50
    random_examples = 15
    storage_class = MemoryStorage
    noticed_by = ()
    writer_class = None

    def some_examples(self):
        """That one is found is enough; to look for the simplest may take five minutes."""
        found = (Phase.explicit, Phase.reuse, Phase.generate)
        return settings(super().some_examples(), phases=found)

    def make_storage(self, tmp_path):
        storage = self.storage_class()
        if self.writer_class is not None:
            opened = storage.open_writer

            def open_writer(key, *, size_bytes=None):
                return self.writer_class(storage, opened(key, size_bytes=size_bytes), key)

            storage.open_writer = open_writer
        return storage


class TestSound(Suite):
    """The control: nothing is broken, so nothing must fail."""


def _raw_create(storage, key, data):
    with storage._lock:
        return storage._put(key, bytes(memoryview(data)))


class TestCreateOverwrites(Suite):
    noticed_by = "test_create_refuses_a_key_that_is_taken"

    class storage_class(MemoryStorage):
        def create(self, key, data):
            if isinstance(key, str) and key and self._objects.get(key):
                self.delete(key)
            return super().create(key, data)


class TestCreateLooksThenStores(Suite):
    noticed_by = "test_of_many_creators_one_wins"

    class storage_class(MemoryStorage):
        def create(self, key, data):
            if isinstance(key, str) and key in self._objects:
                raise ObjectExistsError("taken", path=key)
            time.sleep(0.01)
            with contextlib.suppress(ObjectExistsError):
                return super().create(key, data)
            return self.replace(key, data, self.stat(key).version)


class TestReplaceLooksThenStores(Suite):
    noticed_by = "test_of_many_replacers_one_wins"

    class storage_class(MemoryStorage):
        def replace(self, key, data, expected):
            if self.stat(key).version != expected:
                raise ObjectChangedError("changed", path=key)
            time.sleep(0.01)
            return self._publish(key, bytes(data))


class TestReplaceIgnoresTheVersion(Suite):
    noticed_by = "test_replace_needs_the_current_version"

    class storage_class(MemoryStorage):
        def replace(self, key, data, expected):
            return super().replace(key, data, self.stat(key).version)


class TestReplaceCreates(Suite):
    noticed_by = "test_replace_makes_no_object"

    class storage_class(MemoryStorage):
        def replace(self, key, data, expected):
            try:
                return super().replace(key, data, expected)
            except ObjectNotFoundError:
                return self.create(key, data)


class TestVersionIsTheSize(Suite):
    noticed_by = "test_a_version_changes_whenever_the_bytes_do"

    class storage_class(MemoryStorage):
        def _put(self, key, data):
            info = _with_version(super()._put(key, data), str(len(data)))
            self._objects[key] = (data, info)
            return info


class TestNoLargestSize(Suite):
    noticed_by = "test_small_objects_have_a_largest_size"

    class storage_class(MemoryStorage):
        def create(self, key, data):
            if isinstance(data, bytes) and len(data) > SMALL_OBJECT_BYTES:
                return _raw_create(self, key, data)
            return super().create(key, data)


class TestListIsNotOrdered(Suite):
    noticed_by = "test_a_listing_is_ordered_by_key"

    class storage_class(MemoryStorage):
        def list(self, prefix=""):
            return iter(sorted(super().list(prefix), key=lambda info: info.key[::-1]))


class TestListWalksFolders(Suite):
    """Ordered part by part, as a walk over folders is."""

    noticed_by = "test_a_listing_is_ordered_by_key"

    class storage_class(MemoryStorage):
        def list(self, prefix=""):
            return iter(sorted(super().list(prefix), key=lambda info: info.key.split("/")))


class TestListTakesThePrefixForAFolder(Suite):
    noticed_by = "test_a_prefix_is_characters_not_a_folder"

    class storage_class(MemoryStorage):
        def list(self, prefix=""):
            folder = prefix.rstrip("/")
            for info in super().list(prefix):
                if not folder or info.key == folder or info.key.startswith(f"{folder}/"):
                    yield info


class TestListForgetsTheSecondPage(Suite):
    noticed_by = "test_many_objects_are_listed"

    class storage_class(MemoryStorage):
        def list(self, prefix=""):
            return iter(list(super().list(prefix))[:16])


class TestListStopsWhenOthersWrite(Suite):
    noticed_by = "test_a_listing_has_every_object_that_stays_whatever_others_do"

    class storage_class(MemoryStorage):
        def list(self, prefix=""):
            before = self.stat_of_all()
            for info in super().list(prefix):
                time.sleep(0.001)
                if self.stat_of_all() != before:
                    return
                yield info

        def stat_of_all(self):
            with self._lock:
                return set(self._objects)


class TestListShowsUnfinishedObjects(Suite):
    noticed_by = "test_only_finished_objects_are_listed"

    class storage_class(MemoryStorage):
        def open_writer(self, key, *, size_bytes=None):
            writer = super().open_writer(key, size_bytes=size_bytes)
            self.unfinished = key
            return writer

        def list(self, prefix=""):
            infos = {info.key: info for info in super().list(prefix)}
            key = getattr(self, "unfinished", None)
            if key is not None and key not in infos and key.startswith(prefix):
                infos[key] = _raw_create(MemoryStorage(), key, b"")
            return iter(infos[key] for key in sorted(infos))


class TestReadIsShort(Suite):
    noticed_by = "test_a_large_object_comes_back"

    class storage_class(MemoryStorage):
        def read(self, key):
            return super().read(key)[:65_536]


class TestRangesAreShort(Suite):
    noticed_by = "test_a_range_past_the_end_is_an_error_never_a_short_read"

    class storage_class(MemoryStorage):
        def read_into(self, key, ranges):
            data = self.read(key)
            for wanted in ranges:
                part = data[wanted.start : wanted.start + wanted.into.nbytes]
                wanted.into.cast("B")[: len(part)] = part


class TestRangesAreSorted(Suite):
    noticed_by = "test_ranges_may_overlap_and_come_in_any_order"

    class storage_class(MemoryStorage):
        def read_into(self, key, ranges):
            starts = sorted(wanted.start for wanted in ranges)
            super().read_into(
                key,
                [
                    ReadRange(start=start, into=wanted.into)
                    for start, wanted in zip(starts, ranges, strict=True)
                ],
            )


class TestRangesOverlapWrongly(Suite):
    """Each byte goes to one range only."""

    noticed_by = "test_ranges_may_overlap_and_come_in_any_order"

    class storage_class(MemoryStorage):
        def read_into(self, key, ranges):
            end = 0
            for wanted in sorted(ranges, key=lambda wanted: wanted.start):
                skipped = min(max(0, end - wanted.start), wanted.into.nbytes)
                rest = wanted.into.cast("B")[skipped:] if wanted.into.nbytes else wanted.into
                super().read_into(key, [ReadRange(start=wanted.start + skipped, into=rest)])
                end = max(end, wanted.start + wanted.into.nbytes)


class TestRangesMakeACopyOfOddMemory(Suite):
    noticed_by = "test_memory_that_cannot_be_filled_is_refused"

    class storage_class(MemoryStorage):
        def read_into(self, key, ranges):
            super().read_into(
                key,
                [
                    wanted
                    if wanted.into.c_contiguous and not wanted.into.readonly
                    else ReadRange(start=wanted.start, into=memoryview(bytearray(wanted.into)))
                    for wanted in ranges
                ],
            )


class TestMissingIsEmpty(Suite):
    noticed_by = "test_what_is_missing_is_said_with_its_key"

    class storage_class(MemoryStorage):
        def read(self, key):
            try:
                return super().read(key)
            except ObjectNotFoundError:
                return b""


class TestDeleteNeedsAnObject(Suite):
    noticed_by = "test_deleting_what_is_not_there_does_nothing"

    class storage_class(MemoryStorage):
        def delete(self, key, *, expected=None):
            if isinstance(key, str) and key:
                self.stat(key)
            super().delete(key, expected=expected)


class TestDeleteTakesAllBelow(Suite):
    noticed_by = "test_deleting_what_is_not_there_does_nothing"

    class storage_class(MemoryStorage):
        def delete(self, key, *, expected=None):
            super().delete(key, expected=expected)
            for info in super().list(f"{key}/"):
                super().delete(info.key)


class TestDeleteTakesThePrefix(Suite):
    noticed_by = "test_a_deleted_object_is_gone_and_its_neighbours_are_not"

    class storage_class(MemoryStorage):
        def delete(self, key, *, expected=None):
            super().delete(key, expected=expected)
            for info in super().list(key):
                super().delete(info.key)


class TestDeleteIgnoresTheVersion(Suite):
    noticed_by = "test_one_version_is_deleted_or_nothing_is"

    class storage_class(MemoryStorage):
        def delete(self, key, *, expected=None):
            super().delete(key)


class TestDeleteLooksThenRemoves(Suite):
    noticed_by = "test_a_deleter_of_an_old_version_never_takes_a_newer_object"

    class storage_class(MemoryStorage):
        def delete(self, key, *, expected=None):
            if expected is not None and self.stat(key).version != expected:
                raise ObjectChangedError("changed", path=key)
            time.sleep(0.03)
            super().delete(key)

        def _publish(self, key, data):
            time.sleep(0.01)  # so that the deleter has looked by then
            return super()._publish(key, data)


class TestDeleteAndReplaceBothWin(Suite):
    noticed_by = "test_of_a_deleter_and_a_replacer_of_one_version_one_wins"

    class storage_class(MemoryStorage):
        def delete(self, key, *, expected=None):
            if expected is not None:
                time.sleep(0.01)
            with contextlib.suppress(ObjectChangedError):
                super().delete(key, expected=expected)


class TestDeleteRefusesAndRemoves(Suite):
    noticed_by = "test_one_version_is_deleted_or_nothing_is"

    class storage_class(MemoryStorage):
        def delete(self, key, *, expected=None):
            super().delete(key)
            if expected is not None:
                raise StorageError("versions cannot be deleted", path=key)


class TestAVersionOfNothingIsMissing(Suite):
    noticed_by = "test_deleting_a_version_of_nothing_does_nothing"

    class storage_class(MemoryStorage):
        def delete(self, key, *, expected=None):
            if expected is not None:
                self.stat(key)
            super().delete(key, expected=expected)


class TestReadsTwoVersions(Suite):
    noticed_by = "test_all_ranges_of_one_call_are_of_one_version"

    class storage_class(MemoryStorage):
        def read_into(self, key, ranges):
            for wanted in ranges:
                super().read_into(key, [wanted])
                time.sleep(0.001)


class TestTakesAnySize(Suite):
    noticed_by = "test_what_cannot_be_a_size_is_refused"

    class storage_class(MemoryStorage):
        def open_writer(self, key, *, size_bytes=None):
            return super().open_writer(key, size_bytes=abs(int(size_bytes or 0)) or None)


class TestKeysMayLeaveTheRoot(Suite):
    noticed_by = "test_what_cannot_be_a_key_is_refused_everywhere"

    class storage_class(MemoryStorage):
        def read(self, key):
            return super().read(key.lstrip("./") if isinstance(key, str) else key)


class TestKeysAreUnquoted(Suite):
    noticed_by = "test_keys_that_look_alike_are_different"

    class storage_class(MemoryStorage):
        def _put(self, key, data):
            return super()._put(key.replace("%41", "A"), data)


class TestKeysIgnoreCase(Suite):
    noticed_by = "test_a_key_is_any_relative_name"

    class storage_class(MemoryStorage):
        def _put(self, key, data):
            return super()._put(key.lower(), data)

        def _get(self, key):
            return super()._get(key.lower())


class TestSweepTakesObjects(Suite):
    noticed_by = "test_sweeping_harms_no_object"

    class storage_class(MemoryStorage):
        def sweep(self, older_than_s):
            super().sweep(older_than_s)
            now = time.time()
            old = [info.key for info in self.list() if now - info.modified_s > older_than_s]
            for key in old:
                self.delete(key)
            return len(old)


class TestSweepTakesYoungWrites(Suite):
    noticed_by = "test_sweeping_harms_no_young_write"

    class storage_class(MemoryStorage):
        def open_writer(self, key, *, size_bytes=None):
            self.writer = super().open_writer(key, size_bytes=size_bytes)
            return self.writer

        def sweep(self, older_than_s):
            super().sweep(older_than_s)
            self.writer.abort()
            return 0


class TestVisibleTooEarly(Suite):
    noticed_by = "test_an_object_is_invisible_until_finished_then_whole"

    class writer_class(Writer):
        def write_at(self, offset, data):
            super().write_at(offset, data)
            if self._key not in self._storage._objects:
                _raw_create(self._storage, self._key, data)


class TestTruncatedWhenOpened(Suite):
    noticed_by = "test_an_object_is_replaced_when_the_writer_finishes"

    class writer_class(Writer):
        def write_at(self, offset, data):
            super().write_at(offset, data)
            if self._key in self._storage._objects:
                _raw_create(self._storage, self._key, b"")


class TestAbortPublishes(Suite):
    noticed_by = "test_without_finish_nothing_changes"

    class writer_class(Writer):
        def abort(self):
            with contextlib.suppress(Exception):
                self._writer.finish()
            super().abort()


class TestAbortAfterFinishDeletes(Suite):
    noticed_by = "test_abort_does_nothing_after_finish"

    class writer_class(Writer):
        done = False

        def finish(self):
            info = super().finish()
            self.done = True
            return info

        def abort(self):
            super().abort()
            if self.done:
                self._storage.delete(self._key)


class TestFinishesTwice(Suite):
    noticed_by = "test_a_writer_is_used_once"

    class writer_class(Writer):
        @functools.cached_property
        def _info(self):
            return super().finish()

        def finish(self):
            return self._info


class PiecesByOffset(Writer):
    """Takes every piece wherever it is."""

    def __init__(self, storage, writer, key):
        super().__init__(storage, writer, key)
        self._data = bytearray()
        self._size = writer._size

    def write_at(self, offset, data):
        self._writer.write_at(0, b"")  # as picky about closed writers as the real one
        if offset < 0:
            raise ValueError(offset)
        piece = memoryview(data).tobytes()
        end = offset + len(piece)
        self._data += bytes(max(0, end - len(self._data)))
        self._data[offset:end] = piece

    def finish(self):
        if self._size not in {None, len(self._data)}:
            self.abort()
            raise StorageError("another size", path=self._key)
        self._writer._size = None
        self._writer.write_at(0, self._data)
        return super().finish()


class TestHolesAreZeros(Suite):
    noticed_by = "test_holes_and_bytes_written_twice_are_refused"
    writer_class = PiecesByOffset


class TestHoldsAnyNumberOfEarlyBytes(Suite):
    noticed_by = "test_bytes_are_held_ahead_of_their_turn_up_to_a_limit"
    writer_class = PiecesByOffset


class TestIgnoresTheAnnouncedSize(Suite):
    noticed_by = "test_another_size_than_announced_is_refused"

    class storage_class(MemoryStorage):
        def open_writer(self, key, *, size_bytes=None):
            return super().open_writer(key)


class TestPiecesAreAppended(Suite):
    """In the order they come, wherever they belong."""

    noticed_by = "test_pieces_in_any_order_give_the_object"

    class writer_class(Writer):
        at = 0

        def write_at(self, offset, data):
            super().write_at(self.at, data)
            self.at += memoryview(data).nbytes


class TestKeepsAReferenceToTheData(Suite):
    noticed_by = "test_data_may_be_reused_once_the_call_returns"

    class writer_class(Writer):
        def __init__(self, storage, writer, key):
            super().__init__(storage, writer, key)
            self._pieces = []

        def write_at(self, offset, data):
            self._writer.write_at(0, b"")
            self._pieces.append((offset, data))

        def finish(self):
            for offset, data in self._pieces:
                self._writer.write_at(offset, data)
            return super().finish()


class TestCountsItemsNotBytes(Suite):
    noticed_by = "test_every_kind_of_bytes_is_stored"

    class writer_class(Writer):
        def write_at(self, offset, data):
            view = memoryview(data)
            super().write_at(offset, bytes(view)[: len(view)])


class TestReplacedInTwoSteps(Suite):
    noticed_by = "test_readers_see_the_old_object_or_the_new_one_whole"

    class writer_class(Writer):
        def finish(self):
            self._storage.delete(self._key)
            time.sleep(0.001)
            return super().finish()


class TestReturnsTheWrongInfo(Suite):
    noticed_by = "test_an_object_is_invisible_until_finished_then_whole"

    class writer_class(Writer):
        def finish(self):
            return _with_version(super().finish(), "unknown")


def _with_version(info, version):
    return type(info)(
        key=info.key, size_bytes=info.size_bytes, version=version, modified_s=info.modified_s
    )
