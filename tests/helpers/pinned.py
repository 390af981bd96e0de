"""The versions that `make` installs: some figures and lists hold for these alone."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins() -> dict[str, str]:
    """Package -> version, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==") for requirement in found}


def is_pinned(package: str) -> bool:
    """Whether the pinned version of a package is installed, of any build."""
    return importlib.metadata.version(package).partition("+")[0] == pins()[package]


with_pinned_versions = pytest.mark.skipif(
    not all(map(is_pinned, ("torch", "transformers"))) or sys.version_info[:2] != (3, 11),
    reason="holds for the versions of constraints.txt on Python 3.11",
)
