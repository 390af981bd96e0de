"""Traces of torch's profiler on disk: complete, or absent."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop.runtime.files import naming

if TYPE_CHECKING:
    import torch

END = b"}"
"""Last byte of a complete trace, apart from white space."""
TAIL = 16
"""Bytes at the end of a trace that are read to find its last one."""


def write_trace(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the trace of a profiler in the format of Chrome, for ``.gz`` compressed.

    On a full disk, torch leaves a part of the trace or a temporary file beside it, and raises no error. So the trace is
    written in a folder that is removed in any case, and moved to its place when it is complete.

    Raises:
        OSError: It cannot be written; names ``path``.
    """
    with naming(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-", suffix=".partial") as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        if not is_complete(trace):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if path.suffix == ".gz":
            compressed = Path(folder, "trace.json.gz")
            with trace.open("rb") as source, gzip.open(compressed, "wb") as target:
                shutil.copyfileobj(source, target)
            trace = compressed
        trace.replace(path)


def is_complete(trace: Path) -> bool:
    """Whether a trace was written to its end."""
    if not trace.is_file():
        return False
    with trace.open("rb") as file:
        file.seek(max(trace.stat().st_size - TAIL, 0))
        return file.read().rstrip().endswith(END)
