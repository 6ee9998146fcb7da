"""Disks that can be held up, watched and broken, and ways to wait for a tier."""

import collections
import ctypes
import errno
import mmap
import os
import threading

import torch

from holdfast.activation._events import Subscribers
from holdfast.activation._keeping.disk_tier import DiskStore
from holdfast.activation._keeping.memory_stats import MemoryAccount
from holdfast.activation._keeping.moving_tier import MovingTier
from holdfast.activation._keeping.scratch import ScratchFile
from holdfast.storage._system import System

SIZE = 256 * 1024
WAIT_S = 60


class Disk(System):
    """The real disk, with gates before it, a record of who used it, and errors on demand."""

    def __init__(self, *, direct=True):
        self.offers_direct = direct
        self.writing = threading.Event()
        self.reading = threading.Event()
        self.may_write = threading.Event()
        self.may_read = threading.Event()
        self.may_write.set()
        self.may_read.set()
        self.reads = []
        self.read_done = threading.Semaphore(0)
        self.write_error = None
        self.writes_before_error = 0
        self.read_error = None
        self.truncate_error = None
        self.truncating = threading.Event()
        self.may_truncate = threading.Event()
        self.may_truncate.set()
        self.refuse_direct_writes = False

    def create_file(self, name, folder, *, direct=False):
        return super().create_file(name, folder, direct=direct and self.offers_direct)

    def make_buffered(self, fd):
        self.refuse_direct_writes = False
        super().make_buffered(fd)

    def write(self, fd, data, offset):
        self.writing.set()
        assert self.may_write.wait(WAIT_S)
        if self.refuse_direct_writes:
            raise OSError(errno.EINVAL, "no direct I/O here")
        if self.write_error is not None and not self.writes_before_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        self.writes_before_error = max(0, self.writes_before_error - 1)
        return super().write(fd, data, offset)

    def truncate(self, fd, size):
        self.truncating.set()
        assert self.may_truncate.wait(WAIT_S)
        if self.truncate_error is not None:
            raise OSError(self.truncate_error, os.strerror(self.truncate_error))
        super().truncate(fd, size)

    def read(self, fd, into, offset):
        self.reading.set()
        assert self.may_read.wait(WAIT_S)
        self.reads.append((threading.get_ident(), offset))
        if self.read_error is not None:
            raise OSError(self.read_error, os.strerror(self.read_error))
        got = super().read(fd, into, offset)
        self.read_done.release()
        return got


class Bench:
    """A moving tier on a ``Disk``, and what it tells."""

    def __init__(self, folder, disk=None, **limits):
        self.disk = disk or Disk()
        self.file = ScratchFile(str(folder), self.disk)
        self.account = MemoryAccount()
        self.lock = threading.Lock()
        self.subscribers = Subscribers()
        self.events = []
        self._told = threading.Condition()
        self.subscribers.add(self._hear)
        self.tier = MovingTier(
            DiskStore(self.file), self.account, self.lock, self.subscribers, **limits
        )

    def _hear(self, event):
        with self._told:
            self.events.append(event)
            self._told.notify_all()

    def hold(self, tensor, layer_id="layer", *, lasting=False):
        return self.tier.hold(tensor, layer_id, lasting=lasting)

    def layers(self, kind):
        return [event.layer_id for event in self.events if event.kind == kind]

    def wait_for(self, kind, count):
        """Until so many events of a kind were told."""
        with self._told:
            assert self._told.wait_for(lambda: len(self.layers(kind)) >= count, WAIT_S)

    def hold_moved(self, *tensors):
        """Hold tensors and wait until all are on the disk, whatever else is on its way there."""
        names = [f"layer {i}" for i, _ in enumerate(tensors)]
        before = collections.Counter(self.layers("moved"))
        held = [self.hold(tensor, name) for tensor, name in zip(tensors, names, strict=True)]

        def are_moved():
            now = collections.Counter(self.layers("moved"))
            return all(now[name] > before[name] for name in names)

        with self._told:
            assert self._told.wait_for(are_moved, WAIT_S)
        self.tidy()
        return held

    def tidy(self):
        with self.lock:
            self.tier.tidy()

    def file_bytes(self):
        return os.fstat(self.file._fd).st_size

    def cached_pages(self):
        """How many pages of the file the page cache has. Asking brings none in."""
        size = self.file_bytes()
        fd = os.open(f"/proc/self/fd/{self.file._fd}", os.O_RDWR)
        with mmap.mmap(fd, size) as memory:
            os.close(fd)
            found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            start = ctypes.c_char.from_buffer(memory)
            address = ctypes.c_void_p(ctypes.addressof(start))
            assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), found) == 0
            del start
        return sum(each & 1 for each in found)

    def is_uncached(self):
        """Whether the page cache comes to have nothing of the file: what is just being read ahead
        is dropped when it was read."""
        pause = threading.Event()
        return any(not self.cached_pages() or pause.wait(0.01) for _ in range(100 * WAIT_S))

    def close(self):
        self.disk.may_write.set()
        self.disk.may_read.set()
        self.disk.may_truncate.set()
        self.tier.close()


def some(n=SIZE, seed=0):
    """A tensor of so many random bytes."""
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=_generator(seed))


def _generator(seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def bits(tensor):
    """Its elements as bytes, in order: what ``==`` on floats does not see."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy())
