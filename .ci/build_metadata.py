"""Hatchling's hook for the metadata of a release: the URLs of the project, and a README with absolute links.

Package indexes render no relative links. The address is that of the repository which builds the release: GitHub's
workflows set ``GITHUB_SERVER_URL`` and ``GITHUB_REPOSITORY``. A build elsewhere has no URLs, and the README as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReleaseMetadata(MetadataHookInterface):
    """Fills in ``urls`` and ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the project's metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            release = f"v{metadata['version']}"
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/blob/{release}/docs/index.md",
                "Changelog": f"{address}/blob/{release}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
            text = absolute(text, address, release)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, address: str, release: str) -> str:
    """A page whose links to files lead to the release in the repository, and whose images are shown."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({address}/{kind}/{release}/{match[3]})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)\s]+)\)", link, text)
