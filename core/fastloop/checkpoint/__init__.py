"""Checkpoints: the format, the run folder, saving and resuming."""

from fastloop.checkpoint.store import (
    MANIFEST,
    checkpoints,
    find,
    pack,
    read,
    rotate,
    save_tensors,
    snapshot,
    unpack,
    verify,
    write,
)

__all__ = [
    "MANIFEST",
    "checkpoints",
    "find",
    "pack",
    "read",
    "rotate",
    "save_tensors",
    "snapshot",
    "unpack",
    "verify",
    "write",
]
