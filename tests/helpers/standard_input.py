"""Standard input that a thread reads, such as one of a script that ends when its user presses Enter."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def read_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a thread of this process wait for a line of standard input. The line comes at the end of the block, which
    must have left standard input as it was."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        thread = threading.Thread(target=stdin.readline)
        thread.start()
        time.sleep(0.1)  # until it reads
        try:
            yield
        finally:
            os.write(writing, b"\n")
            thread.join(10)
            os.close(writing)
        assert sys.stdin is stdin
