"""A storage in an object store: S3, Google Cloud Storage, Azure. Knows requests, not retries."""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from holdfast import _checks
from holdfast.contracts import Data, ObjectInfo, ReadRange
from holdfast.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from holdfast.storage import _object_errors
from holdfast.storage._multipart import UploadSink
from holdfast.storage._object_errors import translated
from holdfast.storage._object_reads import Fetched, PastTheEndError, fetch_all, replaced
from holdfast.storage._ordered import OrderedWriter, announced
from holdfast.storage._ranges import check_ranges, small

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore

_LIST_CHUNK = 1000
_ANY_SIZE = 2**63
_UNKNOWN_TIME_S = 0.0
_PROCESS = os.getpid()


class ObjectStorage:
    """``contracts.Storage`` in an obstore ``store``, below ``prefix``. Use ``open_storage``.

    Every method is one request, plus one that asks for the time of what was written; nothing is
    tried again here. ``create`` and ``replace`` are the store's own conditional puts. A
    ``TransientStorageError`` from them leaves open whether they took effect. If what was just
    written is deleted before its time can be asked, the write has worked all the same: its
    ``modified_s`` is then 0.0, as old as can be, since no clock but the store's would be true.
    obstore cannot delete one version of an object, so ``delete`` with ``expected`` is refused.

    Versions are ETags: most stores give equal bytes the same one. Large objects are uploaded in
    parts while they are written; parts of a writer that failed or was aborted are removed at
    once. Those of a killed process are not visible here, and ``sweep`` cannot remove them: a
    lifecycle rule of the bucket does. ``list`` asks as it is iterated. A forked process cannot
    use object storages that its parent opened, nor others.
    """

    def __init__(self, store: "ObjectStore", *, prefix: str = "", url: str) -> None:
        self._store = store
        self._folder = f"{_checks.key('prefix', prefix)}/" if prefix else ""
        self._url = url
        self._by_generation = isinstance(store, GCSStore)
        # Azure with a hierarchical namespace and S3 Express (--x-s3) list in their own orders.
        self._lists_in_order = isinstance(store, GCSStore) or (
            isinstance(store, S3Store) and "--x-s3" not in url
        )
        self._reads_backslashes = isinstance(store, AzureStore)

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    @property
    def url(self) -> str:
        return self._url

    def open_writer(self, key: str, *, size_bytes: int | None = None) -> OrderedWriter:
        path = self._path(key)
        announced(size_bytes)

        def put(data: bytearray) -> "PutResult":
            with translated("write the object", key):
                return obstore.put(self._store, path, data, use_multipart=False)

        def put_parts(parts: Iterator[bytearray], size: int, count: int) -> "PutResult":
            with translated("write the object", key), _object_errors.end_unknown(key):
                return obstore.put(
                    self._store,
                    path,
                    parts,
                    use_multipart=True,
                    chunk_size=size,
                    max_concurrency=count,
                )

        sink = UploadSink(
            key,
            size_bytes=size_bytes,
            put=put,
            put_parts=put_parts,
            published=lambda result, size: self._written(key, size, result),
        )
        return OrderedWriter(key, sink, size_bytes=size_bytes)

    def create(self, key: str, data: Data) -> ObjectInfo:
        path = self._path(key)
        view = small(_checks.data("data", data), key)
        with translated("create the object", key):
            try:
                result = obstore.put(self._store, path, view, mode="create")
            except AlreadyExistsError as error:
                if not _object_errors.says_taken(error):
                    raise
                raise ObjectExistsError("the key is taken", path=key) from error
        return self._written(key, view.nbytes, result)

    def replace(self, key: str, data: Data, expected: str) -> ObjectInfo:
        path = self._path(key)
        view = small(_checks.data("data", data), key)
        wanted = self._update(key, expected)
        with translated("replace the object", key):
            try:
                result = obstore.put(self._store, path, view, mode=wanted)
            except (PreconditionError, FileNotFoundError) as error:
                raise self._changed(key, expected) from error
        return self._written(key, view.nbytes, result)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with translated("read the object", key):
            found = obstore.get(self._store, path)
            size, data = found.meta["size"], found.bytes().to_bytes()
        if len(data) != size:
            raise TransientStorageError(
                f"the server sent {len(data)} of the object's {size} bytes", path=key
            )
        return data

    def read_into(self, key: str, ranges: Sequence[ReadRange]) -> None:
        path = self._path(key)
        check_ranges(ranges, _ANY_SIZE, key)
        if not all(wanted.into.nbytes for wanted in ranges) or not ranges:
            check_ranges(ranges, self.stat(key).size_bytes, key)

        def fetch(start: int, stop: int) -> Fetched:
            try:
                with translated("read the object", key):
                    found = obstore.get(self._store, path, options={"range": (start, stop)})
                    version = _version(found.meta["e_tag"])
                    return Fetched(body=memoryview(found.bytes()), version=version)
            except StorageError as error:
                if _object_errors.says_past_the_end(error.__cause__):
                    raise PastTheEndError from error
                raise

        try:
            fetch_all(ranges, fetch, key)
        except PastTheEndError as error:
            found = self.stat(key)
            if error.versions <= {found.version}:
                check_ranges(ranges, found.size_bytes, key)
            raise replaced(key) from error

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        _refuse_after_fork(prefix)
        folder = prefix.rpartition("/")[0]
        if folder and any(part in {"", ".", ".."} for part in folder.split("/")):
            return iter(())
        found = self._listed(folder, prefix)
        if self._lists_in_order:
            return found
        return iter(sorted(found, key=lambda info: info.key))

    def stat(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with translated("look at the object", key):
            return _info(key, obstore.head(self._store, path))

    def delete(self, key: str, *, expected: str | None = None) -> None:
        path = self._path(key)
        if expected is not None:
            raise StorageError(
                "one version of an object cannot be deleted in an object store: obstore deletes "
                "whatever is there; nothing was removed",
                path=key,
            )
        try:
            with translated("delete the object", key):
                obstore.delete(self._store, path)
        except ObjectNotFoundError:
            return

    def free_bytes(self) -> int | None:
        return None

    def sweep(self, older_than_s: float) -> int:
        _checks.seconds("older_than_s", older_than_s, zero=True)
        return 0

    def _path(self, key: str) -> str:
        _refuse_after_fork(key)
        _checks.key("key", key)
        if self._reads_backslashes and "\\" in key:
            raise ValueError(f"key cannot be stored in Azure, which takes \\ for /: {key!r}")
        return self._folder + key

    def _listed(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """What is below ``folder`` and starts with ``prefix``. obstore lists whole folders."""
        under = (self._folder + folder).rstrip("/") or None
        with translated("list the storage", prefix or self._url):
            chunks = obstore.list(self._store, under, chunk_size=_LIST_CHUNK)
        while True:
            with translated("list the storage", prefix or self._url):
                chunk = next(chunks, None)
            if chunk is None:
                return
            for meta in chunk:
                key = meta["path"].removeprefix(self._folder)
                if key.startswith(prefix):
                    yield _info(key, meta)
                elif self._lists_in_order and key > prefix:
                    return

    def _written(self, key: str, size: int, result: "PutResult") -> ObjectInfo:
        """What was just put. Its version is the put's own, also if another has followed it."""
        try:
            found = self.stat(key)
        except ObjectNotFoundError:
            version, modified_s = _version(result["e_tag"]), _UNKNOWN_TIME_S
        else:
            version = found.version if result["e_tag"] is None else _version(result["e_tag"])
            modified_s = found.modified_s
        return ObjectInfo(key=key, size_bytes=size, version=version, modified_s=modified_s)

    def _update(self, key: str, expected: str) -> "UpdateVersion":
        """The condition under which the store replaces the object."""
        if not self._by_generation:
            return {"e_tag": _e_tag(expected)}
        # Google compares generations, which its lists do not tell: ask for that of this ETag.
        with translated("look at the object", key):
            meta = obstore.head(self._store, self._path(key))
        if _version(meta["e_tag"]) != expected:
            raise ObjectChangedError(
                f"expected version {expected}, found {_version(meta['e_tag'])}", path=key
            )
        return {"e_tag": meta["e_tag"], "version": meta["version"]}

    def _changed(self, key: str, expected: str) -> ObjectChangedError:
        found = self.stat(key).version
        return ObjectChangedError(f"expected version {expected}, found {found}", path=key)


def _info(key: str, meta: "ObjectMeta") -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size_bytes=meta["size"],
        version=_version(meta["e_tag"]),
        modified_s=meta["last_modified"].timestamp(),
    )


def _version(e_tag: str | None) -> str:
    """An ETag without its quotes, which Azure leaves out of its lists."""
    if e_tag is None:
        raise StorageError("the store gives no ETags, so changes cannot be seen; it is no storage")
    return e_tag.removeprefix('"').removesuffix('"') if e_tag.startswith('"') else e_tag


def _e_tag(version: str) -> str:
    return version if version.startswith("W/") else f'"{version}"'


def _refuse_after_fork(key: str) -> None:
    """obstore's threads stay behind in the parent: its calls would never return."""
    if os.getpid() != _PROCESS:
        raise StorageError(
            "this process was forked from one that used object storages, and cannot use them; "
            "start it with spawn, or fork before a storage is opened",
            path=key,
        )
