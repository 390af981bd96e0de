"""Files that an earlier export left in a folder: libraries would read them beside, or instead of, the new ones."""

from __future__ import annotations

from pathlib import Path

from fastloop.export.card import BASE_CONFIG

READ = (
    "config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "adapter_config.json", "adapter_model*.safetensors", BASE_CONFIG,
)  # fmt: skip
"""Patterns of the files by which transformers and peft know what a folder holds: a model, an adapter, or shards."""

State = tuple[int, int, int]
"""Inode, size, and time of the last change of a file: one that is written again has another state."""


def find_exported(folder: Path) -> dict[Path, State]:
    """The files of an export in a folder, with their states; empty if there is no folder."""
    states = {}
    for pattern in READ:
        for path in folder.glob(pattern):
            facts = path.stat()
            states[path] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return states


def remove_unwritten(folder: Path, before: dict[Path, State]) -> None:
    """Remove the files of an earlier export that the new one has not written.

    A run that was resumed with ``lora: {merge: false}`` has exported a whole model before. With its files beside the
    adapter, the folder would still be that model.

    Args:
        before: The result of ``find_exported`` before the new export.

    Raises:
        OSError: A file cannot be removed.
    """
    after = find_exported(folder)
    unwritten = [path for path, state in after.items() if before.get(path) == state]
    if len(unwritten) == len(after):
        return  # a plugin exports elsewhere
    for path in unwritten:
        path.unlink()
