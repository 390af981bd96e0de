"""Runs the code of a model card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def load_by_card(folder: Path, **names: Any) -> dict[str, Any]:
    """Run the Python code in the README of an exported folder; returns its names.

    Args:
        names: Names that the code uses, such as ``model`` of a class that no library has.
    """
    page = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    exec(code, names)
    return names
