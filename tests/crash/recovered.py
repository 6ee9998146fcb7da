"""A storage over what a crash left, in memory. Knows keys and bytes; knows no disk.

Everything that survived is old, so that no lease is alive any more.
"""

from collections.abc import Iterator, Mapping, Sequence

from holdfast.contracts import ObjectInfo, ReadRange
from holdfast.errors import ObjectChangedError, ObjectExistsError, ObjectNotFoundError
from holdfast.storage._new_file import RESERVED

NOW_S = 1e9


class Recovered:
    """``contracts.Storage``, but for writers, which nothing needs that looks at a crash."""

    url = "crash://"

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = dict(objects)
        self._modified = dict.fromkeys(objects, 0.0)
        self._versions = dict.fromkeys(objects, 0)
        self._changes = 0

    def create(self, key, data):
        if key in self.objects:
            raise ObjectExistsError("the key is taken", path=key)
        return self._put(key, data)

    def replace(self, key, data, expected):
        if self.stat(key).version != expected:
            raise ObjectChangedError("another version", path=key)
        return self._put(key, data)

    def read(self, key):
        self.stat(key)
        return self.objects[key]

    def read_into(self, key, ranges: Sequence[ReadRange]):
        data = self.read(key)
        for wanted in ranges:
            wanted.into.cast("B")[:] = data[wanted.start : wanted.start + wanted.into.nbytes]

    def list(self, prefix="") -> Iterator[ObjectInfo]:
        return iter([self.stat(key) for key in sorted(self.objects) if key.startswith(prefix)])

    def stat(self, key):
        if key not in self.objects:
            raise ObjectNotFoundError("there is no such object", path=key)
        return ObjectInfo(
            key=key,
            size_bytes=len(self.objects[key]),
            version=str(self._versions[key]),
            modified_s=self._modified[key],
        )

    def delete(self, key, *, expected=None):
        if expected is not None and key in self.objects and self.stat(key).version != expected:
            raise ObjectChangedError("another version", path=key)
        self.objects.pop(key, None)

    def free_bytes(self):
        return None

    def sweep(self, older_than_s):
        return 0

    def open_writer(self, key, *, size_bytes=None):
        raise NotImplementedError

    def _put(self, key, data):
        self._changes += 1
        self.objects[key] = bytes(data)
        self._versions[key] = self._changes
        self._modified[key] = NOW_S
        return self.stat(key)


def visible(image: Mapping[str, bytes], root: str) -> dict[str, bytes]:
    """The objects that a LocalStorage in the folder ``root`` shows of an image."""
    return {
        path.removeprefix(f"{root}/"): data
        for path, data in image.items()
        if path.startswith(f"{root}/")
        and not any(part.startswith(RESERVED) for part in path.split("/"))
    }
