"""fastloop as a wheel, and venvs that have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock
from package_helpers import ROOT, CleanVenv, build_wheels


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of all of pytest-xdist's workers."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def fastloop_wheel(shared: Path) -> Path:
    """fastloop's own wheel, built once for all workers."""
    folder = shared / "fastloop_wheel"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            build_wheels(folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def clean_venv(shared: Path, fastloop_wheel: Path) -> CleanVenv:
    """A venv with fastloop alone, made once for all workers: nothing may be installed into it."""
    folder = shared / "clean_venv"
    with FileLock(f"{folder}.lock"):
        return CleanVenv(folder, fastloop_wheel)


@pytest.fixture
def own_venv(tmp_path: Path, fastloop_wheel: Path) -> CleanVenv:
    """A venv with fastloop, for one test."""
    return CleanVenv(tmp_path / "venv", fastloop_wheel)
