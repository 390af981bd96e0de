"""Shared by the commands: the time budget, records that are written immediately, and facts about the machine."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from _measure import ROOT, machine
from _reviews import MAX_LENGTH, Reviews, generate, load

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

FOLDER = Path(__file__).resolve().parent
DATA = FOLDER / "data"
PACKAGES = ("torch", "triton", "transformers", "accelerate", "lightning", "tokenizers", "numpy", "fastloop-train")
TINY_LENGTH = 64
"""Tokens of the longest review with ``--tiny``."""
ENDING_SECONDS = 3.0
"""Seconds that a process has to end after SIGTERM."""
LOG_BYTES = 2**23
"""Bytes of ``gpu-failures.log`` from which nothing is appended: the machine returns files of 16 MiB at most."""
NOMINAL = {"H200": (989e12, 4.8e12), "H100 80GB HBM3": (989e12, 3.35e12)}
"""A part of a device's name -> bf16 operations a second without sparsity, and bytes of memory a second, by NVIDIA's
data sheets."""


class Failure(Exception):
    """A worker failed or did not respond; the message has the last lines of its output."""


class Late(Failure):
    """A worker did not respond in time."""


class Budget:
    """The time budget of a command. The command starts nothing that would not fit.

    Args:
        seconds: Seconds of the budget.
        used: Seconds of it that have passed already.
    """

    def __init__(self, seconds: float, used: float = 0.0) -> None:
        self.seconds = seconds
        self.started = time.monotonic() - used

    def left(self) -> float:
        """Seconds left."""
        return self.seconds - (time.monotonic() - self.started)

    def fits(self, seconds: float) -> bool:
        """Whether this number of seconds is left."""
        return self.left() > seconds

    def over(self, kept: float = 0.0) -> bool:
        """Whether it has ended, or ends within three seconds: a part that is not done by now was cut by it.

        Args:
            kept: Seconds at its end that the part could not use.
        """
        return not self.fits(kept + 3.0)


def command_budget(seconds: float) -> Budget:
    """The budget of this process. It counts from the start of the process, with the seconds that imports took."""
    return Budget(seconds, used=max(0.0, time.time() - psutil.Process().create_time()))


class Records:
    """JSON lines, written immediately: a killed command loses only what it had not measured yet.

    A run appends to the file. Its first record is ``facts``. ``lines`` are the records of this run alone.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self.logs = path.parent / "gpu-failures.log"
        self.started = time.monotonic()
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:
                file.write("\n")  # ends the last line of a killed command

    def add(self, kind: str, note: str = "", **fields: Any) -> dict[str, Any]:
        """Write a record, and print it with a note."""
        at = round(time.monotonic() - self.started, 1)
        record = {"kind": kind, "at": at, **fields}
        self.write(record)
        print(f"{at:7.1f} s  {kind:8} {fields.get('name', '')} {note}".rstrip(), flush=True)
        return record

    def write(self, record: dict[str, Any]) -> None:
        """Write a record."""
        self.lines.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def skip(self, name: str, part: str, needed: float, budget: Budget, **fields: Any) -> None:
        """Record that a part is skipped, because the budget has fewer seconds left than are needed."""
        why = f"{part}: about {needed:.0f} s are needed, {max(budget.left(), 0):.0f} are left"
        self.add("skipped", why, name=name, why=why, **fields)

    def failure(self, name: str, during: str, error: Failure, log: Path, budget: Budget, kept: float = 0.0) -> None:
        """Record a failure of a worker. If the budget ended before the worker replied, it was cut, and did not
        fail.

        Args:
            kept: Seconds at the end of the budget that the worker could not use.
        """
        if isinstance(error, Late) and budget.over(kept):
            self.cut(name, during, budget)
        else:
            self.error(name, during, error, log)

    def cut(self, name: str, during: str, budget: Budget, **fields: Any) -> None:
        """Record a part that was not done when the budget ended."""
        why = f"{during}: not done when the budget of {budget.seconds:.0f} s ended"
        self.add("cut", why, name=name, during=during, why=why, **fields)

    def error(self, name: str, during: str, error: BaseException | str, log: Path | None = None) -> None:
        """Record a failure, and keep its log."""
        text = str(error).strip()
        if log is not None:
            self.keep_log(name, during, log)
        self.add(
            "error",
            f"({during}): {text.splitlines()[-1][:200] if text else ''}",
            name=name,
            during=during,
            error=text[-2500:],
        )

    def keep_log(self, name: str, during: str, log: Path) -> None:
        """Append the end of a log to ``gpu-failures.log``, which all commands share."""
        with self.logs.open("ab") as file:
            if file.tell() < LOG_BYTES:
                file.write(
                    f"== {self.path.stem}: {name} ({during})\n".encode() + log.read_bytes()[-LOG_BYTES // 16 :] + b"\n"
                )


def measure_ceilings(device: str, seconds: float) -> dict[str, Any]:
    """Speeds of a product of two bf16 matrices and of a copy, each measured for ``seconds``; see
    ``record_ceilings``."""
    import torch

    from fastloop_plugins.observe._machine_speed import seconds_of

    where = torch.device(device)
    rows, size = (8192, 8 * 10**9) if device == "cuda" else (256, 8 * 10**6)
    a, b, product = (torch.randn(rows, rows, device=where).to(torch.bfloat16) for _ in range(3))
    source = torch.zeros(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    ceilings: dict[str, Any] = {"rows": rows, "copied_bytes": size}
    parts: dict[str, tuple[Callable[[], Any], int]] = {
        "product_flops": (lambda: torch.mm(a, b, out=product), 2 * rows**3),
        "copy_bytes": (lambda: target.copy_(source), 2 * size),
    }
    for name, (function, work) in parts.items():
        end = time.monotonic() + seconds
        rates = list[float]()
        while time.monotonic() < end or len(rates) < 3:
            rates.append(work / seconds_of(function, where))
        ceilings |= {name: statistics.median(rates[1:]), f"{name}_best": max(rates)}
    return ceilings


def measure_host_calls(seconds: float) -> float:
    """Calls of an empty Python function that one core makes in a second: the best of several windows.

    The hosts of two GPUs of one kind differ, and steps of small batches take as long as the host needs.
    """
    calls = 100_000
    best = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        for _ in range(calls):
            do_nothing()
        best = max(best, calls / (time.perf_counter() - start))
    return best


def do_nothing() -> None:
    """An empty function."""


def record_ceilings(records: Records, device: str, seconds: float = 1.5) -> None:
    """Measure how fast the device multiplies matrices in bf16 and copies memory, and record it.

    ``product_flops`` and ``copy_bytes`` are the medians of all windows, in operations and bytes a second: those of a
    warm device at the limit of its power. ``*_best`` are those of the best window. A copy reads and writes each byte.
    ``host_calls`` is the speed of Python on the host.

    Args:
        seconds: Duration of each of the two measurements.
    """
    import torch

    ceilings = measure_ceilings(device, seconds)
    ceilings["host_calls"] = measure_host_calls(seconds / 5)
    if device == "cuda":
        torch.cuda.empty_cache()
        name = torch.cuda.get_device_name()
        nominal = next((limits for part, limits in NOMINAL.items() if part in name), (None, None))
        ceilings |= dict(zip(("nominal_flops", "nominal_bytes"), nominal, strict=True))
    note = f"{ceilings['product_flops'] / 1e12:.1f} TFLOP/s in bf16, {ceilings['copy_bytes'] / 1e9:.0f} GB/s"
    records.add("ceilings", note, name=device, **ceilings)


def select_on_h200(recipe: Recipe) -> dict[str, Any]:
    """The plugins that ``auto`` selects for a recipe on an H200: name -> options. It needs no such device."""
    from fastloop.runtime.hardware import Machine
    from fastloop_plugins.auto import Auto

    h200 = Machine("cuda", "NVIDIA H200", ("fp32", "bf16", "fp16", "fp8"), ("bf16", "fp16", "fp8"))
    return {name: dict(selected.options) for name, selected in Auto().select_plugins(recipe, h200).items()}


def read_reviews(count: int, tiny: bool) -> tuple[dict[str, Reviews], int]:
    """The splits ``train`` and ``validation``, and the tokens of the longest review. Generated if the data file is
    missing.

    Args:
        count: Reviews to train on, if they are generated.
        tiny: Generate few and short ones.
    """
    file = DATA / "reviews" / "reviews.npz"
    if tiny:
        return {"train": generate(96, 0, TINY_LENGTH), "validation": generate(24, 1, TINY_LENGTH)}, TINY_LENGTH
    if file.exists():
        return load(file), MAX_LENGTH
    print(f"{file}: no such file. Generated reviews of the same lengths take its place.", flush=True)
    return {"train": generate(count, 0), "validation": generate(count // 7, 1)}, MAX_LENGTH


def facts(device: str) -> dict[str, Any]:
    """Facts about the machine: its GPU and driver, versions, and a hash of the library's sources (git may be
    missing)."""
    digest = hashlib.sha256()
    for file in sorted([*(ROOT / "core").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]):
        digest.update(file.read_bytes())
    known = machine(*PACKAGES) | {"sources": digest.hexdigest()[:12]}
    if device == "cuda":
        import torch

        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            driver = ""
        properties = torch.cuda.get_device_properties(0)
        known |= {
            "device": properties.name,
            "driver": driver or None,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return known


def find_device() -> str:
    """``cuda`` if there is such a device, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def options(
    doc: str | None, prepare: Callable[[argparse.ArgumentParser], None] = lambda parser: None
) -> argparse.Namespace:
    """Parse the options that the commands share."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=520.0, help="nothing begins that would end later (default 520)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and few steps, on any machine: a test of the command itself"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="folder of the records (default: $OUT, else benchmarks/results; tiny: build/gpu-tiny)",
    )
    prepare(parser)
    settings = parser.parse_args()
    settings.results = settings.results or results_folder(settings.tiny)
    return settings


def results_folder(tiny: bool) -> Path:
    """The folder of the records, unless ``--results`` names one."""
    usual = ROOT / "build" / "gpu-tiny" if tiny else ROOT / "benchmarks" / "results"
    return Path(os.environ.get("OUT") or usual)


def run_limited(
    command: Sequence[str], log: Path | None, timeout: float, environment: Mapping[str, str], cwd: Path | None = None
) -> int | None:
    """Run a process with its children in a group of its own.

    Args:
        log: File that its output replaces; None: it writes to the output of this process.
        timeout: Seconds after which the group is ended: by SIGTERM, and by SIGKILL three seconds later.

    Returns:
        The exit status. None if it was ended.
    """
    with (log or Path(os.devnull)).open("wb") as file:
        output = None if log is None else file
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **environment},
            stdout=output,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(max(timeout, 0.1))
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children, and itself if this process is interrupted
            process.wait()


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder. SIGTERM ends the command like Ctrl-C, so that the folder and all workers are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)
