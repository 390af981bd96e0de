"""Python commands in processes forked from one that has imported torch and transformers, so they start in an instant.

    done = forked.run("-m", "fastloop", "train", "recipe.yaml", "--nproc", "2", timeout=600)
    with forked.Command("-m", "fastloop", "train", "recipe.yaml") as command: ...

The arguments are those of ``python``. Environment, current folder, import path and streams are the command's own, and
so is everything that it loads of fastloop's commands and plugins. Processes that it starts with ``python -m fastloop``
or ``python FILE.py`` are forked, too: from it, or from the zygote of torchrun and ``accelerate launch``, which have
threads. Where an accelerator is available, all of them start anew. Use a real ``subprocess`` where the start of the
process matters: variables that the loader or an allocator reads, imports, or hash seeds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from zygote import Zygote

from fastloop.testing import starting

TESTS = Path(__file__).parents[1]
PATH = [entry for entry in sys.path if entry and Path(entry) != TESTS.parent and not Path(entry).is_relative_to(TESTS)]
"""The import path of a new Python, without what pytest adds."""
FORKING = threading.Lock()
"""Held while a process forks: filelock refuses a fork while another thread's fork has not returned."""
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch")
"""Modules that start processes from a process with threads."""
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
"""Runs the tests of an author; ``fastloop.testing`` is imported already, and its assertions are not rewritten."""


def server_address(preloaded: Sequence[str] = ()) -> str:
    """Start the process from which commands are forked, unless it runs, and return its address: see ``use_server``.

    Args:
        preloaded: Modules that it imports beside those of ``fastloop.testing``.
    """
    starting.PRELOADED += [name for name in preloaded if name not in starting.PRELOADED]
    starting._context()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    return str(server._forkserver_address)


def use_server(address: str) -> None:
    """Fork commands, and what ``fastloop.testing`` starts, from a process that another one has started, and that
    imported all already."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    if server._forkserver_alive_fd is None:
        # handed to each forked process; the server watches that of its starter alone
        server._forkserver_alive_fd = os.pipe()[1]
    server.ensure_running = resource_tracker.ensure_running


class Command:
    """``python ARGUMENTS`` in a forked process.

    Args:
        env: All of its environment variables; None: those of this process.
        cwd: Its current folder; None: that of this process.
        output: A file to which stdout and stderr are appended; None: ``stdout`` and ``stderr`` have them.
    """

    def __init__(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, output: Path | None = None
    ) -> None:
        self.arguments = arguments
        folder = Path(tempfile.mkdtemp(prefix="forked-"))
        # in this process only, not in one that is forked from it
        util.Finalize(self, shutil.rmtree, (folder, True), exitpriority=0)
        streams = (output.resolve(), output.resolve()) if output else (folder / "stdout", folder / "stderr")
        self._streams = streams
        for stream in streams:
            stream.touch()
        given = (
            arguments,
            dict(os.environ if env is None else env),
            Path(cwd or Path.cwd()).resolve(),
            *streams,
            PATH,
            server_address(),
        )
        self._process = starting._context().Process(target=_start, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def stdout(self) -> str:
        """Its output so far."""
        return self._streams[0].read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        """Its output so far."""
        return self._streams[1].read_text(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        """Its exit code, -n after signal n; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It took longer, and was killed.
        """
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.arguments, timeout, self.stdout, self.stderr)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def run(*arguments: str, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as ``subprocess.run`` with text output does; ``options`` are those of ``Command``."""
    command = Command(*arguments, **options)
    code = command.wait(timeout)
    return subprocess.CompletedProcess(arguments, code, command.stdout, command.stderr)


def _start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    stdout: Path,
    stderr: Path,
    path: Sequence[str],
    server: str,
) -> None:
    """Become the command, in a process of the fork server."""
    gc.freeze()  # the imported modules, which no collection has to visit
    import torch

    PATH[:] = path
    use_server(server)
    multiprocessing.set_start_method(None, force=True)  # the command's own processes start in the platform's way
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    module = arguments[1] if arguments[0] == "-m" else ""
    if not torch.accelerator.is_available():  # a forked process cannot use an accelerator
        if module in LAUNCHERS:
            use_zygote(Zygote.start(become))
        elif not module or module.startswith("fastloop"):
            subprocess.Popen = ForkedPopen  # type: ignore[misc]
    _python(arguments, environment, folder)


def use_zygote(zygote: Zygote) -> None:
    """Let a launcher, which runs in this process, start its processes from a zygote."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    ForkedPopen.zygote = zygote
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    subprocess_handler.Popen = ForkedPopen  # type: ignore[misc]


def _python(arguments: Sequence[str], environment: Mapping[str, str] | None, folder: str | Path | None) -> None:
    """Run ``python ARGUMENTS`` in a process that is already started."""
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder or ".")
    import torch

    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    sys.orig_argv[:] = [sys.executable, *arguments]
    safe = arguments[0] == "-P"
    kind, *rest = arguments[safe:]
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*added, *PATH]
    if not safe:
        folder_of_code = Path.cwd() if kind == "-m" else Path(kind).resolve().parent
        sys.path.insert(0, str(folder_of_code))
    sys.argv[:] = rest if kind == "-m" else [kind, *rest]
    if kind == "-m":
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")


@dataclass(frozen=True)
class Request:
    """A command that a zygote starts.

    Attributes:
        arguments: Those of ``python``.
        environment: All of its environment variables.
        folder: Its current folder.
        new_session: Whether it has a session of its own.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    new_session: bool


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A ``Popen`` that forks for ``python -m fastloop...`` and ``python FILE.py``, in a command that was forked
    itself.

    Attributes:
        zygote: It forks the processes; None: this process does.
    """

    zygote: Zygote | None = None

    @staticmethod
    def forked_arguments(command: Sequence[Any]) -> Sequence[str] | None:
        """The arguments of ``python`` in a command to fork for; None for another command, which starts as usual."""
        is_unbuffered = len(command) > 1 and command[1] == "-u"
        arguments = command[2:] if is_unbuffered else command[1:]
        is_ours = command[0] == sys.executable and (
            arguments[0].endswith(".py") or (arguments[0] == "-m" and arguments[1].startswith("fastloop"))
        )
        return arguments if is_ours else None

    def _execute_child(
        self, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        _, _, _, stdin, _, _, stdout, _, stderr, *_, new_session, _ = rest
        arguments = self.forked_arguments(args)
        if arguments is None or (self.zygote is not None and fds):
            super()._execute_child(args, executable, preexec, close, fds, cwd, env, *rest)  # type: ignore[misc]
            return
        self._child_created = True
        sys.stdout.flush()
        sys.stderr.flush()
        if self.zygote is not None:
            streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
            environment = dict(os.environ if env is None else env)
            self.pid = self.zygote.fork(Request(arguments, environment, Path(cwd or Path.cwd()), new_session), streams)
        else:
            with FORKING:
                self.pid = os.fork()
            if self.pid == 0:
                run_python = partial(_python, arguments, env, cwd)
                run_in_fork(run_python, (stdin, stdout, stderr), fds, new_session)
        self._close_pipe_fds(*rest[3:9])  # type: ignore[attr-defined] # the child's ends


def become(request: Request, streams: Sequence[int]) -> NoReturn:
    """Become a command that a zygote starts."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    run_python = partial(_python, request.arguments, request.environment, request.folder)
    run_in_fork(run_python, streams, new_session=request.new_session)


def run_in_fork(
    main: Callable[[], None], streams: Sequence[int], others: Sequence[int] = (), new_session: bool = False
) -> NoReturn:
    """Call ``main`` in a process that was just forked, as the program of a new one, and exit.

    Args:
        streams: File descriptors of stdin, stdout and stderr; -1: that of the parent.
        others: Further file descriptors that stay open.
        new_session: Whether the process has a session of its own.
    """
    code = 1
    try:
        # temporary folders that the parent removes itself
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        if new_session:
            os.setsid()
        for number, stream in enumerate(streams):
            if stream != -1:
                os.dup2(stream, number)
        sys.stdin = os.fdopen(0, closefd=False)
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *others}:  # noqa: PTH208
            with suppress(OSError):
                os.close(number)
        tracker = resource_tracker._resource_tracker  # type: ignore[attr-defined] # whose pipe is closed now
        tracker._fd = tracker._pid = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
