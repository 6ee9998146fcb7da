"""MemoryStorage keeps the contract."""

from holdfast.storage import MemoryStorage
from holdfast.testing import StorageConformance


class TestMemoryStorage(StorageConformance):
    def make_storage(self, tmp_path):
        return MemoryStorage()
