"""Distributions for tests: folders with metadata on the import path, found by Python like those of pip."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a distribution: ``install("warm-pack", warmth="warm_pack:Warmth", code="...")``; its module is
    ``warm_pack``."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    modules = []

    def put(
        distribution: str,
        code: str = "",
        version: str = "1.2",
        group: str = "fastloop.plugins",
        requires: str = "",
        **points: str,
    ) -> None:
        metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        lines = [f"{name.replace('_', '-')} = {value}\n" for name, value in points.items()]
        (metadata / "entry_points.txt").write_text(f"[{group}]\n" + "".join(lines))
        modules.append(distribution.replace("-", "_"))
        (site / f"{modules[-1]}.py").write_text(code)

    yield put
    for module in modules:
        sys.modules.pop(module, None)
