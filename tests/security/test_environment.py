"""Strangers' packages beside fastloop, and an environment that is hostile to a command: closed streams, small disks, stopped processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastloop import plugin_checks
from fastloop.registry import own_plugins

pytest_plugins = ["installing"]

WAIT = 300.0
"""Seconds until a command counts as hanging."""


def fastloop(*arguments: str, path: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, whose start and streams matter here."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {}) | options.pop("env", {})
    command = [sys.executable, "-P", "-m", "fastloop", *arguments]
    return subprocess.run(command, env=environment, text=True, timeout=WAIT, check=False, **({"capture_output": True} | options))


# -- packages that are installed beside fastloop -----------------------------------------------------------------------

# The plugins whose names another package claims.
CLAIMS: dict[str, list[str]] = {
    "a plugin that auto selects": ["fused-optimizer"],
    "all that speed up a step": ["fused-optimizer", "compile", "fast-dropout", "attention"],
    "auto's other defaults": ["dataloader-workers", "matmul-precision"],
}


@pytest.mark.parametrize("names", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_package_that_claims_our_names_does_not_weaken_auto_silently(names, install, cli):
    """a package installs plugins with names of ours, so that auto leaves ours out: a warning names the package and the plugin"""
    plugin_checks.warn_once.cache_clear()
    ours = set(own_plugins())
    install("evil-pack", "raise SystemExit('imported')", **dict.fromkeys(names, "evil_pack:It"))
    code, out, err = cli("plan", "quickstart", "--with", "auto")
    assert code == 0, err
    for name in names:
        (line,) = [
            line for line in out.splitlines() if line.startswith(f"warning: plugin '{name}': evil-pack 1.2 installs a plugin of this name")
        ]
        assert "`auto` and the estimates of other commands leave out fastloop's" in line
        assert f"list 'fastloop-train:{name}' in the recipe" in line
    assert ours - set(own_plugins()) == set(names)


def test_a_claimed_plugin_is_used_when_the_recipe_names_the_package(install, cli):
    """control: a package with names of its own is no reason for a warning, and ours can be listed with their package"""
    plugin_checks.warn_once.cache_clear()
    install("good-pack", "", warmth="good_pack:Warmth")
    code, out, _ = cli("plan", "quickstart", "--with", "auto")
    assert (code, "warning" in out) == (0, False)
    install("evil-pack", "raise SystemExit('imported')", fused_optimizer="evil_pack:It")
    code, out, err = cli("plan", "quickstart", "--with", "fastloop-train:fused-optimizer")
    assert (code, "fused-optimizer" in out) == (0, True), err


BACKEND = """
from pathlib import Path
def load():
    Path("ran").touch()
"""
# The commands that only show what is there.
INSPECTIONS: dict[str, list[str]] = {
    "doctor": ["doctor"],
    "plugins": ["plugins"],
    "one of our plugins, which imports torch": ["plugins", "compile"],
    "schema": ["schema"],
    "recipes": ["recipes"],
    "a recipe from a stranger": ["plan", "quickstart", "--untrusted"],
    "help": ["--help"],
}


@pytest.mark.parametrize("arguments", INSPECTIONS.values(), ids=INSPECTIONS.keys())
def test_a_command_that_inspects_runs_no_device_backend(arguments, install):
    """a package declares a torch.backends entry point, which torch runs when it is imported: commands that only inspect do not run it"""
    install("evil-backend", BACKEND, group="torch.backends", evil="evil_backend:load")
    done = fastloop(*arguments, path=Path("site").absolute())
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert not Path("ran").exists()
    if arguments == ["doctor"]:
        assert "evil of evil-backend 1.2: TORCH_DEVICE_BACKEND_AUTOLOAD=1 fastloop doctor runs its code" in done.stdout


def test_a_device_backend_runs_where_it_is_wanted(install):
    """control: plan knows the device of such a package, and doctor with TORCH_DEVICE_BACKEND_AUTOLOAD=1 does"""
    install("good-backend", BACKEND, group="torch.backends", good="good_backend:load")
    for arguments, variables in ((["doctor"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}), (["plan", "quickstart"], {})):
        done = fastloop(*arguments, path=Path("site").absolute(), env=variables)
        assert done.returncode == 0, done.stderr
        assert "not loaded" not in done.stdout
        assert Path("ran").exists()
        Path("ran").unlink()
