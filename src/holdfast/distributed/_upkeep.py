"""Keeps the storage of a training tidy after its saves: prunes, and once collects what earlier runs
left. Knows when, not how; that a save is over is for its caller to know."""

import logging
import threading
from typing import Final, final

from holdfast.catalog import Catalog, Retention
from holdfast.contracts import Clock
from holdfast.resilience import SystemClock

_log = logging.getLogger("holdfast.distributed")

PATIENCE_S: Final = 60.0
"""How long a save or a checkpointer that is closed waits for its upkeep."""


@final
class Upkeep:
    """What the rank that commits does after each save of one checkpointer. Thread-safe."""

    def __init__(
        self, catalog: Catalog, retention: Retention, *, clock: Clock | None = None
    ) -> None:
        self._catalog = catalog
        self._retention = retention
        self._clock = SystemClock() if clock is None else clock
        self._collect_at_s = self._clock.now() + catalog.lease_s
        self._collected = False
        self._busy = threading.Lock()
        self._turn = threading.Lock()
        self._wanted = 0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """``after_save`` in the background, once more if it is under way already. What goes wrong
        is logged: the checkpoint is there."""
        with self._turn:
            self._wanted += 1
            if self._wanted > 1:
                return
        thread = threading.Thread(target=self._work, name="holdfast-upkeep", daemon=True)
        self._thread = thread
        thread.start()

    def finish(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until what was begun has ended, but not longer than that."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning(
                    "the upkeep of %s goes on in the background", self._catalog.storage.url
                )

    def _work(self) -> None:
        done = 0
        while done < self._wanted:
            done = self._wanted
            try:
                self.after_save()
            except Exception as error:  # noqa: BLE001 -- the checkpoint is there
                _log.warning(
                    "the upkeep after a save failed; it is tried after the next: %s", error
                )
            with self._turn:
                if done == self._wanted:
                    self._wanted = 0
                    return

    def after_save(self) -> None:
        """Prune; and once, as soon as a lease has passed since this was made, collect what saves
        left that never finished: by then that of a run which was killed before this one began
        is given up. What goes wrong is raised, and is done after the next save.

        While the upkeep after an earlier save is still under way this does nothing.
        """
        if not self._busy.acquire(blocking=False):
            _log.info("the upkeep after an earlier save is still under way")
            return
        try:
            report = self._catalog.prune(self._retention)
            for prefix, problem in report.failed.items():
                _log.warning("%s could not be pruned: %s", prefix, problem)
            if not self._collected and self._clock.now() > self._collect_at_s:
                self._catalog.gc()
                self._collected = True
        finally:
            self._busy.release()
