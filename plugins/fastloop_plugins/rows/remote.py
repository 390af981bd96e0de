"""Files at URLs of fsspec: listed, described and read. A request that fails for a moment is repeated."""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

from fastloop.errors import RecipeError, first_cause
from fastloop.problem import Problem, clause, typed_clause

logger = logging.getLogger("fastloop")

Result = TypeVar("Result")

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each repetition of a request: a server that restarts answers again within half a minute."""
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes of HTTP after which the same request may succeed."""
NOT_FOUND = frozenset({404, 410})
"""Status codes of HTTP for a file that is not there."""
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError, TypeError, LookupError)
"""Errors without a status code after which a request is not repeated."""
AHEAD = 2**20
"""Bytes that a file reads ahead. The lanes of a stream read several places of a file in turn, and each change of place
discards what was read ahead: with the default of s3fs, 50 MB."""
MARKS = ("ETag", "etag", "LastModified", "mtime", "created", "blob_id")
"""Facts of fsspec about a remote file that change with its content. No store has all of them."""


class RemoteError(OSError):
    """A server does not give a file. The message is a part of a sentence."""


def repeat_request(url: str, request: Callable[[], Result]) -> Result:
    """Make a request, and repeat it up to five times while it fails for a moment. A warning names each repetition.

    Raises:
        RemoteError: It failed each time, or the server refuses it.
        OSError: There is no such file, or it cannot be read.
        ImportError: The package for such URLs is not installed.
        ValueError: The URL is malformed, or the server answers no range requests.
    """
    repeats = 0
    while True:
        try:
            return request()
        except Exception as error:  # each package of fsspec raises errors of its own
            reason = explain_failure(error)
            if not is_temporary(error):
                if status_of(error) in (None, *NOT_FOUND):
                    raise
                raise RemoteError(reason) from error
            if repeats == len(WAITS):
                raise RemoteError(f"{reason}, also after {repeats} repetitions of the request") from error
            wait = WAITS[repeats]
        repeats += 1
        logger.warning(
            Problem(
                f"{reason}. The request is repeated in {wait:g} s ({repeats} of {len(WAITS)}).",
                code="request-repeated",
                place=url,
            )
        )
        time.sleep(wait)


def status_of(error: BaseException) -> int | None:
    """The status code of HTTP that caused an error; None: the error has none.

    fsspec raises ``FileNotFoundError`` for each failed request about a file, so only the first cause says more.
    """
    root = first_cause(error)
    status = getattr(root, "status", None)  # aiohttp
    response = getattr(root, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:  # requests, httpx
        status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def is_temporary(error: BaseException) -> bool:
    """Whether the request that raised an error may succeed when it is repeated."""
    status = status_of(error)
    if status is not None:
        return status in TEMPORARY
    return not isinstance(first_cause(error), PERMANENT)


def explain_failure(error: BaseException) -> str:
    """The reason of a failed request as a part of a sentence."""
    status = status_of(error)
    if status is None:
        return f"a request failed: {typed_clause(first_cause(error))}"
    try:
        return f"the server answered {status} {HTTPStatus(status).phrase}"
    except ValueError:  # not a code of the standard
        return f"the server answered {status}"


class RemoteFile(io.RawIOBase):
    """A file at a URL, open for reading.

    Raises:
        OSError, ImportError, ValueError: See ``repeat_request``.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._file: Any = None
        import fsspec  # type: ignore[import-untyped]

        def request() -> Any:
            system, path = fsspec.core.url_to_fs(url)
            return system.open(path, "rb", block_size=AHEAD)

        self._file = repeat_request(url, request)
        if getattr(self._file, "size", 0) is None:
            raise RemoteError("the server answers no range requests, or does not state the size of the file")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        position: int = self._file.tell()
        return position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position: int = self._file.seek(offset, whence)
        return position

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, or to the end of the file. A request that fails for a moment is repeated."""
        start = self.tell()

        def request() -> bytes:
            self._file.seek(start)
            content: bytes = self._file.read(size)
            return content

        return repeat_request(self.url, request)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def find_remote_files(url: str, where: str) -> list[str]:
    """The URLs of a file, or of the files that match a pattern, in order.

    Raises:
        RecipeError: They cannot be listed, or there are none.
    """
    import fsspec

    def request() -> list[str]:
        system, path = fsspec.core.url_to_fs(url)
        if re.search(r"[*?\[]", path):
            paths = sorted(system.glob(path))
        else:
            paths = [path] if system.info(path)["type"] == "file" else []
        return [system.unstrip_protocol(path) for path in paths]

    try:
        urls = repeat_request(url, request)
    except FileNotFoundError:
        urls = []
    except (ImportError, OSError, ValueError) as error:
        raise RecipeError(
            f"cannot be listed: {clause(error)}.", code="unreachable-url", place=f"{where}: {url}"
        ) from None
    if not urls:
        raise RecipeError(f"no file matches {url}.", code="file-missing", place=where)
    return urls


def remote_state(url: str) -> str | None:
    """A string that changes when a remote file is written; None: its store has no fact that does.

    Raises:
        RecipeError: The file cannot be found.
    """
    import fsspec

    def request() -> dict[str, Any]:
        system, path = fsspec.core.url_to_fs(url)
        info: dict[str, Any] = system.info(path)
        return info

    try:
        info = repeat_request(url, request)
    except (ImportError, OSError, ValueError) as error:
        raise RecipeError(f"cannot be read: {clause(error)}.", code="unreachable-url", place=url) from None
    marks = [str(info[name]) for name in MARKS if info.get(name)]
    return f"{url} {info.get('size')} {marks}" if marks else None
