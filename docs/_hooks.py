"""mkdocs: expand the folders that mkdocs.yml names in its navigation. mkdocs.yml names this file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent


PLUGINS = "plugins/"
"""The folder whose pages are in the groups of its index."""


def on_config(config: Any) -> Any:
    """Replace each folder of the navigation by its pages: the index first, then by name. Plugins are in groups."""

    def expanded(entry: Any) -> Any:
        if isinstance(entry, list):
            return [expanded(item) for item in entry]
        if isinstance(entry, dict):
            return {title: expanded(value) for title, value in entry.items()}
        if entry == PLUGINS:
            return plugin_pages()
        if not entry.endswith("/"):
            return entry
        pages = sorted((DOCS / entry).glob("*.md"), key=lambda page: (page.name != "index.md", page.name))
        return [page.relative_to(DOCS).as_posix() for page in pages]

    config.nav = expanded(config.nav)
    return config


def plugin_pages() -> list[Any]:
    """The index of plugins, and a group for each of its headings that lists plugins."""
    groups: dict[str, list[dict[str, str]]] = {}
    heading = ""
    for line in (DOCS / PLUGINS / "index.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif match := re.match(r"- \[`(.+?)`\]\((.+?\.md)\)", line):
            name, page = match.groups()
            groups.setdefault(heading, []).append({f"<code>{name}</code>": PLUGINS + page})
    return [PLUGINS + "index.md", *({group: pages} for group, pages in groups.items())]


def on_post_build(config: Any) -> None:
    """Remove the code font from titles in the index of the search, which shows them as text."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        entry["title"] = re.sub("</?code>", "", entry["title"])
    path.write_text(json.dumps(index), encoding="utf-8")
