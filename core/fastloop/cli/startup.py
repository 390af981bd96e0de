"""The start of a command's process, in this order:

    resolve_early           # the recipe and its plugins, without torch
    start_again             # with the environment variables that plugins need
    start_run               # checks the machine, imports torch and builds the run

Only ``start_run`` imports torch, unless the recipe needs it earlier.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop.cli.launch import LAUNCHER
from fastloop.distributed.ranks import torchrun_job, world_size
from fastloop.errors import PluginError
from fastloop.plugins.installed import entry_points
from fastloop.plugins.plugin import Plugin
from fastloop.plugins.resolve import ResolvedRecipe, check_requirements, resolve
from fastloop.runtime.hardware import Machine
from fastloop.runtime.platform_support import signal_at_end_of_parent
from fastloop.runtime.step_folders import JOB_FILE

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop.run import Run

GC_THRESHOLD = 50_000
"""New objects between two garbage collections while libraries are imported."""
ACCELERATORS = ("nvidiactl", "dxg", "kfd", "accel", "dri/renderD128", "davinci0", "hpu")
"""Entries of /dev of which a Linux machine with an accelerator has one: CUDA, WSL, ROCm, XPU and others."""
FAST_BF16 = {"avx512_bf16", "amx_tile"}
"""Flags of processors that compute in bf16."""


# -- this process ------------------------------------------------------------------------------------------------------


@contextmanager
def reduced_gc() -> Iterator[None]:
    """Collect garbage less often while torch is imported and a run is built. This saves an eighth of the startup time.

    Then freeze the objects: later collections ignore them, and workers do not copy their pages."""
    original = gc.get_threshold()
    reduced = (GC_THRESHOLD, *original[1:])
    gc.set_threshold(*reduced)
    try:
        yield
        gc.freeze()
    finally:
        if gc.get_threshold() == reduced:  # otherwise a plugin has set it
            gc.set_threshold(*original)


def end_with_launcher() -> None:
    """End this process with the launcher, even if the launcher is killed. Does nothing if ``launch`` did not start this
    process."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    signal_at_end_of_parent(signal.SIGTERM)
    pid, _, _ = launcher.partition(" ")
    if os.getppid() != int(pid):  # the launcher ended before the line above
        sys.exit(128 + signal.SIGTERM)


def resolve_early(recipe: Recipe, objects: Iterable[Plugin] = ()) -> ResolvedRecipe:
    """Resolve a recipe, if possible without importing torch: a process that restarts would import it twice. So the
    requirements on the machine are not checked: ``start_run`` does that.

    Args:
        objects: Plugin objects from Python.
    """
    return resolve(recipe, cpu_machine(recipe.train.device), objects, any_machine=True)


def cpu_machine(device: str) -> Machine | None:
    """This machine, without torch and without a name, if it trains on the CPU; None: torch is imported anyway, or only
    torch knows.

    Args:
        device: ``train.device`` of the recipe.
    """
    cpu_info = Path("/proc/cpuinfo")
    if "torch" in sys.modules or not cpu_info.exists():
        return None
    if device != "cpu":
        has_accelerator = any((Path("/dev") / name).exists() for name in ACCELERATORS)
        if has_accelerator or entry_points("torch.backends"):
            return None
    flags: set[str] = set()
    for line in cpu_info.read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            break
    fast = ("bf16",) if flags & FAST_BF16 else ()
    return Machine("cpu", "", ("fp32", "bf16"), fast, world_size())


@dataclass(frozen=True)
class NeededVariable:
    """The value of an environment variable, and the plugin that needs it."""

    value: str
    plugin: str


def environment(resolved: ResolvedRecipe) -> dict[str, str]:
    """The environment variables that a recipe's plugins need at process start.

    Raises:
        PluginError: Two plugins need different values, or one returns another type.
    """
    recipe = resolved.recipe
    needed: dict[str, NeededVariable] = {}
    for plugin, call in resolved.plugins.each("environment"):
        variables = call(recipe=recipe)
        if variables is None:
            continue
        where = f"{recipe.where}: plugin {plugin.name!r}: environment returned"
        if not isinstance(variables, dict):
            raise PluginError(
                f"{where} a {type(variables).__name__}, expected dict[str, str]: variable -> value.",
                code="wrong-result",
            )
        for name, value in variables.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise PluginError(
                    f"{where} {name!r}: {value!r}, expected text for both, such as 'NAME': '1'.", code="wrong-result"
                )
            first = needed.setdefault(name, NeededVariable(value, plugin.name))
            if first.value != value:
                raise PluginError(
                    f"plugins {plugin.name!r} and {first.plugin!r} want different values of {name}: {value!r} and "
                    f"{first.value!r}.",
                    code="conflicting-values",
                    place=recipe.where,
                    remedy="Remove one of them.",
                )
    return {name: variable.value for name, variable in needed.items()}


def start_again(resolved: ResolvedRecipe) -> None:
    """Restart this process if variables that a recipe's plugins need are not set. Variables that are set keep their
    values."""
    needed = environment(resolved)
    # python -m fastloop train recipe.yaml: both end in [train, recipe.yaml]. Not if a program calls the command line.
    arguments = sys.argv[1:]
    is_command = sys.orig_argv[len(sys.orig_argv) - len(arguments) :] == arguments
    if is_command and needed.keys() - os.environ.keys():
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**needed, **os.environ})


# -- the run -----------------------------------------------------------------------------------------------------------


@contextmanager
def start_run(resolved: ResolvedRecipe, extra: Sequence[Plugin] = (), resume: Path | None = None) -> Iterator[Run]:
    """``open_run`` for a command: check the requirements on this machine, and build the run with ``reduced_gc``."""
    with ExitStack() as stack:
        with reduced_gc():
            check_requirements(resolved)
            from fastloop.lifecycle import open_run  # only here: it imports torch, and errors of the recipe come before

            run = stack.enter_context(open_run(resolved, extra, resume))
        yield run


def resume_from(value: str | None, output: Path) -> Path | None:
    """The path to resume from. ``value`` is the value of ``--resume``, None without that option.

    If a process fails, torchrun with ``--max-restarts`` restarts all processes with the same arguments. On one machine,
    a restarted run resumes from its run folder. On several machines, pass ``--resume`` from the start.
    """
    if _restarts() and _is_from_this_job(output):
        return output
    if value is None:
        return None
    return Path(value) if value else output


def _restarts() -> int:
    """Number of restarts by torchrun (``--max-restarts``). 0 on several machines, because each of them counts
    separately."""
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) if is_one_machine else 0


def _is_from_this_job(output: Path) -> bool:
    """Whether this torchrun job wrote the run folder. If processes fail early, the folder may belong to an older run.
    No time is compared: a clock may be set back."""
    try:
        job = (output / JOB_FILE).read_text(encoding="utf-8")
    except OSError:
        return False
    return job == torchrun_job() and (output / "recipe.yaml").is_file()


def started_from(path: Path) -> Path:
    """The recipe that a run was started with, given the ``recipe.yaml`` of its folder, whose paths may be relative to
    that recipe.

    Any other recipe, or one whose start is unknown: ``path``.
    """
    if path.name != "recipe.yaml":
        return path
    try:
        recipe = json.loads((path.parent / "summary.json").read_text(encoding="utf-8")).get("recipe")
    except (OSError, ValueError, AttributeError):
        return path
    if isinstance(recipe, str) and Path(recipe).is_file():
        return Path(recipe)
    return path
