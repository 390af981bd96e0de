"""``fastloop report --watch``: serves the page to this machine only, and renders it again when a file has changed.

``GET /`` is the page, ``GET /version`` a text that changes with the files. The page's script asks for it every second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
import socketserver
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from fastloop.errors import UsageError
from fastloop_tools.report.page import Live, render
from fastloop_tools.report.read import Found, files, read

HOST = "127.0.0.1"
LOCAL = (HOST, "localhost")
"""Host names that a request may use. A web site cannot read the page through a name of its own that leads to this machine."""


class LivePage:
    """The newest page of some folders. Requests of several threads share it."""

    def __init__(self, folders: Sequence[Path], title: str) -> None:
        self.folders, self.title, self.nonce = folders, title, secrets.token_urlsafe(16)
        self._lock, self._rendered = threading.Lock(), ("", "")

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
                    found = read(self.folders)
                except UsageError as error:
                    problem = str(error)
                self._rendered = (version, render(found, self.title, Live(version, self.nonce), problem))
            return self._rendered[1]


class Handler(BaseHTTPRequestHandler):
    """Answers requests for the page and its version."""

    server: Server
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request."""
        answers: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html", self.server.live.page),
            "/version": ("text/plain", self.server.live.version),
        }
        if (self.headers.get("Host") or "").rpartition(":")[0] not in LOCAL and self.headers.get("Host") not in LOCAL:
            self.send_error(403, "Only for this machine")
        elif self.path not in answers:
            self.send_error(404)
        else:
            kind, answer = answers[self.path]
            content = answer().encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log no requests."""


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A server of one page, on this machine's own address.

    Raises:
        UsageError: The port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True  # a port is free again as soon as its server has ended

    def __init__(self, live: LivePage, port: int) -> None:
        self.live = live
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            reason = "another program uses it" if error.errno == errno.EADDRINUSE else str(error)
            raise UsageError(f"--port {port}: {reason}. Name another port, or leave --port out for a free one.") from None

    def handle_error(self, request: Any, address: Any) -> None:
        """Ignore a browser that has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
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
            raise UsageError(f"{folder}: no such folder. Expected an output folder of `fastloop train`, `sweep`, `bench` or `profile`.")
    with Server(LivePage(folders, title), port) as server, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the server
        started(f"http://{HOST}:{server.server_address[1]}/")
        server.serve_forever()
