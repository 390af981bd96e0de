"""Checkpoints: the format, the run folder, saving and resuming."""

from fastloop.checkpoint.store import (
    MANIFEST,
    checkpoints,
    damage,
    find,
    pack,
    read,
    rotate,
    save_tensors,
    snapshot,
    unpack,
    write,
)

__all__ = [
    "MANIFEST",
    "checkpoints",
    "damage",
    "find",
    "pack",
    "read",
    "rotate",
    "save_tensors",
    "snapshot",
    "unpack",
    "write",
]
