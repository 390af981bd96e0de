"""Processes that are forked from this one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_stdin() -> Iterator[None]:
    """Hide standard input from processes that multiprocessing forks in this context.

    A forked process closes it first, which waits for ever if a thread of this process is reading from it: the thread
    holds its lock, and does not exist in the forked process.
    """
    stdin = sys.stdin
    sys.stdin = None
    try:
        yield
    finally:
        sys.stdin = stdin
