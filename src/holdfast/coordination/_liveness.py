"""Which ranks are alive, as this rank's helper process tells it. Knows no store.

``Liveness`` starts the helper (`_beacon.py`), reads its lines on a thread and answers from
memory, so asking costs nothing and never blocks.
"""

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from typing import IO, cast, final

from holdfast.coordination import _beacon
from holdfast.coordination._beacon import DEAD, LEFT, RUNNING, SILENT
from holdfast.errors import CoordinationError

GOODBYE_S = 0.5

UNWATCHED = "unwatched"

LOSS_IN_WORDS = {
    DEAD: "died (its process ended)",
    SILENT: "fell silent (stopped, or its machine is unreachable)",
    LEFT: "has left (its coordinator was closed)",
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
        self._world_size = world_size
        self._states: dict[int, str] = {}
        self._changed = threading.Condition()
        self._helper_ended = False
        self.address: tuple[str, int] | None = None
        helper = subprocess.Popen(  # noqa: S603 -- our own file, no shell
            [sys.executable, "-I", "-S", _beacon.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what ends the rank's process group must not end its witness
        )
        self._finalizer = weakref.finalize(self, _end, helper)
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
            word, _, rest = stdout.readline().decode().strip().partition(" ")
        except BaseException:
            self._finalizer()
            raise
        if word not in ("listening", "connected"):
            self._finalizer()
            raise CoordinationError(
                f"the liveness helper of rank {rank} could not start: {rest or 'it ended'}. "
                "The hosts of a job must be able to reach each other's free ports",
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
        with self._changed:
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
        with self._changed:
            return {self._rank, *self._states}

    def wait_until_alone(self, timeout_s: float) -> None:
        """Wait until no other rank is running any more, or the time is up."""

        def alone() -> bool:
            others = [state for rank, state in self._states.items() if rank != self._rank]
            return self._helper_ended or RUNNING not in others

        with self._changed:
            self._changed.wait_for(alone, timeout_s)

    def close(self) -> None:
        """Tell the others that this rank leaves, and end the helper."""
        self._finalizer()

    def _hear(self, line: bytes) -> None:
        with self._changed:
            if not line:
                self._helper_ended = True
            else:
                state, rank = line.decode().split()
                self._states[int(rank)] = state
            self._changed.notify_all()


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


def _end(helper: "subprocess.Popen[bytes]") -> None:
    stdin = cast("IO[bytes]", helper.stdin)
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        stdin.write(_beacon.BYE)
        stdin.close()
    try:
        helper.wait(GOODBYE_S)
    except subprocess.TimeoutExpired:  # the hub stays for ranks that have not left
        helper.kill()
        helper.wait()
