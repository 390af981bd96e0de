"""A local HTTP server of a folder: it answers range requests, counts what it sends, and fails on demand."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class RangeHandler(BaseHTTPRequestHandler):
    """Answers requests for files, or ranges of their bytes."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def send(self, code: int, content: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        """Send an answer, without its content after a HEAD request."""
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_file(self, content: bytes, headers: Mapping[str, str] = {}) -> None:
        """Send a file, or the range that the request names."""
        found = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes", **headers}
        span = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range", ""))
        if span is None:
            self.send(200, content, found)
            return
        first = int(span[1])
        last = min(int(span[2] or len(content) - 1), len(content) - 1)
        if first > last:
            self.send(416, headers={"Content-Range": f"bytes */{len(content)}"})
            return
        self.send(206, content[first : last + 1], found | {"Content-Range": f"bytes {first}-{last}/{len(content)}"})


class FileServer:
    """The state of a server.

    Attributes:
        url: Its address, without a slash at the end.
        sent: Bytes of ranges that it sent.
        status: The answer to a request that fails.
        failures: Number of requests for a range that fail from now on. A request for ``/fail/NUMBER`` sets it.
        failed: Number of requests that failed so far.
        down: Whether each request fails.
    """

    def __init__(self, url: str, root: Path) -> None:
        self.url = url
        self.root = root
        self.sent = 0
        self.status = 503
        self.failures = 0
        self.failed = 0
        self.down = False
        self.lock = threading.Lock()

    def takes_failure(self, is_range: bool) -> bool:
        """Whether a request fails; counts it."""
        with self.lock:
            if not self.down and not (is_range and self.failures):
                return False
            self.failures -= 0 if self.down else 1
            self.failed += 1
            return True


@contextmanager
def file_server(root: Path) -> Iterator[FileServer]:
    """A server of the files of a folder."""

    class Handler(RangeHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path).removeprefix("/")
            if path.startswith("fail/"):
                state.failures = int(path.removeprefix("fail/"))
                self.send(200)
            elif state.takes_failure("Range" in self.headers):
                self.send(state.status)
            elif not (root / path).is_file():
                self.send(404)
            else:
                self.send_file((root / path).read_bytes())

        def send(self, code: int, content: bytes = b"", headers: Mapping[str, str] = {}) -> None:
            super().send(code, content, headers)
            if code == 206:
                with state.lock:
                    state.sent += len(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state = FileServer(f"http://127.0.0.1:{server.server_port}", root)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
