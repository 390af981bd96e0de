"""Checkpoints: the format, the run folder, saving and resuming."""

from fastloop.checkpoint.store import (
    MANIFEST,
    checkpoints,
    damage,
    find,
    pack,
    random_states,
    read,
    restore_random_states,
    rotate,
    save_tensors,
    shaped_like,
    snapshot,
    unpack,
    whole,
    write,
)

__all__ = [
    "MANIFEST",
    "checkpoints",
    "damage",
    "find",
    "pack",
    "random_states",
    "read",
    "restore_random_states",
    "rotate",
    "save_tensors",
    "shaped_like",
    "snapshot",
    "unpack",
    "whole",
    "write",
]
