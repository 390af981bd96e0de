"""A local server with the part of the hub's HTTP interface that lists and reads the files of datasets."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from file_server import RangeHandler

ROUTE = re.compile(
    r"/(?:api/)?datasets/((?:[\w.-]+/)?[\w.-]+?)(?:/(revision|tree|paths-info|resolve)/([^/]+)(?:/(.*))?)?$"
)
CONVERTED = "refs/convert/parquet"


def commit_of(folder: Path) -> str:
    """The commit of a revision: a hash of its files."""
    found = hashlib.sha1()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)} ".encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


class Hub:
    """The datasets of a server.

    Args:
        root: Has a folder ``NAME/main`` for each dataset, and ``NAME/convert`` for its Parquet copy. Other folders
            beside them are earlier commits.
        closed: Name -> ``RepoNotFound`` for a private dataset, ``GatedRepo`` for one with terms.

    Attributes:
        requests: Method and path of each request so far.
    """

    def __init__(self, root: Path, closed: Mapping[str, str]) -> None:
        self.root = root
        self.closed = closed
        self.requests = list[str]()

    def folder(self, name: str, revision: str | None) -> Path | None:
        """The files of a revision: a branch, or a commit."""
        part = {None: "main", "main": "main", CONVERTED: "convert"}.get(revision)
        folders = [folder for folder in sorted((self.root / name).iterdir()) if folder.is_dir()]
        return next((folder for folder in folders if folder.name == part or commit_of(folder) == revision), None)


class Handler(RangeHandler):
    """Answers one request."""

    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        if url.path == "/":
            return self._send(200)
        match = ROUTE.match(url.path)
        if match is None:
            return self._send(404)
        name = match[1]
        kind = match[2]
        revision = match[3]
        path = unquote(match[4] or "")
        if name in self.hub.closed:
            return self._send(401, error=self.hub.closed[name])
        if not (self.hub.root / name).is_dir():
            return self._send(401, error="RepoNotFound")
        folder = self.hub.folder(name, None if revision is None else unquote(revision))
        if folder is None:
            return self._send(404, error="RevisionNotFound")
        sha = commit_of(folder)
        if kind == "resolve":
            return self._file(folder / path, sha)
        files = sorted(folder.rglob("*"))
        if kind == "tree":
            inside = [file for file in files if (folder / path) in file.parents]
            if not inside:
                return self._send(404, error="EntryNotFound")
            if parse_qs(url.query).get("recursive", ["false"])[0].lower() != "true":
                inside = [file for file in inside if file.parent == folder / path]
            return self._json([_entry(file, folder) for file in inside])
        if kind == "paths-info":
            asked = json.loads(self.content) if self.content.startswith(b"{") else parse_qs(self.content.decode())
            wanted = [asked["paths"]] if isinstance(asked["paths"], str) else asked["paths"]
            return self._json([_entry(folder / item, folder) for item in wanted if (folder / item).exists()])
        names = [{"rfilename": str(file.relative_to(folder))} for file in files if file.is_file()]
        return self._json({"id": name, "sha": sha, "siblings": names, "private": False, "tags": [], "downloads": 0})

    def _file(self, path: Path, sha: str) -> None:
        if path.is_file():
            self.send_file(path.read_bytes(), {"X-Repo-Commit": sha})
        else:
            self._send(404, error="EntryNotFound")

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, content: bytes = b"", headers: Mapping[str, str] = {}, error: str = "") -> None:
        own = {"X-Error-Code": error} if error else {}
        self.send(code, content, {**headers, **own})


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    found = {"path": str(path.relative_to(folder))}
    if path.is_dir():
        return found | {"type": "directory", "oid": _oid(str(path).encode())}
    content = path.read_bytes()
    return found | {"type": "file", "oid": _oid(content), "size": len(content)}


@contextmanager
def hub_server(root: Path, closed: Mapping[str, str] | None = None) -> Iterator[tuple[str, Hub]]:
    """Serve the datasets under a folder inside this context. Yields the address and the hub."""
    hub = Hub(root, closed or {})
    handler = type("Bound", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", hub
        finally:
            server.shutdown()
