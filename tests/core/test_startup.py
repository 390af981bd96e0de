"""The modules that a command imports before its work begins.

The tests count modules and measure no times, so other load has no effect.

Modules:
    core/fastloop/cli/startup.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pinned import with_pinned_versions

from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.runtime.hardware import this_machine

HELP_NEEDS_NONE = (
    *(
        "torch",
        "transformers",
        "accelerate",
        "numpy",
        "pydantic",
        "annotated_types",
        "omegaconf",
        "yaml",
        "rich",
        "packaging",
        "pluggy",
        "ctypes",
        "logging",
    ),
    "fastloop_plugins",
    *(f"fastloop.{name}" for name in ("hookspecs", "speedup_estimates", "options", "recipe", "settings", "strategy")),
    *(f"fastloop.cli.{name}" for name in ("launch", "messages", "plan", "plugins", "train")),
    *(f"fastloop_tools.{name}" for name in ("bench.command", "importing.keys", "new.command", "report.charts")),
)
FIRST_STEP_NEEDS_NONE = (
    "boto3",
    "datasets",
    "deepspeed",
    "pandas",
    "peft",
    "pyarrow",
    "scipy.optimize",
    "scipy.signal",
    "sklearn",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torchvision",
    "transformers.generation.utils",
)
PROBE = '''
"""Reports the imported modules after the first step, and ends the process."""
import os, sys
from fastloop import Plugin, hookimpl

class Probe(Plugin):
    name = "probe"

    @hookimpl
    def after_step(self):
        print("MODULES", *sys.modules, flush=True)
        os._exit(0)
'''
RESTART = """
import os, sys
from fastloop.cli import main

def execve(path, arguments, variables):
    print("RESTART", *sorted(variables.keys() - os.environ.keys()))
    print("MODULES", *sys.modules, flush=True)
    os._exit(0)

os.execve = execve
main()
"""


def modules(*arguments: str, **variables: str) -> tuple[set[str], str]:
    """Run ``python ARGUMENTS``. Returns the modules that it reports, and its output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_PRELOAD", "GLIBC_TUNABLES", "OMP_WAIT_POLICY")
    }
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("MODULES "))
    return set(line.split()[1:]), done.stdout


def test_help_imports_no_library_of_training():
    code = (
        "import sys\nfrom fastloop.cli import main\ntry:\n    main()\nexcept SystemExit:\n    print('MODULES', "
        "*sys.modules)"
    )
    found, shown = modules("-c", code, "--help")
    assert "  sweep " in shown
    assert not found.intersection(HELP_NEEDS_NONE)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_errors_of_a_recipe_come_before_the_import_of_torch(command):
    """It takes two seconds."""
    code = (
        "import sys\nfrom fastloop.cli import main\ntry:\n    main()\nexcept SystemExit as ended:\n"
        "    print('MODULES', ended.code, *sys.modules)"
    )
    found, _ = modules("-c", code, command, "quickstart", "train.lrr=1")
    assert "2" in found
    assert "torch" not in found


@pytest.mark.slow
@with_pinned_versions
def test_quickstart_imports_little_until_its_first_step_is_done():
    Path("probe.py").write_text(PROBE)
    data = "data.arguments={train: 64, validation: 32, test: 32}"
    found, _ = modules(
        "-m", "fastloop", "train", "quickstart", data, "train.device=cpu", "--with", "probe.py", OMP_NUM_THREADS="1"
    )
    assert "torch" in found
    assert not found.intersection(FIRST_STEP_NEEDS_NONE)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator restarts processes only on Linux")
def test_auto_restarts_before_torch_is_imported():
    found, shown = modules("-c", RESTART, "train", "distilbert_imdb", "train.device=cpu")
    assert next(line for line in shown.splitlines() if line.startswith("RESTART ")) != "RESTART "
    assert "torch" not in found


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_the_machine_is_the_same_before_and_after_torch_is_imported():
    code = (
        "import dataclasses, sys; from fastloop.cli.startup import cpu_machine; from fastloop.runtime.hardware import "
        "this_machine; "
        "before = cpu_machine('cpu'); assert 'torch' not in sys.modules; found = this_machine('cpu'); assert "
        "cpu_machine('cpu') is None; "
        "assert dataclasses.replace(before, name=found.name) == found, (before, found); print('MODULES')"
    )
    modules("-c", code + "; print('MODULES ')", WORLD_SIZE="3")


@pytest.mark.slow
def test_auto_selects_the_same_plugins_before_and_after_torch_is_imported():
    code = (
        "import sys; from fastloop.cli.startup import resolve_early; from fastloop.recipe import load_recipe; "
        "recipe = resolve_early(load_recipe('distilbert_imdb', ['train.device=cpu'])).recipe; print('MODULES', "
        "*sys.modules); "
        "print('PLUGINS', recipe.plugins)"
    )
    found, shown = modules("-c", code)
    recipe = load_recipe("distilbert_imdb", ["train.device=cpu"])
    recipe = resolve(recipe, this_machine("cpu")).recipe
    assert "torch" not in found
    assert shown.splitlines()[-1] == f"PLUGINS {recipe.plugins}"
