"""mkdocs: expand the folders that mkdocs.yml names in its navigation. mkdocs.yml names this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent


def on_config(config: Any) -> Any:
    """Replace each folder of the navigation by its pages: the index first, then by name."""

    def expanded(entry: Any) -> Any:
        if isinstance(entry, list):
            return [expanded(item) for item in entry]
        if isinstance(entry, dict):
            return {title: expanded(value) for title, value in entry.items()}
        if not entry.endswith("/"):
            return entry
        pages = sorted((DOCS / entry).glob("*.md"), key=lambda page: (page.name != "index.md", page.name))
        return [page.relative_to(DOCS).as_posix() for page in pages]

    config.nav = expanded(config.nav)
    return config
