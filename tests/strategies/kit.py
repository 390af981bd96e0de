"""Starting real processes for the tests of strategies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("runs.py")
COMPILER = (  # what torch's compiler meets and lets pass by itself, where warnings are not errors
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


def processes(folder: Path, count: int, runs: list[dict[str, Any]], name: str, script: Path = SCRIPT) -> dict[str, dict[str, Any]]:
    """Do runs in new processes, with warnings as errors; returns their results by name."""
    (folder / f"{name}.json").write_text(json.dumps(runs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [
        sys.executable,
        "-W",
        "error",
        *(word for line in COMPILER for word in ("-W", line)),
        str(script),
        f"{name}.json",
        f"{name}.results.json",
    ]
    started = []
    for rank in range(count):
        ranks = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
        with (folder / f"{name}.{rank}.log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | ranks
            started.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = [(folder / f"{name}.{rank}.log").read_text() for rank in range(count)]
    assert codes == [0] * count, "\n".join(log[-3000:] for log in logs)
    results: dict[str, dict[str, Any]] = json.loads((folder / f"{name}.results.json").read_text())
    return results


def same(run: dict[str, Any], plain: dict[str, Any], tolerance: float, keys: tuple[str, ...] = ("losses", "norms", "metrics")) -> None:
    """A run, or the last part of one, has the losses, norms, metrics and learning rates of the plain one."""
    assert "error" not in run, run["error"]
    for key in keys:
        assert run[key] == pytest.approx(plain[key][-len(run[key]) :], rel=tolerance), key
    assert run["lrs"] == plain["lrs"][-len(run["lrs"]) :]
