"""Keeps the storage of a training tidy after its saves: prunes, and once collects what earlier runs
left. Knows when, not how; that a save is over is for its caller to know."""

import logging
import threading
from typing import final

from holdfast.catalog import Catalog, Retention
from holdfast.contracts import Clock
from holdfast.resilience import SystemClock

_log = logging.getLogger("holdfast.distributed")


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
