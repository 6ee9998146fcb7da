"""What tests of interrupts share."""

import sys
import time

from holdfast._lanes import Lane


def wait_until_it_waits(ident):
    """Return when that thread waits for the work of another to be over."""
    until = time.monotonic() + 30
    while not _is_waiting(sys._current_frames().get(ident)):
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.05)  # it is in the call, and the lock that it waits for is a moment away


def _is_waiting(frame):
    while frame is not None:
        if frame.f_code is Lane.wait.__code__:
            return True
        frame = frame.f_back
    return False
