"""``--no-code``: a stranger's recipe that runs code of its own is refused, with the key, and none of its code runs.

The hostile code of these tests creates the file ``pwned`` when it is imported or called; a control shows that it does.

Modules:
    core/fastloop/no_code.py
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from fastloop import no_code
from fastloop.testing import assert_problem

pytest_plugins = ["installing"]

ROWS = "text,label\n" + "a fine film,good\na dull bore,bad\n" * 8
TEXTS = {
    "model": {
        "config": {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
        "tokenizer": {"kind": "word"},
    },
    "data": {"files": {"train": "rows.csv", "validation": "rows.csv"}, "text": "text", "label": "label"},
    "train": {"epochs": 1, "device": "cpu"},
    "plugins": [],
    "output": "run",
}
"""A recipe that runs no code of its own."""
MODULE = {"model": {"module": "net.py:Net"}, "data": {"module": "net.py:data"}, "train": {"epochs": 1}}


@pytest.fixture
def pwned(tmp_path: Path) -> Iterator[Path]:
    """The file that hostile code creates. No test of this file may leave it, except for the controls, which remove
    it."""
    yield tmp_path / "pwned"
    assert not (tmp_path / "pwned").exists(), "code of the recipe was run"
    assert not no_code.is_forbidden(), "the option outlived its command"


@pytest.fixture
def hostile(pwned: Path) -> str:
    """The text of a module that is a plugin, and whose import creates ``pwned``."""
    return (
        f"import pathlib\npathlib.Path({str(pwned)!r}).touch()\nfrom fastloop import Plugin\n"
        "def data(**given): ...\nclass Evil(Plugin):\n    name = 'evil'\n"
    )


def recipe(**sections: Any) -> str:
    """Write a recipe to r.yaml, and the rows that it reads."""
    Path("rows.csv").write_text(ROWS)
    Path("r.yaml").write_text(yaml.safe_dump(TEXTS | sections))
    return "r.yaml"


# -- code that a recipe names ------------------------------------------------------------------------------------------

# (the key in the error, a recipe that names the object X there)
NAMED: list[tuple[str, dict[str, Any]]] = [
    ("plugins[0]", {"plugins": ["./evil.py"]}),
    ("model.module", MODULE | {"model": {"module": "X"}}),
    ("data.module", {"data": {"module": "X", "text": "text", "label": "label"}}),
    ("data.module", {"model": {"name": "resnet"}, "data": {"module": "X"}, "plugins": ["image-classification"]}),
    ("train.optimizer", {"train": {"optimizer": "X"}}),
    ("train.optimizer", {"train": {"optimizer": {"name": "X", "momentum": 0.9}}}),
    ("plugins.lr-scheduler.schedule", {"plugins": [{"lr-scheduler": {"schedule": "X"}}]}),
    (
        "plugins.text-classification.metrics.own.type",
        {"plugins": [{"text-classification": {"metrics": {"own": {"type": "X"}}}}]},
    ),
    ("plugins.transformers-callbacks.callbacks", {"plugins": [{"transformers-callbacks": {"callbacks": ["X"]}}]}),
    (
        "plugins.transformers-callbacks.callbacks",
        {"plugins": [{"transformers-callbacks": {"callbacks": [{"X": {"rate": 0.5}}]}}]},
    ),
]
REFERENCES = ("evil.py:data", "loose:data", "os:system", "fastloop_plugins.datasets.reviews:reviews")
"""A file, a module on the import path, the standard library, and an installed package."""


def filled(tree: Any, value: str) -> Any:
    """A tree with ``X`` replaced."""
    if isinstance(tree, dict):
        return {filled(key, value): filled(item, value) for key, item in tree.items()}
    if isinstance(tree, list):
        return [filled(item, value) for item in tree]
    return value if tree == "X" else tree


@pytest.mark.parametrize("reference", REFERENCES)
def test_every_key_that_names_code_is_refused(reference, cli, install, hostile, record_property):
    """every key that imports, with a file, a module on the path or an installed one: refused, with the key"""
    record_property("faults", len(NAMED))
    Path("evil.py").write_text(hostile)
    install("loose", hostile)
    for key, sections in NAMED:
        code, out, err = cli("plan", recipe(**filled(sections, reference)), "--no-code")
        assert code == 2, (key, out)
        assert err.startswith(f"error: r.yaml: {key}: it runs the Python code of "), err
        assert "--no-code" in err
    assert "loose" not in sys.modules


def test_hostile_code_of_these_tests_is_hostile(cli, hostile, pwned):
    """control: without the option, planning imports a plugin in a local file"""
    Path("evil.py").write_text(hostile)
    cli("plan", recipe(plugins=["./evil.py"]))
    assert pwned.exists()
    pwned.unlink()


def test_a_recipe_without_code_is_planned_and_trained(cli):
    """control: a recipe that runs no code of its own"""
    assert cli("plan", recipe(), "--no-code")[0] == 0
    code, out, err = cli("train", recipe(), "--no-code")
    assert code == 0, out + err
    assert json.loads(Path("run/summary.json").read_text())["status"] == "completed"


def test_code_of_a_parent_is_refused(cli, hostile, tmp_path):
    """code in a parent that the recipe extends: refused, with the file beside the parent"""
    (tmp_path / "far").mkdir()
    Path("far/evil.py").write_text(hostile)
    Path(recipe(plugins=["./evil.py"])).rename("far/base.yaml")
    Path("r.yaml").write_text(f"extends: {tmp_path}/far/base.yaml\n")
    code, _, err = cli("plan", "r.yaml", "--no-code")
    assert code == 2
    assert_problem(err, f"code-refused {tmp_path}/far/evil.py")


# Command -> its words before the option.
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "r.yaml"),
    "train --fast-dev-run": ("train", "r.yaml", "--fast-dev-run"),
    "plan": ("plan", "r.yaml"),
    "plan --samples": ("plan", "r.yaml", "--samples", "1"),
    "plan --device-memory": ("plan", "r.yaml", "--device-memory", "1GiB"),
    "bench": ("bench", "r.yaml", "--with", "ema"),
    "bench --select": ("bench", "r.yaml", "--select", "fast.yaml"),
    "profile": ("profile", "r.yaml"),
    "prepare": ("prepare", "r.yaml"),
    "evaluate": ("evaluate", "run"),
    "predict": ("predict", "run", "a text"),
    "export --checkpoint": ("export", "run", "--checkpoint", "last"),
}
CODE: dict[str, dict[str, Any]] = {
    "a plugin in a file": {"plugins": ["./evil.py"]},
    "a metric of a file": {"plugins": [{"text-classification": {"metrics": {"own": {"type": "evil.py:data"}}}}]},
}


@pytest.fixture
def trained(cli) -> None:
    """The folder ``run`` of a run with a checkpoint."""
    code, out, err = cli("train", recipe())
    assert code == 0, out + err


@pytest.mark.parametrize("sections", CODE.values(), ids=CODE.keys())
def test_every_command_refuses_code(sections, trained, cli, hostile, record_property):
    """every command that runs a recipe, also the one in a run folder: refused"""
    record_property("faults", len(COMMANDS))
    Path("evil.py").write_text(hostile)
    Path("run/recipe.yaml").write_text(Path(recipe(**sections)).read_text())
    for name, words in COMMANDS.items():
        code, out, err = cli(*words, "--no-code")
        assert code == 2, (name, out, err)
        assert "r.yaml: plugins" in err or "recipe.yaml: plugins" in err, (name, err)
        assert "evil.py" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("train", "r.yaml", "--nproc", "2", "--with", "ddp"), ("sweep", "r.yaml", "train.seed=1,2")]
)
def test_processes_of_a_command_refuse_code(words, hostile):
    """the processes of --nproc and of a sweep: each refuses the code"""
    Path("evil.py").write_text(hostile)
    recipe(train={"optimizer": "evil.py:data", "epochs": 1})
    command = [sys.executable, "-P", "-m", "fastloop", *words, "--no-code"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode in (1, 2)
    assert_problem(done.stderr, "code-refused r.yaml: train.optimizer: evil.py")


# -- code that is not Python in the recipe's files ---------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "code that ships with a model": (
        {"model": {"name": "model", "trust_remote_code": True}},
        "r.yaml: model.trust_remote_code: ",
    ),
    "a kernel of the hub": (
        {"model": {"name": "model", "attn_implementation": "owner/kernel"}},
        "r.yaml: model.attn_implementation: ",
    ),
    "classes that DeepSpeed imports": (
        {"plugins": [{"deepspeed": {"config": "ds.json"}}]},
        "ds.json: torch_autocast.lower_precision_safe_modules: ",
    ),
}


@pytest.mark.parametrize(("sections", "place"), OTHERS.values(), ids=OTHERS.keys())
def test_other_code_is_refused(sections, place, cli):
    """code that ships with a model, a kernel of the hub, classes in DeepSpeed's JSON: refused, with the key"""
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "bert"}')
    Path("ds.json").write_text(json.dumps({"torch_autocast": {"lower_precision_safe_modules": ["evil.Layer"]}}))
    code, _, err = cli("plan", recipe(**sections), "--no-code")
    assert code == 2
    assert err.startswith(f"error: {place}"), err


READER = """
import torch
from fastloop import Plugin, hookimpl
class Reads(Plugin):
    name = "reads"
    @hookimpl
    def check_recipe(self):
        torch.load("evil.pt", weights_only=False)
"""


class Touch:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.file,)


def test_torch_reads_no_pickled_object(cli, install, pwned):
    """a pickle that an installed plugin reads with torch.load(weights_only=False): refused by torch"""
    torch.save(Touch(pwned), "evil.pt")
    install("reader-pack", READER, reads="reader_pack:Reads")
    name = recipe(plugins=["reads"])
    with pytest.raises(pickle.UnpicklingError):
        cli("plan", name, "--no-code")
    assert not pwned.exists()
    assert cli("plan", name)[0] == 0, "control: without the option, the pickle is read"
    assert pwned.exists()
    pwned.unlink()


def test_task_files_of_lm_eval_are_refused(trained, cli):
    """task files of lm-eval, whose templates and functions run: refused, also with --trust-task-code"""
    Path("tasks").mkdir()
    words = ("evaluate", "run", "--tasks", "own", "--task-folder", "tasks", "--trust-task-code")
    code, _, err = cli(*words, "--no-code")
    assert code == 2
    assert err.startswith("error: --task-folder tasks: ")
    assert "--no-code" in err


@pytest.mark.parametrize("text", ["${oc.env:CANARY}", "${touch:x}", "${oc.decode:'${touch:x}'}"])
def test_no_resolver_runs(text, cli, pwned, monkeypatch):
    """a resolver of OmegaConf, registered by any package: refused, and not called"""
    monkeypatch.setenv("CANARY", "yellow-bird")
    OmegaConf.register_resolver("touch", lambda _: pwned.touch())
    try:
        code, out, err = cli("plan", recipe(output=text), "--no-code")
    finally:
        OmegaConf.clear_resolver("touch")
    assert (code, out) == (2, "")
    assert_problem(err, "wrong-format r.yaml output")
    assert "yellow-bird" not in err


# -- installed code ----------------------------------------------------------------------------------------------------


def test_plugins_of_other_packages_are_named_before_they_are_imported(cli, install):
    """an installed plugin of another package, also one that only auto asks: the command names it and its package"""
    code = "from fastloop import Plugin\nprint('imported', __name__)\nclass {0}(Plugin):\n    name = '{1}'\n"
    install("warm-pack", code.format("Warm", "warm"), warm="warm_pack:Warm")
    install("fast-pack", code.format("Fast", "fast"), fast="fast_pack:Fast")
    name = recipe(plugins=["warm", {"auto": {"packages": ["fast-pack"]}}])
    code, out, err = cli("plan", name, "--no-code")
    assert code == 0, err
    for plugin, package in (("warm", "warm-pack"), ("fast", "fast-pack")):
        (line,) = [line for line in out.splitlines() if line.startswith("--no-code: ") and f" {plugin} " in line]
        assert f"{package} 1.2" in line
    assert "ema" not in out
    code, out, err = cli("plan", name)
    assert (code, "--no-code" in out) == (0, False)


def test_a_file_beside_the_recipe_cannot_replace_installed_code(cli, hostile, monkeypatch, tmp_path):
    """a module beside the recipe that shadows an installed one: refused"""
    (tmp_path / "theirs").mkdir()
    Path("theirs/colorsys.py").write_text(hostile)
    Path(recipe()).rename("theirs/r.yaml")
    assert cli("plan", "theirs/r.yaml", "--no-code")[0] == 0
    monkeypatch.syspath_prepend(tmp_path / "theirs")
    code, _, err = cli("plan", "theirs/r.yaml", "--no-code")
    assert code == 2
    assert_problem(err, f"code-refused --no-code: {tmp_path / 'theirs'}")
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])
    code, _, err = cli("plan", "r.yaml", "--no-code")
    assert code == 2
    assert_problem(err, f"code-refused --no-code: {tmp_path},")


@pytest.mark.parametrize("command", ["launch(['recipes'], 1, 1, 0, None, Path('run'))", "measure()"])
def test_started_processes_do_not_import_from_the_current_folder(command):
    """a file in the current folder named like an installed module: processes of --nproc and of a measurement do not
    import it"""
    Path("typer.py").write_text("raise SystemExit('the local typer')\n")
    code = (
        "import subprocess; from pathlib import Path; from fastloop.cli.launch import launch, module_command\n"
        "def measure():\n"
        "    process = module_command('fastloop_tools.trials.measuring_process')\n"
        "    done = subprocess.run(process, capture_output=True, text=True)\n"
        "    return 'local typer' in done.stderr\n"
        f"exit({command})"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert "the local typer" in done.stderr, "control: the launcher itself imports from there, if Python does"


def test_the_option_is_in_the_commands_that_fastloop_proposes(cli):
    """control: a command that continues or repeats another one keeps the option"""
    from fastloop.cli.arguments import RecipeArguments
    from fastloop_tools.shared.command_lines import command_line

    arguments = RecipeArguments("r.yaml", ["train.lr=1"])
    with no_code.forbidding():
        assert arguments.words() == ["r.yaml", "train.lr=1", "--no-code"]
        assert command_line("bench", ["r.yaml"], {}) == "fastloop bench r.yaml --no-code"
        assert os.environ["FASTLOOP_NO_CODE"] == "1"
    assert arguments.words() == ["r.yaml", "train.lr=1"]
