"""Whether torchvision and timm are installed, for tests of image models."""

from __future__ import annotations

import importlib

import pytest


def importable(name: str) -> bool:
    """Whether a package is installed, in a build that this torch can load."""
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError, OSError):
        return False
    return True


needs_torchvision = pytest.mark.skipif(not importable("torchvision"), reason="needs torchvision")
needs_timm = pytest.mark.skipif(not importable("timm"), reason="needs timm")
