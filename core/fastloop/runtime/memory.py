"""The memory of this process: its peak, and what it holds now."""

from __future__ import annotations

import os
from functools import cache, lru_cache
from time import monotonic

import psutil
import torch

from fastloop.runtime import platform_support


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: allocated on CUDA, resident on other devices."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else platform_support.peak_resident_memory()


def memory_held(device: torch.device) -> int:
    """Memory in bytes: reserved by the allocator on CUDA, resident on other devices. Read once a second, as it takes a
    step's time."""
    return _memory_held(device, os.getpid(), int(monotonic()))


@lru_cache(maxsize=1)
def _memory_held(device: torch.device, pid: int, second: int) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else int(_process(pid).memory_info().rss)


@cache
def _process(pid: int) -> psutil.Process:
    """Cached, because creating one takes as long as a small step."""
    return psutil.Process(pid)
