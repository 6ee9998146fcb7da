"""Counts the seconds in which a storage makes what was written durable. Changes nothing else."""

from holdfast.contracts import Data, ObjectInfo, ObjectWriter, Storage
from holdfast.distributed._save_record import Timings
from holdfast.storage._wrapped import Through, WrappedStorage, WrappedWriter


def timed(storage: Storage, timings: Timings) -> Storage:
    """``storage``, whose writers add the time of ``finish()`` to ``timings`` as "fsync"."""
    return _TimedStorage(storage, timings)


class _TimedStorage(WrappedStorage):
    def __init__(self, storage: Storage, timings: Timings) -> None:
        super().__init__(storage)
        self._timings = timings

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> ObjectWriter:
        writer = self._inner.open_writer(key, size_bytes=size_bytes)
        return _TimedWriter(writer, key, self._through, self._timings)


class _TimedWriter(WrappedWriter):
    def __init__(self, writer: ObjectWriter, key: str, through: Through, timings: Timings) -> None:
        super().__init__(writer, key, through)
        self._timings = timings

    def write_at(self, offset: int, data: Data) -> None:
        self._writer.write_at(offset, data)

    def finish(self) -> ObjectInfo:
        with self._timings.measure("fsync"):
            return super().finish()
