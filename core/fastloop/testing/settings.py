"""Record global settings of the process. A plugin that changes one must restore it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.modules import module as modules

CONFIGURATIONS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
GRAPHS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


def snapshot() -> dict[str, str]:
    """Setting -> value as text."""
    return {name: repr(value) for name, value in _settings()}


def _settings() -> Iterator[tuple[str, Any]]:
    cudnn = torch.backends.cudnn
    cuda = torch.backends.cuda
    yield "torch.get_num_threads()", torch.get_num_threads()
    yield "torch.get_num_interop_threads()", torch.get_num_interop_threads()
    yield "torch.get_default_dtype()", torch.get_default_dtype()
    yield "torch.get_default_device()", torch.get_default_device()
    yield "torch.is_grad_enabled()", torch.is_grad_enabled()
    yield "torch.is_anomaly_enabled()", torch.is_anomaly_enabled()
    yield "torch.is_autocast_enabled('cpu')", torch.is_autocast_enabled("cpu")
    yield "torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision()
    yield "torch.are_deterministic_algorithms_enabled()", torch.are_deterministic_algorithms_enabled()
    yield "torch.is_deterministic_algorithms_warn_only_enabled()", torch.is_deterministic_algorithms_warn_only_enabled()
    yield "torch.set_flush_denormal()", (torch.tensor(1e-38) * 1e-3).item() == 0.0
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        yield f"torch.backends.cudnn.{name}", getattr(cudnn, name)
    yield "torch.backends.cuda.matmul.allow_tf32", cuda.matmul.allow_tf32
    for name in GRAPHS:
        yield f"torch.backends.cuda.{name}()", getattr(cuda, name)()
    yield "torch.get_printoptions()", vars(torch._tensor_str.PRINT_OPTS)
    yield "torch.multiprocessing.get_sharing_strategy()", torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    for name, hooks in vars(modules).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield f"torch.nn.modules.module.{name}", list(hooks.values())
    for name in CONFIGURATIONS:
        __import__(name)
        for key, value in sys.modules[name].get_config_copy().items():
            yield f"{name}.{key}", value
    for name, value in os.environ.items():
        yield f"the environment variable {name}", value
    yield "the current folder", Path.cwd()
    if hasattr(os, "sched_getaffinity"):
        yield "the processors (os.sched_getaffinity)", sorted(os.sched_getaffinity(0))
    for number in (signal.SIGINT, signal.SIGTERM):
        yield f"the handler of {number.name}", signal.getsignal(number)
    for name in ("root", "fastloop"):
        logger = logging.getLogger(None if name == "root" else name)
        yield f"the logger {name}", (logger.level, logger.propagate, logger.disabled, logger.handlers)
    yield "warnings.filters", warnings.filters
    yield "sys.path", sys.path
    yield "sys.excepthook", sys.excepthook
    yield "sys.stdout and sys.stderr", (sys.stdout, sys.stderr)
    yield "the garbage collector", (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # that of a closed queue ends soon after its process
            thread.join(timeout=5.0)
    # shared by all bars
    yield "threads that run", sorted(thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor")
    children = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                children.append(f"{process.pid} ({' '.join(process.cmdline())[:80]})")
    yield "child processes", children


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A message for each setting that differs."""
    return [
        f"{name}: {before.get(name, 'not set')} before, {after.get(name, 'not set')} after"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
