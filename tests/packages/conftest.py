"""fastloop as a wheel, and venvs that have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock
from package_helpers import ROOT, CleanVenv, build_wheels


@pytest.fixture(scope="session")
def fastloop_wheel(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """fastloop's own wheel, built once for all of pytest-xdist's workers."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "fastloop_wheel"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            build_wheels(shared, ROOT)
    return next(shared.glob("*.whl"))


@pytest.fixture
def clean_venv(tmp_path: Path, fastloop_wheel: Path) -> CleanVenv:
    """A venv with fastloop alone."""
    return CleanVenv(tmp_path / "venv", fastloop_wheel)
