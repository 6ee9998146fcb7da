"""Every wrapper keeps the contract of what it wraps, alone and in the recommended order."""

from holdfast.distributed._save_record import Timings
from holdfast.distributed._timed import timed
from holdfast.resilience import RetryPolicy
from holdfast.storage import MemoryStorage, breaking, deadlined, limited, retrying
from holdfast.testing import FaultyStorage, StorageConformance, seeded_rng

FAST = RetryPolicy(max_retries=50, initial_delay_s=0)


class TestRetrying(StorageConformance):
    def make_storage(self, tmp_path):
        return retrying(MemoryStorage())


class TestRetryingWhatFailsNowAndThen(StorageConformance):
    """One call in twenty fails, of reads and of small writes; nobody notices.

    Not those of a writer, which cannot be tried again.
    """

    large_bytes = 100_000
    many_objects = 20

    # A replace may be refused though it was there until another replaced it: counted twice.
    test_no_update_is_lost_between_threads = None

    def make_storage(self, tmp_path):
        return retrying(_StreamsWork(MemoryStorage()), FAST)


class TestDeadlined(StorageConformance):
    many_objects = 100

    def make_storage(self, tmp_path):
        return deadlined(MemoryStorage(), 60)


class TestBreaking(StorageConformance):
    def make_storage(self, tmp_path):
        return breaking(MemoryStorage())


class TestLimited(StorageConformance):
    def make_storage(self, tmp_path):
        return limited(MemoryStorage(), read_bytes_per_s=1e12, write_bytes_per_s=1e12)


class TestLimitedInSmallPieces(StorageConformance):
    """A clock that does not wait, so that the pieces are as small as they get."""

    def make_storage(self, tmp_path):
        return limited(MemoryStorage(), read_bytes_per_s=1, write_bytes_per_s=1, clock=_NoWaiting())


class TestTimed(StorageConformance):
    """The one that a save puts around its storage."""

    def make_storage(self, tmp_path):
        return timed(MemoryStorage(), Timings())


class TestFaultyWithoutFaults(StorageConformance):
    def make_storage(self, tmp_path):
        return FaultyStorage(MemoryStorage())


class TestAllInTheRecommendedOrder(StorageConformance):
    many_objects = 100

    def make_storage(self, tmp_path):
        storage = limited(MemoryStorage(), read_bytes_per_s=1e12, write_bytes_per_s=1e12)
        return retrying(breaking(deadlined(storage, 60)))


class _StreamsWork(FaultyStorage):
    """Fails by chance, except in writers: they go to what is inside."""

    def __init__(self, storage):
        super().__init__(storage, error_rate=0.05, rng=seeded_rng(3))

    def open_writer(self, key, *, size_bytes=None):
        return self._inner.open_writer(key, size_bytes=size_bytes)


class _NoWaiting:
    def now(self):
        return 0.0

    def sleep(self, seconds):
        pass

    async def sleep_async(self, seconds):
        pass
