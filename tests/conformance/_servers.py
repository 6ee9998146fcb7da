"""Real object stores for tests: emulator processes, and a proxy in front of them that breaks.

Servers listen on free loopback ports and are ended by their own process id. The proxy is a
thread of the test; what it does to requests is set from the test.
"""

import contextlib
import http.client
import http.server
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

START_S = 30.0

Action = Literal["answer", "reset", "lose", "truncate", "stall", "late", "twice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as a fault rule sees it. ``number`` counts from 1 over the proxy's life."""

    number: int
    method: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens instead of a faithful answer.

    ``answer``: ``status`` at once, the server sees nothing. ``reset``: the connection breaks,
    the server sees nothing. ``lose``: the server acts, then the connection breaks. ``truncate``:
    the body ends in its middle. ``stall``: no answer until the proxy closes. ``late``: the server
    acts, and there is no answer for ``delay_s``. ``twice``: a faithful answer, and after
    ``delay_s`` the server gets the request once more.
    """

    action: Action
    status: int = 503
    body: bytes = b""
    delay_s: float = 0.0


@dataclass(slots=True)
class Proxy:
    """A running proxy. ``rule`` is asked about every request; ``None`` lets it through."""

    url: str
    rule: Callable[[Request], Fault | None] = lambda _: None
    requests: list[Request] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, method: str, target: str) -> Request:
        with self.lock:
            request = Request(number=len(self.requests) + 1, method=method, target=target)
            self.requests.append(request)
            return request


@contextlib.contextmanager
def proxy_to(upstream: str) -> Iterator[Proxy]:
    """A proxy in front of ``upstream`` (``http://host:port``)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    proxy = Proxy(url=f"http://127.0.0.1:{server.server_address[1]}")
    server.proxy, server.upstream = proxy, urlsplit(upstream).netloc
    server.uploads = threading.Lock()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy = self.server.proxy
        try:
            self._act(proxy.rule(proxy.take(self.command, self.path)), body)
        except OSError:  # one side is gone, and the other shall see so
            self._break()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do  # noqa: N815 -- http.server's names

    def _act(self, fault: Fault | None, body: bytes) -> None:
        if fault is None:
            self._send(*self._forward(body))
        elif fault.action == "answer":
            self._send(fault.status, [], fault.body)
        elif fault.action == "reset":
            self._break()
        elif fault.action == "lose":
            self._forward(body)
            self._break()
        elif fault.action == "truncate":
            self._send(*self._forward(body), cut=True)
        elif fault.action == "late":
            self._forward(body)
            self.server.proxy.closing.wait(fault.delay_s)
            self._break()
        elif fault.action == "twice":
            self._send(*self._forward(body))
            self.wfile.flush()
            self.server.proxy.closing.wait(fault.delay_s)
            self._forward(body)
        else:
            self.server.proxy.closing.wait()
            self._break()

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        if len(body) < int(self.headers.get("Content-Length") or 0):
            raise ConnectionError("the client is gone")
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        # moto fails to remove an upload while it takes a part of it, and keeps it.
        alone = self.server.uploads if "uploadId=" in self.path else contextlib.nullcontext()
        with alone, contextlib.closing(connection):
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _send(
        self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def _break(self) -> None:
        """Close with a reset, as a host that goes away does."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

    def log_message(self, *_: object) -> None:
        """Say nothing: the test says what went wrong."""


@contextlib.contextmanager
def moto_server(log: Path) -> Iterator[str]:
    """A moto process that speaks S3; yields its URL. ``log`` takes what it prints."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1"]
    with _process(command, log, health="/moto-api/") as url:
        yield url


@contextlib.contextmanager
def azurite_server(program: str, folder: Path) -> Iterator[str]:
    """An Azurite process that speaks Azure Blob Storage; yields its URL."""
    command = [program, "--blobHost", "127.0.0.1", "--inMemoryPersistence", "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", "--disableProductStyleUrl"]
    with _process(command, folder / "azurite.log", port_flag="--blobPort") as url:
        yield url


@contextlib.contextmanager
def _process(
    command: list[str], log: Path, *, port_flag: str = "-p", health: str = "/"
) -> Iterator[str]:
    port = _free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, port_flag, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
        )
    try:
        _wait_until_it_answers(process, port, health, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_answers(
    process: subprocess.Popen[bytes], port: int, health: str, log: Path
) -> None:
    deadline = time.monotonic() + START_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        try:
            connection.request("GET", health)
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{process.args} did not start: {said}") from None
            time.sleep(0.05)
        else:
            return
        finally:
            connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
