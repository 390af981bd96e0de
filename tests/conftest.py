"""Set up all tests of fastloop: no network, an empty folder, one thread. ``fastloop.testing`` provides the fixtures."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys

# In a shell's background job and under nohup, processes that tests start would ignore these signals, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread for torch, here and in started processes: sums have one order, and threads do not wait for those of other
# workers, which took half the time of some tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles with the vector instructions of this processor. With an empty cache, it would first try each by
# compiling a library, for seven seconds of each such test.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from environment_check import unchanged_environment
from longest_first import sort_longest_first

from fastloop.cli import main
from fastloop.cli.messages import JSON_VARIABLE, Messages
from fastloop.plugins.declarations import warn_once
from fastloop.runtime import platform_support
from fastloop_plugins.tasks.shared.metrics import import_torchmetrics

MEMORY_FOR_FILES = 4 << 30
"""Bytes: several times as much as all files of the quick tests."""
ALLOCATIONS = 20_000
"""New objects that start a garbage collection, instead of 700: collections took a twentieth of the tests' time."""
FAILED: set[str] = set()
"""The names of the tests, and of the modules that cannot be imported, that failed in this process and its workers."""
Cli = Callable[..., tuple[int, str, str]]

pytest_plugins = ["fastloop.testing"]

if not torch.accelerator.is_available():
    # torch keeps each seed for a device that is initialized later, with the lines of the stack: 3% of the tests' time
    torch.cuda.manual_seed_all = lambda seed: None
    torch.xpu.manual_seed_all = lambda seed: None


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing
def pytest_xdist_auto_num_workers() -> int:
    """Two workers a core: tests wait for the processes that they started. With four workers, two cores were busy for
    98% of the time. A worker is forked, so it costs little itself."""
    return 2 * platform_support.cores()


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Fork pytest-xdist's workers, where a forked process can do all that a new one can."""
    count = session.config.getoption("numprocesses", None)
    if not count or sys.platform != "linux" or torch.accelerator.is_available():
        return (yield)
    # Not above: pytest rewrites fastloop.testing, which forked imports, when that is loaded as a plugin.
    from forked_workers import forked_workers

    with forked_workers(session.config.invocation_params.args):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist: the commands of tests fork from one process, which imports torch and the plugins once for all
    workers."""
    from forked import server_address

    is_quick = node.config.option.markexpr == "not slow"  # whose processes need no adapters
    node.workerinput["fork_server"] = server_address([] if is_quick else ["preloaded"])


def pytest_configure(config: pytest.Config) -> None:
    """Connect a worker to the server of forked processes. The quick tests write to memory, where syncs take no time."""
    memory = Path("/dev/shm")
    if config.option.markexpr == "not slow" and memory.is_dir() and shutil.disk_usage(memory).free > MEMORY_FOR_FILES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))
    if worker := getattr(config, "workerinput", None):
        from forked import use_server

        use_server(worker["fork_server"])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Write the compiled tests for the next run, even under PYTHONDONTWRITEBYTECODE: the rewriting of assertions takes
    a third of the collection. Collect no garbage meanwhile."""
    if hasattr(session.config, "workerinput"):
        import_torchmetrics()  # in a worker, some test module does, and would import scipy.signal for a second
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # the imported modules and the tests: a collection need not visit them
        gc.enable()
        gc.set_threshold(ALLOCATIONS)
        sys.dont_write_bytecode = before


@pytest.hookimpl(trylast=True)  # after tests were deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let pytest-xdist's workers begin with the longest files. ``--no-loadscope-reorder`` keeps this order."""
    if hasattr(config, "workerinput"):
        sort_longest_first(items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        FAILED.add(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        FAILED.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the names of failed tests to the file that ``.ci/run`` names, which runs them again. Write none if the
    tests ended early: those that did not run have not passed."""
    file = os.environ.get("FASTLOOP_FAILED_TESTS")
    is_worker = hasattr(session.config, "workerinput")
    if file and not is_worker and exitstatus == pytest.ExitCode.TESTS_FAILED:
        Path(file).write_text("".join(f"{name}\n" for name in sorted(FAILED)))


@pytest.fixture(autouse=True, scope="module")
def _environment_of_the_module() -> Iterator[None]:
    with unchanged_environment():
        yield


@pytest.fixture(autouse=True)
def _environment_of_the_test() -> Iterator[None]:
    with unchanged_environment():
        yield


@pytest.fixture(autouse=True)
def _in_its_own_folder(
    _environment_of_the_test: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every test runs in an empty folder, and leaves no global state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # the command line freezes the objects of its own process
    logger = logging.getLogger("fastloop")
    _reset_level(logger)  # a fixture of a module may have run a command, which logs more
    propagate = logger.propagate
    warn_once.cache_clear()  # of the warnings that an earlier test caused
    yield
    torch.set_num_threads(1)
    logger.propagate = propagate  # the command line shows messages itself
    _reset_level(logger)
    for handler in [handler for handler in logger.handlers if isinstance(handler, Messages)]:
        logger.removeHandler(handler)


def _reset_level(logger: logging.Logger) -> None:
    """Let a logger have the level of its parent. ``setLevel`` clears the caches of all 800 loggers, so it is not called
    in vain."""
    if logger.level != logging.NOTSET:
        logger.setLevel(logging.NOTSET)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command line in this process: ``cli("plan", "quickstart")`` -> exit code, stdout, stderr."""
    monkeypatch.setenv(JSON_VARIABLE, "")  # a test may call the command line with --json
    monkeypatch.setenv("COLUMNS", "300")  # a table's rows stay on their lines
    monkeypatch.setattr("rich._console", None)  # else one that an earlier test made, with its width

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fastloop", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return int(exited.value.code or 0), captured.out, captured.err

    return call
