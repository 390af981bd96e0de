"""Packages that a file of tests needs, found without an import."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def skip_file_without(package: str) -> None:
    """Skip the file that calls this, if a package is not installed.

    ``pytest.importorskip`` would import it. An import of onnxruntime starts a thread, and workers are forked from the
    process that has imported the files of tests.
    """
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
