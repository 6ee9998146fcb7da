"""The helper process that tells the other ranks whether this one lives.

One runs beside every rank, started with nothing but the standard library, so that it beats
even while its rank is inside a C call that holds the interpreter for seconds. It looks at its
parent twenty times a second: ended, stopped, or running. Rank 0's helper is the hub: the
others keep a connection to it, and it passes on every change to all of them. The hub is not
rank 0 itself, so a rank 0 that dies or stops is reported like any other.

A closed connection means *dead*; no sign of a running rank for ``timeout_s`` means *silent*.
To its rank the helper writes one line per change: ``running 3``, ``silent 3``, ``dead 3``,
``left 3``. Known limits: if the hub's machine vanishes, the others report rank 0 silent and
know no more of each other; stopped processes are recognised only where ``/proc`` exists.
"""

import contextlib
import hmac
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from typing import Any

LOOK_S = 0.05
HANDSHAKE_S = 10.0
HELLO_BYTES = 4096
ORPHAN_S = 60.0

# What asks a job to end is often sent to all of its processes. A rank may have work to finish then,
# and would be taken for dead if its helper ended first.
IGNORED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")

RUNNING, SILENT, DEAD, LEFT = "running", "silent", "dead", "left"
# One byte each on the way to the hub.
BEAT, BYE, GONE = b"+", b"x", b"d"


class Parent:
    """The rank beside which this helper runs."""

    def __init__(self) -> None:
        self._pid = os.getppid()
        self._stat = f"/proc/{self._pid}/stat"

    def state(self) -> str:
        if os.getppid() != self._pid:
            return DEAD
        try:
            with open(self._stat, "rb") as file:  # noqa: PTH123 -- pathlib costs start-up time
                letter = file.read().rpartition(b")")[2][1:2]
        except OSError:
            return RUNNING  # no /proc here; the parent is ours, so it exists
        if letter in b"Tt":
            return SILENT
        return DEAD if letter in b"ZX" else RUNNING


class Table:
    """What is known of every rank, and since when. Pure: the time is an argument."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._states: dict[int, str] = {}
        self._seen: dict[int, float] = {}

    def saw(self, rank: int, now: float) -> list[str]:
        self._seen[rank] = now
        return self.set(rank, RUNNING)

    def set(self, rank: int, state: str) -> list[str]:
        """The lines to pass on. Dead and left are final."""
        if self._states.get(rank) in (state, DEAD, LEFT):
            return []
        self._states[rank] = state
        return [f"{state} {rank}"]

    def excuse(self, now: float) -> None:
        """Count every rank as seen now: it was this side that could not look."""
        self._seen = dict.fromkeys(self._seen, now)

    def age(self, now: float) -> list[str]:
        late = [
            rank
            for rank, state in self._states.items()
            if state == RUNNING and now - self._seen[rank] > self._timeout_s
        ]
        return [line for rank in late for line in self.set(rank, SILENT)]

    def states(self) -> list[str]:
        return list(self._states.values())

    def lines(self) -> list[str]:
        return [f"{state} {rank}" for rank, state in self._states.items()]


class Peer:
    """One connection: bytes in, bytes out, never blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.rank: int | None = None
        self.since = time.monotonic()
        self._inbox = b""
        self._outbox = b""

    def send(self, data: bytes) -> None:
        self._outbox += data
        try:
            while self._outbox:
                self._outbox = self._outbox[self.sock.send(self._outbox) :]
        except BlockingIOError:
            pass  # the rest goes with the next beat
        except OSError:
            self._outbox = b""  # the reading side will see the connection end

    def receive(self) -> bytes | None:
        """What has come, or ``None`` once the connection has ended."""
        try:
            return self.sock.recv(65536) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    @property
    def rest(self) -> bytes:
        """What came after the last whole line."""
        return self._inbox

    def lines(self, data: bytes) -> list[str]:
        *whole, self._inbox = (self._inbox + data).split(b"\n")
        return [line.decode("ascii", "replace") for line in whole if line]


class Beacon:
    """One helper: watches its parent, talks to the hub or is it, and tells its rank."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rank = int(config["rank"])
        self.world_size = int(config["world_size"])
        self.token = str(config["token"])
        self.timeout_s = float(config["timeout_s"])
        self.beat_s = min(1.0, self.timeout_s / 4)
        self.parent = Parent()
        self.table = Table(self.timeout_s)
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, "stdin")
        self.peers: set[Peer] = set()
        self.hub: Peer | None = None
        self.heard = time.monotonic()
        self.quiet = False  # nothing heard from the hub for too long
        self.says = RUNNING  # the hub's last word about rank 0
        self.untold = b""
        os.set_blocking(1, False)  # a stopped rank reads nothing, and must not stop this helper
        if config["hub"] is None:
            family = socket.AF_INET6 if ":" in config["bind"] else socket.AF_INET
            self.listener = socket.create_server((config["bind"], 0), family=family, backlog=4096)
            self.listener.setblocking(False)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for every rank
            self.selector.register(self.listener, selectors.EVENT_READ, "listener")
            self.tell([f"listening {self.listener.getsockname()[1]}"])
        else:
            sock = socket.create_connection(tuple(config["hub"]), timeout=HANDSHAKE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.hub = Peer(sock)
            self.hub.send(json.dumps({"token": self.token, "rank": self.rank}).encode() + b"\n")
            self.selector.register(sock, selectors.EVENT_READ, self.hub)
            self.tell(["connected 0"])

    def run(self) -> None:
        """Until the rank leaves or dies, and at the hub until the others have gone too."""
        mine = RUNNING
        next_beat = 0.0
        ends_at = float("inf")
        looked = time.monotonic()
        while looked < ends_at:
            word = self.hear()
            now = time.monotonic()
            if now - looked > self.beat_s:  # this helper was itself stopped, or starved
                self.table.excuse(now)
                self.heard = max(self.heard, now)
            looked = now
            state = mine if mine in (LEFT, DEAD) else word or self.parent.state()
            if state != mine or now >= next_beat:
                next_beat = now + self.beat_s
                # A rank found stopped was running a moment ago: its silence begins now.
                self.beat(state, now, seen=RUNNING in (mine, state))
            if state in (LEFT, DEAD) and mine not in (LEFT, DEAD):
                self.retire(state)
                ends_at = now + ORPHAN_S
            mine = state
            if mine in (LEFT, DEAD) and self.is_idle(mine):
                return
            self.tell([])
            if self.hub is None:
                self.publish(self.table.age(now))
            elif now - self.heard > self.timeout_s:
                self.quiet = True
                self.tell(self.table.set(0, SILENT))

    def beat(self, state: str, now: float, *, seen: bool) -> None:
        if self.hub is None:
            if seen:
                self.publish(self.table.saw(0, now))
            if state in (LEFT, DEAD):
                self.publish(self.table.set(0, state))
            for peer in self.peers:
                peer.send(b"" if peer.rank is None else b"\n")
        elif state in (LEFT, DEAD):
            self.hub.send(BYE if state == LEFT else GONE)
        elif seen:
            self.hub.send(BEAT)

    def retire(self, state: str) -> None:
        """The rank is gone. Those who know this helper are served on. If it died nobody new is
        taken in, so that a restarted job does not mistake this helper for its own."""
        self.selector.unregister(0)
        if self.hub is None and state == DEAD:
            self.selector.unregister(self.listener)
            self.listener.close()

    def is_idle(self, state: str) -> bool:
        """Whether nobody needs this helper any more; who has not joined yet may still come,
        to hear that the rank has left in good order."""
        if self.hub is not None:
            return True
        states = self.table.states()
        return RUNNING not in states and (state == DEAD or len(states) == self.world_size)

    def hear(self) -> str | None:
        """Take in what came within ``LOOK_S``; the rank's last word if it spoke it."""
        word = None
        for key, _ in self.selector.select(LOOK_S):
            if key.data == "stdin":  # a goodbye, or the end of a rank that said none
                word = LEFT if os.read(0, 4096) else DEAD
            elif key.data == "listener":
                self.accept()
            elif key.data is self.hub and self.hub is not None:
                self.hear_hub(self.hub)
            else:
                self.hear_peer(key.data)
        for peer in [p for p in self.peers if p.rank is None]:
            if time.monotonic() - peer.since > HANDSHAKE_S:
                self.drop(peer)
        return word

    def accept(self) -> None:
        with contextlib.suppress(OSError):  # a connection that ended before it was taken
            sock, _ = self.listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(sock)
            self.peers.add(peer)
            self.selector.register(sock, selectors.EVENT_READ, peer)

    def hear_hub(self, hub: Peer) -> None:
        data = hub.receive()
        if data is None:
            self.selector.unregister(hub.sock)
            hub.sock.close()
            self.heard = float("inf")
            self.tell(self.table.set(0, DEAD))
            return
        self.heard = time.monotonic()
        for line in hub.lines(data):
            state, rank = line.split()
            self.says = state if rank == "0" else self.says
            self.tell(self.table.set(int(rank), state))
        if self.quiet:
            self.quiet = False
            self.tell(self.table.set(0, self.says))

    def hear_peer(self, peer: Peer) -> None:
        data = peer.receive()
        if data is None:
            self.lose(peer, DEAD)
        elif peer.rank is None:
            self.greet(peer, data)
        elif GONE in data or BYE in data:
            self.lose(peer, DEAD if GONE in data else LEFT)
        elif BEAT in data:
            self.publish(self.table.saw(peer.rank, time.monotonic()))

    def greet(self, peer: Peer, data: bytes) -> None:
        lines = peer.lines(data)
        if not lines and len(peer.rest) < HELLO_BYTES:
            return
        try:
            hello = json.loads(lines[0])
            known = hmac.compare_digest(str(hello["token"]), self.token)
            rank = int(hello["rank"])
        except (LookupError, ValueError, TypeError, OverflowError, RecursionError):
            known, rank = False, 0
        if not known or not 0 < rank < self.world_size:
            self.drop(peer)  # a stranger: it learns nothing and changes nothing
            return
        peer.rank = rank
        self.publish(self.table.saw(rank, time.monotonic()))
        peer.send("".join(line + "\n" for line in self.table.lines()).encode())
        if BYE in peer.rest:  # it joined and left before the hub looked
            self.lose(peer, LEFT)

    def lose(self, peer: Peer, state: str) -> None:
        self.drop(peer)
        if peer.rank is not None:
            self.publish(self.table.set(peer.rank, state))

    def drop(self, peer: Peer) -> None:
        self.selector.unregister(peer.sock)
        peer.sock.close()
        self.peers.discard(peer)

    def publish(self, lines: list[str]) -> None:
        """To this rank and to every other."""
        self.tell(lines)
        for peer in self.peers:
            if peer.rank is not None:
                peer.send("".join(line + "\n" for line in lines).encode())

    def tell(self, lines: list[str]) -> None:
        """To this rank alone. Its end of the pipe closes when it dies; the others still count."""
        self.untold += "".join(line + "\n" for line in lines).encode()
        try:
            while self.untold:
                self.untold = self.untold[os.write(1, self.untold) :]
        except BlockingIOError:
            pass  # the rest goes with the next look
        except OSError:
            self.untold = b""


def main() -> None:
    for name in IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        config = json.loads(stdin.readline())
    try:
        beacon = Beacon(config)
    except OSError as error:
        sys.stdout.write(f"failed {error}\n")
        return
    beacon.run()


if __name__ == "__main__":
    main()
