"""Numbers that a task computes from its model and its data, kept on the disk for later runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop_plugins import _cache

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("fastloop")

VALUES = "values.safetensors"
"""Name of the file with the values of an entry."""
FACTS = "facts.json"
"""Name of the file with the facts of an entry, which ``explain_miss`` compares."""


class ValueCache:
    """Numbers that take long to compute, such as the log-probabilities under a reference model, in the folder of
    `token-cache`.

    Create it in ``build_datasets``, where `token-cache` gives its folder. It can be read and written at any later time.
    Without the plugin, it has no folder: ``read`` finds nothing, and ``write`` does nothing.

        @hookimpl
        def build_datasets(self, run):
            self.cache = ValueCache("reference")

    Args:
        name: The values, in messages and in the names of entries, such as ``reference``.

    Attributes:
        folder: The folder of `token-cache`; None: the run has no such plugin.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder: Path | None = _cache.use_token_folder()

    def read(self, facts: Mapping[str, str]) -> Tensor | None:
        """The values that a run with the same facts has written; None: there are none. Logs where they are.

        Args:
            facts: Everything that determines the values, by its name in messages: hashes of the model and the data,
                options, and a version of the code.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if self.folder is None:
            return None
        entry = self._entry(self.folder, facts)
        if not entry.is_dir():
            return None
        try:
            values = load_file(entry / VALUES)["values"]
        except (OSError, SafetensorError, KeyError) as error:
            _cache.remove_damaged(entry, error, "its values are computed again", self.name)
            return None
        logger.info("%s: read from %s", self.name, entry)
        return values

    def write(self, facts: Mapping[str, str], values: Tensor) -> None:
        """Write values on the CPU for later runs with the same facts.

        Raises:
            OSError: The folder cannot be written.
        """
        from safetensors.torch import save

        if self.folder is None:
            return
        with _cache.written(self._entry(self.folder, facts)) as made:
            (made / VALUES).write_bytes(save({"values": values}))  # save_file ignores the user's umask
            (made / FACTS).write_text(json.dumps(dict(facts)), encoding="utf-8")

    def explain_miss(self, facts: Mapping[str, str]) -> str:
        """Why ``read`` finds nothing, for a message: the facts that differ from those of the most similar entry."""
        if self.folder is None:
            return "token-cache, which would keep them for later runs, is off"
        nearest: Path | None = None
        differing: list[str] = []
        for entry in sorted(self.folder.glob(f"{self.name}-*")):
            names = _differing_facts(entry, facts)
            if names and (nearest is None or len(names) < len(differing)):
                nearest = entry
                differing = names
        if nearest is None:
            return f"{self.folder} has none of an earlier run"
        return f"those in {nearest} differ in {', '.join(differing)}"

    def _entry(self, folder: Path, facts: Mapping[str, str]) -> Path:
        """The folder of an entry. It may not exist."""
        parts: list[str] = []
        for name, fact in sorted(facts.items()):
            parts += [name, fact]
        return folder / f"{self.name}-{_cache.digest(parts)}"


def _differing_facts(entry: Path, facts: Mapping[str, str]) -> list[str]:
    """The names of the facts that an entry was not written with; empty: its file cannot be read."""
    try:
        written = json.loads((entry / FACTS).read_text(encoding="utf-8"))
        names = [*facts, *(str(name) for name in written if name not in facts)]
        return [name for name in names if written.get(name) != facts.get(name)]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return []
