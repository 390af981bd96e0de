"""Starts measured processes by forking one that has imported torch, which saves seconds of each measurement.

A ``ForkServer`` is a fresh process with the environment variables that only a new process reads, such as those of the
allocator and of OpenMP. It imports the libraries that each measurement of a recipe needs, computes nothing, and forks
for each measurement. It is for CPUs under Linux.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastloop.cli import launch

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


class ServerEnded(Exception):
    """A server cannot be started, or was killed."""

    def __init__(self) -> None:
        super().__init__("the server of measured processes has ended")


class ForkServer:
    """A process that forks measured processes. It ends when this process ends or calls ``close``.

    Args:
        modules: Modules to import before the first fork; see ``libraries``.
        environment: Its environment variables.
    """

    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fastloop_tools.trials.server", *modules],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the process that measures
        )
        try:
            self._answer()  # the imports are done
        except ServerEnded:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request, and return the answer.

        Raises:
            ServerEnded: The server does not answer.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ServerEnded from None
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ServerEnded
        return json.loads(line)

    def start(self, environment: Mapping[str, str], source: Path, place: Path) -> ForkedProcess:
        """Fork a process that runs the specification in ``source``. Its result and its errors are written into
        ``place``.

        Args:
            environment: All its environment variables.
        """
        return ForkedProcess(
            self, self.ask({"environment": dict(environment), "source": str(source), "place": str(place)})
        )

    def close(self) -> None:
        """End the server, and the processes that it started."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self.process.wait()


class ForkedProcess:
    """A forked process, with the methods of ``Popen`` that ``run_worker`` calls.

    Attributes:
        returncode: As that of ``Popen``.
        seconds: Processor time of the process and of the children that it waited for; 0 while it runs.
    """

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.returncode: int | None = None
        self.seconds = 0.0

    def poll(self) -> int | None:
        """The exit code, -n after signal n; None while it runs."""
        if self.returncode is None:
            try:
                ended = self.server.ask({"pid": self.pid})
            except ServerEnded:  # it was killed, and this process with it
                ended = [-signal.SIGKILL, 0.0]
            if ended is not None:
                self.returncode, self.seconds = ended
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.02)
        return code


class Servers:
    """Fork servers, one for each set of variables that measured processes need when they start.

    Args:
        modules: See ``ForkServer``.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self.running: dict[str, ForkServer] = {}

    def get(self, environment: Mapping[str, str], needed: Mapping[str, str]) -> ForkServer:
        """The server whose processes have the variables ``needed`` beside ``environment``.

        Raises:
            ServerEnded: It cannot be started.
        """
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


# -- in the server -----------------------------------------------------------------------------------------------------


def serve(modules: list[str]) -> None:
    """Import modules, then answer the requests on stdin until it is closed."""
    for module in modules:
        name, _, function = module.partition(":")
        imported = importlib.import_module(name)
        if function:
            getattr(imported, function)()
    gc.collect()
    gc.freeze()  # a collection would copy the pages of these objects in each process
    _reply(None)
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            pid, status, used = os.wait4(request["pid"], os.WNOHANG)
            _reply([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime] if pid else None)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads wait, and do not hold a lock
            pid = os.fork()
        if pid == 0:
            _measure(request)
        _reply(pid)


def _reply(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _measure(request: Mapping[str, Any]) -> NoReturn:
    """Run a specification in the forked process."""
    code = 1
    try:
        os.setsid()
        place = Path(request["place"])
        for number, file in enumerate((os.devnull, os.devnull, str(place / "stderr.txt"))):
            os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 # its buffer may hold a request
        os.environ.clear()
        os.environ.update(request["environment"], **{launch.LAUNCHER: f"{os.getppid()} "})
        from fastloop_tools.trials.worker import run_specification

        run_specification(Path(request["source"]), place / "result.json", forked=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    launch.leave(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
    launch.leave(0)
