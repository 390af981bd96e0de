"""Kernels in C, compiled on this machine when they are first needed, and kept in the user's cache.

A kernel is plain C behind ctypes. It includes none of torch's headers, so it compiles in a second and does not depend
on torch's version. An extension of ``torch.utils.cpp_extension`` takes half a minute and depends on it; a wheel with
compiled code could not use the instructions of this processor. OpenMP's functions stay undefined in the library: they
are those of the runtime that torch has loaded. A second runtime would start threads of its own, which compete with
torch's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop_plugins.toolkit import clause, computing_dtype, private_cache
from torch import bfloat16, randint
from torch.autograd import profiler  # torch also loads its OpenMP runtime, which the libraries call

if TYPE_CHECKING:
    from fastloop import Run
    from torch import nn

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c11")
INSTRUCTIONS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
"""Instruction sets that the kernels use."""
TIMEOUT = 120
"""Seconds that a compiler may take. A kernel takes one or two."""
NO_CONTEXT = nullcontext()
"""A context that does nothing."""


class KernelUnavailable(Exception):
    """A kernel cannot be compiled or loaded here; the message is the reason."""


def compiler() -> str | None:
    """The path of a C compiler: ``$CC``, gcc, cc or clang; None if there is none."""
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    return None


@cache
def processor_flags() -> frozenset[str]:
    """The instruction sets of this processor, as Linux names them; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def operation(name: str) -> AbstractContextManager[Any]:
    """Show the block as the operation ``fastloop::NAME`` in torch's profiler, for native code that is no operation of
    torch. Without an active profiler, it does nothing."""
    return profiler.record_function(f"fastloop::{name}") if profiler._is_profiler_enabled else NO_CONTEXT


def draw_dropout(p: float) -> dict[str, int]:
    """Arguments of a kernel for dropout at rate ``p``: how many of 65,536 elements are dropped, and a seed for the mask
    from torch's default generator."""
    drop = min(round(p * 2**16), 2**16 - 1)
    return {"drop": drop, "seed": int(randint(2**63 - 1, ())) if drop else 0}


@cache
def load(source: Path) -> ctypes.CDLL:
    """The library of a C file. Compiles it if the cache has no library of this source, processor and compiler.

    Raises:
        KernelUnavailable: There is no compiler, it fails, or its library cannot be loaded.
    """
    program = compiler()
    if program is None:
        raise KernelUnavailable("no C compiler was found. Install one (Debian: apt install gcc), or set CC to its path")
    library = private_cache("kernels") / f"{source.stem}-{_digest(source, program)}.so"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder, "kernel")
            run_compiler(program, *FLAGS, "-c", str(source), "-o", f"{made}.o")
            run_compiler(program, "-shared", f"{made}.o", "-o", f"{made}.so", "-lm")
            Path(f"{made}.so").replace(library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelUnavailable(f"its library cannot be loaded: {clause(error)}") from None


def _digest(source: Path, program: str) -> str:
    """A hash of all that determines the library of a C file: the file and its headers, the processor, the compiler."""
    digest = hashlib.blake2b(digest_size=20)
    for file in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    for fact in (*sorted(processor_flags()), platform.machine(), program, *FLAGS):
        digest.update(f"{fact}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def run_compiler(program: str, *arguments: str) -> None:
    """Run the compiler.

    Raises:
        KernelUnavailable: It fails; the message has its first error.
    """
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{program} failed: {clause(error)}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise KernelUnavailable(f"{program} failed: {next((line for line in lines if 'error' in line), lines[0])}")


def unavailable_kernels(source: Path, instructions: frozenset[str] = INSTRUCTIONS) -> str | None:
    """Why the kernels of a C file cannot run on this machine; None: they can, and are compiled.

    Args:
        instructions: The instruction sets that they use.
    """
    absent = sorted(instructions - processor_flags())
    if absent:
        return f"this processor has no {', '.join(absent)}"
    try:
        load(source)
    except KernelUnavailable as error:
        return str(error)
    return None


def reason_against(run: Run, model: nn.Module) -> str | None:
    """Why a run can use no kernel for bf16 on a CPU; None: it may."""
    if run.device.type != "cpu":
        return f"this run is on {run.device.type}"
    if "compile" in run.plugins.names():
        return "the kernel would break compile's graph"
    dtype = computing_dtype(run, model)
    if dtype != bfloat16:
        advice = "" if run.recipe.leaves_out("amp") else " (add amp: {dtype: bf16})"
        return f"the run computes in {dtype}, not in bf16{advice}"
    return None
