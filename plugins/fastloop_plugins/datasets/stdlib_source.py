"""A corpus that ships with Python: the source of its standard library, to train a language model offline.

    data: {module: "fastloop_plugins.datasets.stdlib_source:stdlib_source"}

Each file is one row; a tenth of the files is the validation split.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings"}
"""Folders that are not part of the standard library, or contain mostly tables and tests."""


def stdlib_source(largest: int = 100_000, validation: float = 0.1) -> dict[str, list[dict[str, str]]]:
    """Build ``train`` and ``validation``: one row for each file, with its ``text`` and ``path``.

    A checksum of its path assigns a file to a split, so splits are the same on every machine with this Python.

    Args:
        largest: Skip files with more characters.
        validation: Approximate share of files in the validation split.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    splits: dict[str, list[dict[str, str]]] = {"train": [], "validation": []}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if LEFT_OUT & set(path.parts):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if 0 < len(text) <= largest:
            split = "validation" if zlib.crc32(path.as_posix().encode()) % 1000 < validation * 1000 else "train"
            splits[split].append({"text": text, "path": path.as_posix()})
    return splits
