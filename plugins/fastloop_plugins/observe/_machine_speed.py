"""Measured speeds of this machine, from which plugins estimate their speedup: matrix products and page faults."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from time import perf_counter

import torch

from fastloop.runtime.platform_support import page_faults

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACCELERATOR_ROWS = 8192
"""Rows of a matrix on an accelerator: smaller products measure launches. Three matrices take 768 MiB in fp32."""
CALLS = 8
"""Products between two events: 9 TFLOP, so that the launch of the first one does not count."""


def peaks(device: torch.device, dtypes: Iterable[str], size: int | None = None) -> dict[str, float]:
    """Floating-point operations per second of square matrix products, for each dtype: the best of six windows.

    A dtype is missing if the device has too little memory for the matrices.

    Args:
        size: Rows of a matrix on a CPU; None: enough to reach the peak, which takes about two seconds.
    """
    rows = (size or 2048) if device.type == "cpu" else ACCELERATOR_ROWS
    generator = torch.Generator(device).manual_seed(0)  # a run's own random numbers stay as they are
    speeds = {}
    for name in dtypes:
        try:
            a, b = (torch.randn(rows, rows, device=device, generator=generator).to(DTYPES[name]) for _ in range(2))
            product = torch.empty_like(a)

            def multiply(a: torch.Tensor = a, b: torch.Tensor = b, product: torch.Tensor = product) -> None:
                torch.mm(a, b, out=product)

            # the first one is a warm-up and never the fastest
            best = min(seconds_of(multiply, device) for _ in range(6))
        except torch.OutOfMemoryError:
            continue
        speeds[name] = 2 * rows**3 / best
    return speeds


def seconds_of(function: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Seconds of a call: on a CPU by the clock, on an accelerator the mean of several between two events on the
    device."""
    if device.type == "cpu":
        started = perf_counter()
        function()
        return perf_counter() - started
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000 / calls


def fault_seconds(pages: int = 8192) -> float:
    """Seconds of one page fault."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as fresh:
        faults = page_faults()
        started = perf_counter()
        for offset in range(0, len(fresh), mmap.PAGESIZE):
            fresh[offset] = 1
        seconds = perf_counter() - started
        got = max(1, page_faults() - faults)
    touched = perf_counter()
    again = bytearray(pages)
    for offset in range(pages):
        again[offset] = 1  # the cost of the loop itself
    return max(0.0, seconds - (perf_counter() - touched)) / got
