"""Checkpoints: the format, the run folder, saving and resuming."""

from fastloop.checkpoint.store import MANIFEST, find_newest, pack, read, rotate, unpack, verify, write
from fastloop.runtime.step_folders import checkpoints, step_folder, step_of

__all__ = [
    "MANIFEST",
    "checkpoints",
    "find_newest",
    "pack",
    "read",
    "rotate",
    "step_folder",
    "step_of",
    "unpack",
    "verify",
    "write",
]
