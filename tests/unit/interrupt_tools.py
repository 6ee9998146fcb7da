"""What tests of interrupts share."""

import sys
import threading
import time


def wait_until_it_joins(ident):
    """Return when that thread waits for another to end."""
    until = time.monotonic() + 30
    while not _is_joining(sys._current_frames().get(ident)):
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.05)  # it is in the call, and the lock that it waits for is a moment away


def _is_joining(frame):
    while frame is not None:
        if frame.f_code is threading.Thread.join.__code__:
            return True
        frame = frame.f_back
    return False
