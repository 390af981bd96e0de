"""Packages that are written wrongly, as real wheels: they break what names them, with one line, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_helpers import CleanVenv, ForkingPython, build_wheels

pytestmark = pytest.mark.slow

HEAD = """'''A package.'''
open("imported.txt", "a").write(__name__ + "\\n")
from dataclasses import dataclass
from fastloop import Plugin, hookimpl, option

class It(Plugin):
    name = "{name}"
"""
HOOK = """
    @hookimpl
    def {hook}(self, {argument}): ...
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{package}"
version = "0.7"
dependencies = ["{dependency}"]

[project.entry-points."fastloop.{group}"]
{name} = "{reference}"
"""


class Bad:
    """One package.

    Attributes:
        name: Its entry point; the package is ``bad-NAME``.
        code: The code of its module.
        said: The text of the error after the name.
    """

    def __init__(
        self,
        name: str,
        code: str,
        said: str,
        reference: str = "",
        group: str = "plugins",
        dependency: str = "fastloop-train",
    ) -> None:
        self.name, self.said, self.group, self.dependency = name, said, group, dependency
        self.package, self.module = f"bad-{name}", f"bad_{name.replace('-', '_')}"
        self.code, self.reference = code.replace("{name}", name), reference or f"{self.module}:It"

    def write(self, folder: Path) -> Path:
        """Its project."""
        home = folder / self.package
        home.mkdir()
        (home / f"{self.module}.py").write_text(self.code)
        given = {key: getattr(self, key) for key in ("package", "dependency", "group", "name", "reference")}
        (home / "pyproject.toml").write_text(PROJECT.format(**given))
        return home


IMPORT = "cannot be imported: "
BAD = [
    Bad("crash", HEAD + "\n1 / 0\n", f"{IMPORT}ZeroDivisionError: division by zero"),
    Bad("leaves", HEAD + "\nraise SystemExit(0)\n", f"{IMPORT}SystemExit: 0"),
    Bad("syntax", "class It(:\n", f"{IMPORT}SyntaxError: invalid syntax (bad_syntax.py, line 1)"),
    Bad("gone", HEAD, f"{IMPORT}ModuleNotFoundError: No module named 'nowhere'", reference="nowhere.to_be:StepProfile"),
    Bad(
        "no-class",
        HEAD,
        f"{IMPORT}AttributeError: module 'bad_no_class' has no attribute 'That'",
        reference="bad_no_class:That",
    ),
    Bad("no-plugin", HEAD, "is not a subclass of fastloop.Plugin.", reference="bad_no_plugin:dataclass"),
    Bad(
        "other-name",
        HEAD.replace("{name}", "another"),
        "calls itself 'another'. Its `name` and its entry point must be the same.",
    ),
    Bad(
        "option-name",
        HEAD + "    error: int = option('How many.', default=1)\n",
        "It.error: no option can have this name, because it is an attribute of its base class. Rename it.",
    ),
    Bad(
        "option-without-type",
        HEAD + "    rate = option('How many.', default=1)\n",
        "It.rate: an option needs a type.",
    ),
    Bad(
        "option-type",
        HEAD + "    rate: 'Nothing' = option('How many.', default=1)\n",
        "its options cannot be checked: name 'Nothing' is not defined. Import it outside of TYPE_CHECKING",
    ),
    Bad(
        "constructor",
        HEAD + "    def __init__(self): 1 / 0\n",
        "(bad-constructor 0.7) cannot be created: ZeroDivisionError: ",
    ),
    Bad(
        "hook",
        HEAD + HOOK.format(hook="after_stp", argument="run"),
        "there is no hook 'after_stp'. Did you mean 'after_step'?",
    ),
    Bad(
        "argument",
        HEAD + HOOK.format(hook="after_step", argument="los"),
        "gets no argument 'los'. Did you mean 'loss'?",
    ),
    Bad(
        "observer",
        HEAD + "    read_only = True\n" + HOOK.format(hook="build_scheduler", argument="run"),
        "is declared read_only",
    ),
    Bad("newer", HEAD, "is made for fastloop >=99, and this is ", dependency="fastloop-train>=99"),
    Bad("amp", HEAD, "'amp' is the name of plugins in several packages. Say which: "),
    Bad(
        "command",
        "1 / 0\n",
        f"{IMPORT}ZeroDivisionError: division by zero",
        reference="bad_command:run",
        group="commands",
    ),
    Bad("train", "def run(): print('theirs')\n", "", reference="bad_train:run", group="commands"),
]
PLUGINS = [bad for bad in BAD if bad.group == "plugins"]

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    return {"train": TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long))}

def net():
    return nn.Linear(4, 3)
"""
RECIPE = """
model: {module: "code_of_test.py:net"}
data: {module: "code_of_test.py:data"}
train: {epochs: 1, batch_size: 8, device: cpu}
plugins: [module: {loss: cross_entropy}]
output: out
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory, fastloop_wheel: Path) -> Iterator[ForkingPython]:
    """A venv with fastloop and every bad package."""
    folder = tmp_path_factory.mktemp("bad")
    venv = CleanVenv(folder / "venv", fastloop_wheel, *build_wheels(folder, *(bad.write(folder) for bad in BAD)))
    with ForkingPython(venv.python, venv.environment()) as commands:
        yield commands


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "code_of_test.py").write_text(CODE)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return "r.yaml"


def fastloop(venv: ForkingPython, *arguments: str) -> tuple[int, str, str]:
    done = venv.run(*arguments, cwd=Path.cwd())
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_broken_packages_affect_no_other_run(venv, recipe):
    code, out, err = fastloop(venv, "--help")
    assert (code, err) == (0, "")
    assert "Of bad-command 0.7." in out
    assert "Of bad-train 0.7; `train` alone" in out
    code, out, err = fastloop(venv, "plugins", "--json")
    assert (code, err) == (0, "")
    rows = {row["name"]: row for row in json.loads(out)}
    assert {bad.name for bad in PLUGINS} - {"amp"} < set(rows)
    assert {"bad-amp:amp", "fastloop-train:amp"} < set(rows)
    assert rows["crash"] == {
        "name": "crash",
        "distribution": "bad-crash",
        "version": "0.7",
        "group": "",
        "slot": None,
        "numerics": "not declared",
        "summary": "A package.",
    }
    assert rows["gone"]["summary"] == "cannot be found: there is no module nowhere.to_be"
    assert rows["syntax"]["summary"].startswith("cannot be read: bad_syntax.py: ")
    code, out, err = fastloop(venv, "plugins")
    assert (code, err) == (0, "")
    assert "bad-amp:amp" in out
    code, out, err = fastloop(venv, "train", recipe)
    assert (code, err) == (0, "")
    assert json.loads(Path("out/summary.json").read_text())["plugins"] == [
        "module",
        "log",
        "metric-check",
        "optimizer-check",
        "progress",
        "speed-check",
    ]
    assert not Path("imported.txt").exists(), "nothing of theirs was imported"


@pytest.mark.parametrize("bad", PLUGINS, ids=lambda bad: bad.name)
def test_broken_plugin_is_rejected_with_one_line(venv, recipe, bad):
    code, out, err = fastloop(venv, "train", recipe, "--with", bad.name)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert bad.said in err
    assert bad.name in err
    assert not Path("out").exists()


def test_plugins_with_same_name_are_selected_by_package(venv, recipe):
    code, out, _ = fastloop(venv, "plan", recipe, "-v", "--with", "fastloop-train:amp")
    assert code == 0
    assert "amp  (slot precision, " in out
    code, out, _ = fastloop(venv, "plan", recipe, "-v", "--with", "bad-amp:amp")
    assert code == 0
    assert "amp  (not declared, listed in the recipe as bad-amp:amp)" in out


def test_commands_that_crash_or_take_a_name_of_ours(venv, recipe):
    code, out, err = fastloop(venv, "command", "--help")
    assert (code, out) == (2, "")
    assert (
        err == "error: command 'command' (bad_command:run of bad-command 0.7) cannot be imported: ZeroDivisionError: "
        "division by zero [import-failed]\n"
    )
    assert fastloop(venv, "bad-train:train") == (0, "theirs\n", "")
    assert fastloop(venv, "plan", recipe)[0] == 0
