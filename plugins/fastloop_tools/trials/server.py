"""Starts measured processes by forking one that has imported torch, which saves seconds of each measurement.

A ``ForkServer`` is a fresh process with the environment variables that only a new process reads, such as those of the
allocator and of OpenMP. It imports the libraries that each measurement of a recipe needs, computes nothing, and forks
for each measurement. It is for CPUs under Linux.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastloop.cli import launch
from fastloop_tools.trials.measure import run_processes
from fastloop_tools.trials.worker import Spec

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

LIBRARIES = ("fastloop.lifecycle", "torch._dynamo", "fastloop_tools.trials.worker", "fastloop_tools.profile.observe")
"""Modules that every training imports, torch and accelerate with them. An optimizer of torch imports
``torch._dynamo``."""
LIMIT = 2
"""Servers at a time: those of the given recipe and of the best one. Each holds some hundred megabytes."""
TRANSFORMERS = ("transformers.modeling_utils", "fastloop_plugins.tasks.heads.metrics:import_torchmetrics")
"""A module, and a function that imports one, for recipes with a model of transformers."""


def libraries(recipe: Recipe) -> tuple[str, ...] | None:
    """The modules that every measurement of a recipe needs, with any plugins; None: its processes cannot be forked.

    An accelerator's driver does not survive a fork, and importing a library may start it. Only Linux forks after
    libraries are loaded.
    """
    from fastloop.runtime.hardware import this_machine

    if not sys.platform.startswith("linux") or this_machine(recipe.train.device).device != "cpu":
        return None
    return LIBRARIES + (TRANSFORMERS if recipe.model.get("name") or recipe.model.get("config") else ())


class ForkServer:
    """A process that forks one measured process at a time. It ends with this process, or by ``close``.

    Args:
        modules: Modules to import before the first fork; see ``libraries``.
        environment: Its environment variables.
    """

    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fastloop_tools.trials.server", *modules],
            env={**environment, launch.LAUNCHER: f"{os.getpid()} "},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the process that measures
        )

    def run(self, **request: Any) -> dict[str, Any]:
        """Run ``run_processes`` with these arguments; the result has an error if the server does not answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        ended = {"error": "the server of measured processes has ended.", "kind": "killed"}
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else ended | {"process_seconds": 0.0, "foreign_load": 0.0}
        return found

    def close(self) -> None:
        """End the server, and the process that it runs."""
        self.process.terminate()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self.process.wait()


class Servers:
    """Fork servers, one for each set of variables that measured processes need when they start.

    Args:
        modules: See ``ForkServer``.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self.running: dict[str, ForkServer] = {}

    def get(self, environment: Mapping[str, str], needed: Mapping[str, str]) -> ForkServer:
        """The server whose processes have the variables ``needed`` beside ``environment``."""
        key = json.dumps(dict(needed), sort_keys=True)
        server = self.running.pop(key, None)
        if server is not None and server.process.poll() is not None:  # it was killed
            server.close()
            server = None
        if server is None:
            server = ForkServer(self.modules, {**environment, **needed})
        while len(self.running) >= LIMIT:
            self.running.pop(next(iter(self.running))).close()
        self.running[key] = server  # the newest is the last
        return server

    def close(self) -> None:
        """End all servers."""
        while self.running:
            self.running.popitem()[1].close()


def run_worker(
    spec: Spec,
    length: Mapping[str, Any],
    environment: Mapping[str, str],
    timeout: float | None,
    nproc: int = 1,
    servers: Servers | None = None,
) -> dict[str, Any]:
    """Run one training in new processes; see ``run_processes``.

    Args:
        servers: Fork the process from one of these; several processes are always fresh ones. None: start fresh
            processes.
    """
    given, needed = json.dumps({**dataclasses.asdict(spec), "length": dict(length)}), dict[str, str]()
    while True:
        with tempfile.TemporaryDirectory(prefix="fastloop-bench-") as folder:
            Path(folder, "spec.json").write_text(given, encoding="utf-8")
            if servers is None or nproc > 1:
                return run_processes(folder, environment, timeout, nproc)
            server = servers.get(environment, needed)
            found = server.run(folder=folder, environment={**environment, **needed}, timeout=timeout)
        if "needs" not in found:
            return found
        needed |= found["needs"]


# -- in the server -----------------------------------------------------------------------------------------------------


class Fork:
    """A forked process that runs a specification; see ``Start`` in ``measure``."""

    def __init__(self, environment: Mapping[str, str], source: Path, place: Path) -> None:
        self.code: int | None = None
        (place / "stderr.txt").touch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads wait, and do not hold a lock
            self.pid = os.fork()
        if self.pid == 0:
            _measure(environment, source, place)

    def poll(self) -> int | None:
        """The exit code, -n after signal n; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


def _measure(environment: Mapping[str, str], source: Path, place: Path) -> NoReturn:
    """Run a specification in the forked process."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, file in enumerate((os.devnull, os.devnull, str(place / "stderr.txt"))):
            os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 # its buffer may hold a request
        os.environ.clear()
        os.environ.update(environment, **{launch.LAUNCHER: f"{os.getppid()} "})
        from fastloop_tools.trials.worker import run_specification

        run_specification(source, place / "result.json", forked=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    launch.leave(code)


def serve(modules: list[str]) -> None:
    """Import modules, then answer the requests on stdin until it is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # which ends the measured process
    launch.end_with_launcher()
    for module in modules:
        name, _, function = module.partition(":")
        imported = importlib.import_module(name)
        if function:
            getattr(imported, function)()
    gc.collect()
    gc.freeze()  # a collection would copy the pages of these objects in each process
    for line in sys.stdin:
        print(json.dumps(run_processes(**json.loads(line), start=Fork)), flush=True)


if __name__ == "__main__":
    with suppress(SystemExit):
        serve(sys.argv[1:])
    launch.leave(0)
