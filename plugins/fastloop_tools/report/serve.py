"""``fastloop report --watch``: serves the page to this machine only, and renders it again when a file has changed.

``GET /TOKEN/`` is the page, ``GET /TOKEN/version`` a text that changes with the files. The page's script asks for it
every second. Only the user who started the command knows the token: other users of this machine reach the port, too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from fastloop.errors import UsageError
from fastloop_tools.report.metrics import Metrics
from fastloop_tools.report.page import render
from fastloop_tools.report.read import Found, files, read

HOST = "127.0.0.1"
LOCAL = (HOST, "localhost")
"""Host names that a request may use. A web site cannot read the page through a name of its own that leads to this
machine."""
CONNECTIONS = 32
"""Most connections at a time. Another one closes the oldest."""


class LivePage:
    """The newest page of some folders. Requests of several threads share it."""

    def __init__(self, folders: Sequence[Path], title: str) -> None:
        self.folders, self.title, self.nonce = folders, title, secrets.token_urlsafe(16)
        self._lock, self._rendered, self._logs = threading.Lock(), ("", ""), dict[Path, Metrics]()

    def version(self) -> str:
        """A hash of names, sizes and times of change of the files."""
        found = [(str(folder), int(folder.is_dir()), 0) for folder in self.folders]
        for path in files(self.folders):
            try:
                stat = path.stat()
            except OSError:  # removed since it was listed
                continue
            found.append((str(path), stat.st_size, stat.st_mtime_ns))
        return hashlib.blake2b(repr(sorted(found)).encode(), digest_size=8).hexdigest()

    def page(self) -> str:
        """The page. If a folder cannot be read now, the page shows the reason."""
        with self._lock:
            version = self.version()  # before the files are read: a change meanwhile is another version
            if self._rendered[0] != version:
                found, problem = Found(), ""
                try:
                    found = read(self.folders, self._logs)
                except UsageError as error:
                    problem = str(error)
                self._rendered = (
                    version,
                    render(found, self.title, {"version": version, "nonce": self.nonce}, problem),
                )
            return self._rendered[1]


class Handler(BaseHTTPRequestHandler):
    """Answers requests for the page and its version."""

    server: Server
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request."""
        answers: dict[str, tuple[str, Callable[[], str]]] = {
            "": ("text/html", self.server.live.page),
            "version": ("text/plain", self.server.live.version),
        }
        token, _, name = self.path.removeprefix("/").partition("/")
        if (self.headers.get("Host") or "").rpartition(":")[0] not in LOCAL and self.headers.get("Host") not in LOCAL:
            self.send_error(403, "Only for this machine")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self.send_error(403, "Open the address that the command has printed")
        elif name not in answers:
            self.send_error(404)
        else:
            kind, answer = answers[name]
            content = answer().encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log no requests."""


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A server of one page, on this machine's own address.

    Attributes:
        address: The page's address, with the token.

    Raises:
        UsageError: The port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True  # a port is free again as soon as its server has ended
    request_queue_size = CONNECTIONS

    def __init__(self, live: LivePage, port: int) -> None:
        self.live, self.token = live, secrets.token_urlsafe(16)
        self._open: list[socket.socket] = []
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            reason = "another program uses it" if error.errno == errno.EADDRINUSE else str(error)
            raise UsageError(
                f"--port {port}: {reason}. Name another port, or leave --port out for a free one."
            ) from None
        self.address = f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread of its own."""
        self._open.append(request)
        for oldest in self._open[:-CONNECTIONS]:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, address: Any) -> None:
        """Ignore a browser that has closed its connection, or does not read its answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, address)


def serve(folders: Sequence[Path], title: str, port: int, started: Callable[[str], Any]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        port: 0: any free port.
        started: Called with the page's address.

    Raises:
        UsageError: A folder does not exist, or the port cannot be used.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(
                f"{folder}: no such folder. Expected an output folder of `fastloop train`, `sweep`, `bench` or "
                "`profile`."
            )
    # Ctrl-C ends the server
    with Server(LivePage(folders, title), port) as server, contextlib.suppress(KeyboardInterrupt):
        started(server.address)
        server.serve_forever()
