"""Measured speeds of this machine, from which plugins estimate their speedup: matrix products and page faults."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from time import perf_counter

import torch

from fastloop.runtime.platform_support import page_faults

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def peaks(device: torch.device, dtypes: Iterable[str], size: int | None = None) -> dict[str, float]:
    """Floating-point operations a second of square matrix products, for each dtype: the best of six.

    Args:
        size: Rows of a matrix; None: enough to reach the peak, which takes about two seconds on a CPU.
    """
    rows = size or (2048 if device.type == "cpu" else 8192)
    generator = torch.Generator(device).manual_seed(0)  # a run's own random numbers stay as they are
    found = {}
    for name in dtypes:
        a, b = (torch.randn(rows, rows, device=device, generator=generator).to(DTYPES[name]) for _ in range(2))
        best = float("inf")
        for _ in range(6):  # the first one is a warm-up and never the fastest
            started = perf_counter()
            torch.mm(a, b)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            best = min(best, perf_counter() - started)
        found[name] = 2 * rows**3 / best
    return found


def fault_seconds(pages: int = 8192) -> float:
    """Seconds of one page fault."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as fresh:
        faults, started = page_faults(), perf_counter()
        for offset in range(0, len(fresh), mmap.PAGESIZE):
            fresh[offset] = 1
        seconds, got = perf_counter() - started, max(1, page_faults() - faults)
    touched, again = perf_counter(), bytearray(pages)
    for offset in range(pages):
        again[offset] = 1  # the cost of the loop itself
    return max(0.0, seconds - (perf_counter() - touched)) / got
