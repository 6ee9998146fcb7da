"""Which ranks are alive, as this rank's helper process tells it. Knows no store.

``Liveness`` starts the helper (`_beacon.py`), reads its lines on a thread and answers from
memory, so asking costs nothing and never blocks.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from typing import IO, cast, final

from holdfast.coordination import _beacon
from holdfast.coordination._beacon import DEAD, LEFT, SILENT
from holdfast.errors import CoordinationError

GOODBYE_S = 0.5
LINGER_S = 5.0
START_S = 20.0

UNWATCHED = "unwatched"

LOSS_IN_WORDS = {
    DEAD: "died (its process ended)",
    SILENT: "fell silent (stopped, or its machine is unreachable)",
    LEFT: "has left (it closed its coordinator, or its program came to its end)",
    UNWATCHED: "lost its liveness helper process (killed?)",
}


@final
class Liveness:
    """The state of every rank that has joined. Thread-safe.

    ``hub`` is the address of rank 0's helper, or ``None`` on rank 0, whose ``address`` the
    others then connect to.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        token: str,
        bind: str,
        hub: tuple[str, int] | None,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._states: dict[int, str] = {}
        self._lock = threading.Lock()
        self._helper_ended = False
        self.address: tuple[str, int] | None = None
        helper = subprocess.Popen(  # noqa: S603 -- our own file, no shell
            [sys.executable, "-I", "-S", _beacon.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what ends the rank's process group must not end its witness
        )
        patience_s = LINGER_S if hub is None else GOODBYE_S
        self._finalizer = weakref.finalize(self, _end, helper, os.getpid(), patience_s)
        config = {
            "rank": rank,
            "world_size": world_size,
            "token": token,
            "bind": bind,
            "hub": hub,
            "timeout_s": timeout_s,
        }
        stdin, stdout = cast("IO[bytes]", helper.stdin), cast("IO[bytes]", helper.stdout)
        try:
            stdin.write(json.dumps(config).encode() + b"\n")
            stdin.flush()
            if not select.select([stdout], [], [], START_S)[0]:
                helper.kill()
            word, _, rest = stdout.readline().decode().strip().partition(" ")
        except BaseException:
            self._finalizer()
            stdout.close()
            raise
        if word not in ("listening", "connected"):
            self._finalizer()
            stdout.close()
            raise CoordinationError(
                f"the liveness helper of rank {rank} could not start: {rest or 'it ended'}",
                rank=rank,
            )
        if word == "listening":
            self.address = (bind, int(rest))
        # Given a weak reference: a thread that held this object would keep it, and the helper,
        # for ever.
        threading.Thread(
            target=_listen, args=(weakref.ref(self), stdout), name="holdfast-liveness", daemon=True
        ).start()

    def lost(self) -> dict[int, str]:
        """Ranks that cannot take part any more, and how they were lost."""
        with self._lock:
            lost = {
                rank: state
                for rank, state in self._states.items()
                if state in LOSS_IN_WORDS and rank != self._rank
            }
            if self._helper_ended:
                lost[self._rank] = UNWATCHED
            return lost

    def joined(self) -> set[int]:
        """Ranks that have made their coordinator, this one included."""
        with self._lock:
            return {self._rank, *self._states}

    def close(self) -> bool:
        """Tell the others that this rank leaves, and end the helper: rank 0's when the others
        have gone too, but at most 5 s later. Whether the helper ended by itself."""
        return bool(self._finalizer())

    def _hear(self, line: bytes) -> None:
        with self._lock:
            if not line:
                self._helper_ended = True
            else:
                state, rank = line.decode().split()
                self._states[int(rank)] = state


def _listen(liveness: "weakref.ref[Liveness]", stdout: IO[bytes]) -> None:
    with stdout:
        while True:
            line = stdout.readline()
            owner = liveness()
            if owner is None:
                return
            owner._hear(line)  # noqa: SLF001 -- the two halves of one thing
            if not line:
                return
            del owner


def _end(helper: "subprocess.Popen[bytes]", owner: int, patience_s: float) -> bool:
    if os.getpid() != owner:  # a forked child must not say goodbye in its parent's name
        return False
    stdin = cast("IO[bytes]", helper.stdin)
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        stdin.write(_beacon.BYE)
        stdin.close()
    try:
        helper.wait(patience_s)
    except subprocess.TimeoutExpired:  # ranks are still running, or the helper is stopped
        helper.kill()
        helper.wait()
        return False
    return helper.returncode == 0
