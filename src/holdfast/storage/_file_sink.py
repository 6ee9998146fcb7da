"""One object on its way to its file. Knows what is left to do if its writer is forgotten, not
where the object is to be."""

import weakref
from collections.abc import Callable

from holdfast.contracts import ObjectInfo
from holdfast.storage._folders import translated
from holdfast.storage._new_file import NewFile
from holdfast.storage._streams import WriteStream


class FileSink:
    """``_ordered.Sink`` that writes to ``file`` through ``stream``.

    One that is neither published nor discarded is dropped when it is collected; if it is still
    there when the interpreter ends, its hidden file is removed and later calls fail.
    """

    def __init__(
        self, key: str, file: NewFile, stream: WriteStream, *, publish: Callable[[], ObjectInfo]
    ) -> None:
        self._key = key
        self._file = file
        self._stream = stream
        self._publish = publish
        # Neither the stream nor its threads refer to the sink, or it would never be collected.
        self._forgotten = weakref.finalize(self, _forget, weakref.ref(self), stream, file)

    def append(self, data: memoryview) -> None:
        with translated("write the object", self._key, writing=True):
            self._stream.append(data)

    def publish(self) -> ObjectInfo:
        with translated("write the object", self._key, writing=True):
            self._file.seal(self._stream.finish())
            info = self._publish()
            self._file.close()
        self._forgotten.detach()
        return info

    def discard(self) -> None:
        self._forgotten.detach()
        try:
            self._stream.close()
        finally:  # after an interrupt, too: nobody writes to it any more
            with translated("remove what was written", self._key):
                self._file.close()


def _forget(sink: "weakref.ref[FileSink]", stream: WriteStream, file: NewFile) -> None:
    if sink() is None:
        stream.abandon(file.close)
        return
    # The interpreter ends, and some thread may still be writing: it must not find its descriptors
    # closed, or worse, used again. They end with the process.
    stream.refuse()
    file.remove_hidden()
