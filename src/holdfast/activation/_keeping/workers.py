"""Threads that work for an owner and end with it. Knows queues and weak references; not the work.

The threads are daemons, or an owner that somebody forgot would keep the interpreter from ending;
and an owner that is still there when it ends is closed first, for a thread of Python's that is
stopped inside torch takes the process down with it.
"""

import atexit
import functools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Owner(Protocol):
    def close(self) -> None: ...


Work = Callable[[Any, Any], None]
"""Called with the owner and an item, or ``None`` in the place of an item that is gone."""

_Queue = queue.SimpleQueue[weakref.ref[Any] | None]

_log = logging.getLogger("holdfast.activation")


class Workers:
    """One thread for each kind of work, started when they are first needed. Thread-safe.

    Owner and items are known weakly, so neither a queue nor an idle thread keeps them alive.
    """

    def __init__(self, owner: Owner, works: tuple[Work, ...]) -> None:
        self._works = works
        self._queues: tuple[_Queue, ...] = tuple(queue.SimpleQueue() for _ in works)
        self._owner = weakref.ref(owner)
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        at_exit = functools.partial(_close_at_exit, self._owner, self._process)
        atexit.register(at_exit)
        self._end = weakref.finalize(owner, _end, self._queues, at_exit)
        self._end.atexit = False

    @property
    def are_here(self) -> bool:
        """Whether this is the process that has the threads: one that was forked has not."""
        return os.getpid() == self._process

    def start(self) -> bool:
        """Whether the threads are running: there are none to be had while Python exits. Not to be
        called twice at a time."""
        if not self._threads:
            for work, items in zip(self._works, self._queues, strict=True):
                arguments = (items, work, self._owner)
                thread = threading.Thread(
                    target=_serve, args=arguments, name="holdfast-tier", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    break
                self._threads.append(thread)
        return len(self._threads) == len(self._works)

    def put(self, kind: int, item: Any) -> None:
        """Have an item worked on, after those that were put before it."""
        self._queues[kind].put(weakref.ref(item))

    def is_one_of_them(self) -> bool:
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """Let every thread end after what it was given. Idempotent, does not wait."""
        self._end()

    def join(self) -> None:
        """Wait for the threads to end, unless called by one of them."""
        for thread in self._threads:
            if self.are_here and thread is not threading.current_thread():
                thread.join()


def _serve(items: _Queue, work: Work, owner_ref: weakref.ref[Owner]) -> None:
    while (ref := items.get()) is not None:
        owner, item = owner_ref(), ref()
        try:
            if owner is not None:
                work(owner, item)
        except BaseException:  # noqa: BLE001 -- logged; see below
            # Must not end this thread: whoever waits for its work would wait for ever.
            _log.exception("a thread of a tier failed in one piece of its work, and goes on")
        finally:
            del owner, item  # or the thread would keep them until it is given the next


def _end(queues: tuple[_Queue, ...], at_exit: Callable[[], None]) -> None:
    # In any thread, at any point of its work: a SimpleQueue can be put to even then.
    for each in queues:
        each.put(None)
    atexit.unregister(at_exit)


def _close_at_exit(owner_ref: weakref.ref[Owner], process: int) -> None:
    owner = owner_ref()
    if owner is not None and os.getpid() == process:
        owner.close()
