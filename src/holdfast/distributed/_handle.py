"""A save in the background, as its caller and its thread hold it: a future and a promise. Knows
what is told of it, not how it goes."""

import asyncio
import functools
from collections.abc import Callable, Generator
from typing import Any, Final, final

from holdfast import _checks
from holdfast.distributed._ending import Ending
from holdfast.distributed._progress import Progress, bytes_in_words
from holdfast.distributed._save_record import SaveRecord
from holdfast.errors import OperationTimeoutError
from holdfast.resilience._operation import require_callable

_DOING: Final = {
    "capture": "capturing",
    "agree": "agreeing",
    "begin": "beginning",
    "compare": "comparing",
    "write": "writing",
    "commit": "committing",
}


@final
class SaveHandle:
    """A save that goes on while the training does: what ``save_async`` returns. Thread-safe.

    Much like a ``concurrent.futures.Future`` of the prefix, and awaitable in asyncio. It is of this
    rank; the save ends alike on all.

    An error is raised by ``result()`` and ``await``, and given by ``exception()``. One that nobody
    asks for is not lost: it is raised at the checkpointer's next save, or when that is closed.
    """

    def __init__(self, ending: Ending) -> None:
        self._ending = ending

    @property
    def step(self) -> int | None:
        """As in ``SaveOptions``."""
        return self._ending.step

    @property
    def prefix(self) -> str | None:
        """The checkpoint's name, once the save has one. There is a checkpoint when the save is
        done, not before."""
        return self._ending.prefix

    @property
    def record(self) -> SaveRecord | None:
        """What the save took, once it is done."""
        return self._ending.record if self.done() else None

    def progress(self) -> Progress | None:
        """How far this rank is, or was in the end; ``None`` if nothing has begun yet."""
        return self._ending.now()

    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return self._ending.is_over.is_set()

    def cancelled(self) -> bool:
        """Whether the save has ended because it was cancelled, so that there is no checkpoint."""
        return self.done() and self._ending.is_cancelled()

    def cancel(self) -> bool:
        """Give the save up, on all ranks. Waits for nobody.

        False if that is too late: it is done, or about to be committed. If True it ends soon, and
        then is ``cancelled()``. What was saved before is intact, and nothing is left of this one.
        """
        return self._ending.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the save has ended, in up to ``timeout`` seconds from now. Raises none of its
        errors."""
        limit_s = None if timeout is None else _checks.seconds("timeout", timeout, zero=True)
        return self._ending.is_over.wait(limit_s)

    def result(self, timeout: float | None = None) -> str:
        """The prefix, when the checkpoint is durable; or raise what the save failed with.

        ``OperationTimeoutError``, a ``TimeoutError``, if it is not done in ``timeout`` seconds; it
        goes on. ``concurrent.futures.CancelledError`` if it was cancelled.
        """
        self._wait_or_raise(timeout)
        try:
            return self._ending.outcome()
        finally:
            del self  # or the error would keep this frame, and the frame the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What ``result()`` would raise, or ``None``. Raises only if the save is not done in
        time."""
        self._wait_or_raise(timeout)
        return self._ending.seen_error()

    def add_done_callback(self, fn: Callable[["SaveHandle"], object]) -> None:
        """Have ``fn(handle)`` called when the save has ended: by the thread that saves, in the
        order in which they were added, or at once if it has. What ``fn`` raises is logged."""
        require_callable(fn, "fn")
        self._ending.add_callback(functools.partial(fn, self))

    def __await__(self) -> Generator[Any, None, str]:
        """As ``result()``. A task that is cancelled meanwhile leaves the save alone."""
        if not self.done():
            yield from self._until_done(asyncio.get_running_loop())
        try:
            return self._ending.outcome()
        finally:
            del self  # as in result

    def _until_done(self, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, None]:
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def call_back() -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:
                if not loop.is_closed():  # else nobody waits any more
                    raise

        self._ending.add_callback(call_back)
        try:
            yield from woken
        finally:
            self._ending.drop_callback(call_back)

    def __repr__(self) -> str:
        what = f"step {self.step}" if self.step is not None else self.prefix
        return f"SaveHandle({what}: {self._doing()})" if what else f"SaveHandle({self._doing()})"

    def _doing(self) -> str:
        ending, now = self._ending, self.progress()
        if ending.is_over.is_set():
            if ending.error is None:
                return f"saved as {ending.prefix}"
            return "cancelled" if self.cancelled() else f"failed, {type(ending.error).__name__}"
        if ending.stopping:
            return "being cancelled"
        if now is None:
            return "starting"
        doing = _DOING.get(now.phase, now.phase)
        if not now.total_bytes:
            return doing
        return f"{doing}, {bytes_in_words(now.done_bytes)} of {bytes_in_words(now.total_bytes)}"

    def _wait_or_raise(self, timeout: float | None) -> None:
        if not self.wait(timeout) and timeout is not None:
            raise OperationTimeoutError(
                f"{self!r} was not done after {timeout:g} s. The save goes on: ask again later, or "
                "cancel() it",
                timeout_s=timeout,
            )


@final
class Promise:
    """The side of the thread that saves. Every promise is kept once, by ``keep``.

    ``progress``: how far the save is now. ``on_cancel``: stop the save if it can be stopped, and
    say whether; True promises that nothing will be committed. It is called by any thread, any
    number of times, and must not wait. Both are forgotten at the end, as they may know the whole
    state.
    """

    def __init__(
        self,
        *,
        step: int | None,
        progress: Callable[[], Progress | None],
        on_cancel: Callable[[], bool],
    ) -> None:
        self._ending = Ending(step=step, now=progress, on_cancel=on_cancel)
        self.handle = SaveHandle(self._ending)

    def set_prefix(self, prefix: str) -> None:
        """The save has begun under this name."""
        self._ending.prefix = prefix

    def as_told(self, error: BaseException) -> BaseException:
        """The error as the handle will raise it: that a save failed after it was told to stop, on
        this rank or another, is that it was cancelled."""
        return self._ending.as_told(error)

    def keep(self, prefix: str, error: BaseException | None, record: SaveRecord) -> None:
        """The checkpoint is durable, or the save failed with ``error``, ``as_told``.

        The frames in which the error went up are forgotten: a handle is kept for as long as
        anybody likes, and must not keep tensors.
        """
        if error is None:
            self._ending.prefix = prefix
        self._ending.end(error, record)

    def take_unseen(self) -> BaseException | None:
        """The error, if nobody was given it yet; who asks is given it now. That a save was
        cancelled is none: somebody wanted it."""
        return self._ending.take_unseen()
