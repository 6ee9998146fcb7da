"""The real clock. The only place in this room that asks the system for the time."""

import asyncio
import time


class SystemClock:
    """``time.monotonic`` and real sleeping. Stateless, so it is safe to share anywhere."""

    __slots__ = ()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
