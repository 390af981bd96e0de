"""The command line: the output and the exit code of each command. test_bad_input.py tests messages for bad input.

Modules:
    core/fastloop/cli/doctor.py
    core/fastloop/cli/ending.py
    core/fastloop/cli/plugins.py
    core/fastloop/cli/recipes.py
    core/fastloop/cli/tables.py
    core/fastloop/cli/train.py
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import typer
import yaml
from jsonschema import Draft202012Validator
from rich.console import Console

from fastloop import Plugin, hookimpl, hookspecs
from fastloop.cli import app
from fastloop.cli.commands import own, own_command, summary
from fastloop.cli.plugins import KEYWORD, documentation, hooks_of
from fastloop.cli.tables import print_markdown
from fastloop.plugins.installed import distribution_name, installed, load
from fastloop.recipe import load_recipe, shipped_recipes
from fastloop.testing import assert_problem


@pytest.mark.parametrize("option", ["--with", "--without"])
def test_a_misspelled_plugin_is_reported_at_its_option(cli, option):
    code, _, err = cli("plan", "quickstart", option, "emaa")
    assert code == 2
    assert err.startswith(f"error: {option}: no plugin 'emaa'")
    assert "'ema'" in err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_plan_and_train_refuse_a_recipe_without_a_task(cli, command):
    Path("recipe.yaml").write_text("train: {lr: 1e-3, epochs: 1}\n")
    code, _, err = cli(command, "recipe.yaml")
    assert code == 2
    assert_problem(err, "no-task recipe.yaml")


@pytest.mark.parametrize("command", ["plan", "train"])
def test_plan_and_train_refuse_an_output_folder_with_other_files(cli, command):
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years")
    code, _, err = cli(command, "digits_module", "output=mine")
    assert code == 2
    assert_problem(err, "folder-not-empty output")


def test_program_prints_usage_error_to_stderr_and_exits_2():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "fastloop", "recipes", "nothing"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nothing: ")
    assert_problem(done.stderr, "file-missing nothing:")


@pytest.mark.slow
def test_internal_error_prints_traceback_without_secrets_and_exits_1():
    code = (
        "import os, torch, fastloop.cli as cli\ndef main(): raise LookupError(os.environ['HF_TOKEN'])\ncli.main = "
        "main\ncli.process()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_TOKEN": "hf_abcdefgh"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False, timeout=600
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1] == "LookupError: (hidden)"


ENDS = """
import weakref
import torch
from fastloop.cli import ending

class Opened:
    pass

opened = Opened()
name = "ended::operation"
weakref.finalize(opened, lambda: print(torch._C._jit_get_schemas_for_operator(name)))  # after those of libraries
library = torch.library.Library("ended", "DEF")
library.define("operation() -> ()")
ending.leave(3)
"""


def test_a_process_closes_what_is_open_and_removes_no_operators():
    Path("ends.py").write_text(ENDS)
    done = forked.run("ends.py", timeout=600)
    assert (done.returncode, done.stdout) == (3, "[ended::operation() -> ()]\n"), done.stderr


def test_help_lists_every_command(cli):
    for flag in ("--help", "-h"):
        code, out, _ = cli(flag)
        assert code == 0
        assert set(re.findall(r"^  (\w+) ", out, re.MULTILINE)) >= {"train", "plan", "plugins", "recipes", "doctor"}


@pytest.mark.parametrize("command", ["train", "plan", "plugins", "recipes", "doctor"])
def test_every_command_has_help(cli, command):
    code, out, _ = cli(command, "--help")
    assert code == 0
    assert f"fastloop {command}" in out


def command_lines(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, by the words that call it."""
    group = group or typer.main.get_command(app)
    yield words, group
    for word in own() if not words else group.commands:
        command = group.get_command(None, word)
        if hasattr(command, "commands"):
            yield from command_lines(command, (*words, word))
        else:
            yield (*words, word), command


COMMANDS = dict(command_lines())


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words) or "fastloop")
def test_help_fits_80_columns_and_leaves_out_nothing(cli, monkeypatch, words):
    command = COMMANDS[words]
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli(*words, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    shown = " ".join(out.split())
    for text in [command.help, *(parameter.help for parameter in command.params)]:
        assert " ".join((text or "").split()) in shown
    _, heading, listed = out.partition("Commands:\n")
    assert bool(heading) == hasattr(command, "commands")
    assert "..." not in listed, "a first sentence is too long for the list: move its end to the second paragraph"


def test_the_version_is_the_distributions(cli):
    assert cli("--version") == (0, f"fastloop {importlib.metadata.version('fastloop-train')}\n", "")


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_plugins_are_listed_by_package_and_subpackage(cli):
    code, out, _ = cli("plugins")
    assert code == 0
    ours = out.partition(f"fastloop-train {importlib.metadata.version('fastloop-train')}")[2].partition("\n\n")[0]
    heading, *lines = ours.strip().splitlines()
    assert heading.split("  ")[0] == "plugin"
    assert "numerics" in heading
    groups: dict[str, dict[str, str]] = {"": {}}
    for line in lines:
        word = line.split()[0]
        if len(line.split()) == 1:
            groups[word] = {}
        else:
            groups[list(groups)[-1]][word] = line
    for name, point in installed().items():
        if distribution_name(point) == "fastloop-train":
            group = point.value.split(".")[1] if point.value.count(".") == 2 else ""
            assert point.load().numerics in groups[group].pop(name)
    assert not any(groups.values())
    assert out.rstrip().endswith(f"https://github.com/topics/{KEYWORD}")


def test_the_list_of_plugins_fits_a_terminal_of_80_columns(cli, monkeypatch):
    monkeypatch.setattr("rich._console", Console(width=80, force_terminal=True, color_system=None))
    _, out, _ = cli("plugins")
    assert max(map(len, out.splitlines())) <= 80
    assert "nn.Module" in out, "a summary ends with a sentence, not within a name"
    assert "…" not in out


def test_plugins_json_has_the_same_content(cli):
    code, out, _ = cli("plugins", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)}
    assert set(rows) == set(installed())
    assert rows["amp"] == {
        "name": "amp",
        "distribution": "fastloop-train",
        "version": importlib.metadata.version("fastloop-train"),
        "group": "precision",
        "slot": "precision",
        "numerics": "reduced-precision",
        "summary": rows["amp"]["summary"],
    }
    assert all(row["summary"] and row["numerics"] for row in rows.values())


def test_a_plugins_page_has_its_options_with_their_whole_types(cli):
    code, out, _ = cli("plugins", "lora")
    assert code == 0
    assert re.search(r"^modules_to_save +list\[str\] \| null", out, re.MULTILINE)  # brackets are no markup
    assert "Rank of the adapters." in out
    assert re.search(r"^hooks +.*before_prepare, .*export_model \(wraps it\)", out, re.MULTILINE)
    assert re.search(r"^requirements +the package `peft>=", out, re.MULTILINE)
    assert out.endswith("In a recipe:\n\nplugins:\n  - lora: {r: 8, alpha: 16}\n")


def test_a_plugins_page_has_its_declarations_with_reasons(cli):
    _, out, _ = cli("plugins", "channels-last")
    cls = load("channels-last")
    for key, values in {
        "conflicts": cls.conflicts,
        "runs_after": cls.runs_after,
        "runs_before": cls.runs_before,
    }.items():
        assert (key in out) is bool(values)
    assert all(f"{other}: {reason}" in out for other, reason in cls.conflicts.items())
    assert "in a run" in out
    assert cls.description in out


@pytest.mark.parametrize("name", sorted(installed()))
def test_every_plugins_page_has_a_recipe_its_hooks_in_firing_order_and_options_with_help(cli, name):
    code, out, _ = cli("plugins", name)
    assert code == 0
    assert name in out
    code, out, _ = cli("plugins", name, "--json")
    facts = json.loads(out)
    assert code == 0
    order = list(vars(hookspecs))
    assert facts["hooks"]
    # a command's plugin may declare a hook, which follows
    assert facts["hooks"] == sorted(facts["hooks"], key=lambda hook: order.index(hook) if hook in order else len(order))
    assert all(option["help"] for option in facts["options"])
    listed = yaml.safe_load(facts["recipe"])["plugins"]
    assert name in [next(iter(entry)) if isinstance(entry, dict) else entry for entry in listed]


def test_a_plugin_whose_docstring_shows_no_recipe_gets_one():
    class Warmth(Plugin):
        """How warm it is."""

        name = "warmth"

        @hookimpl(optionalhook=True)
        def after_warmth(self):
            """Of another plugin."""

        @hookimpl
        def teardown(self):
            """Close it."""

        @hookimpl
        def after_step(self):
            """Measure it."""

    Warmth.__module__ = "no_module"
    assert documentation(Warmth) == ("How warm it is.", "plugins:\n  - warmth")
    assert hooks_of(Warmth) == ["after_step", "teardown", "after_warmth"]


def test_plugins_listing_matches_class(cli):
    """The listing reads source text, so that nothing is imported: it must not differ from the class."""
    _, out, _ = cli("plugins", "--json")
    for row in json.loads(out):
        cls = installed()[row["name"]].load()
        assert (row["slot"], row["numerics"]) == (cls.slot, cls.numerics), row["name"]


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_recipes_lists_each_shipped_one_with_a_line_on_it(cli):
    code, out, _ = cli("recipes")
    assert code == 0
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert set(rows) == set(shipped_recipes())
    assert all(len(line) > 10 for line in rows.values())


def test_a_printed_recipe_can_be_copied(cli):
    code, out, _ = cli("recipes", "quickstart")
    assert code == 0
    Path("mine.yaml").write_text(out)
    schema = Path(out.partition("\n")[0].removeprefix("# yaml-language-server: $schema="))
    Draft202012Validator(json.loads(schema.read_text())).validate(yaml.safe_load(out))
    assert load_recipe("mine.yaml").to_dict() == load_recipe("quickstart").to_dict()


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_reports_environment(cli):
    import torch

    code, out, _ = cli("doctor")
    assert code == 0
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert {"device", "dtypes", "processors", "compiler", "python", "[dev]"} <= set(facts)
    assert facts["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # builds of one version
    assert "fp32" in facts["dtypes"]
    assert "missing" not in facts.values()


def test_the_list_of_commands_reads_the_help_of_each_command():
    for name, point in own().items():
        assert summary(point).split() == own_command(name).help.split(), name


@pytest.mark.parametrize("words", [["plugins"], ["plugins", "lora"], ["plan", "quickstart"]], ids=" ".join)
def test_rows_of_a_table_are_single_lines_in_a_pipe(cli, monkeypatch, words):
    """The width of the terminal behind the pipe does not matter."""
    shown = []
    for width in ("40", "400"):
        monkeypatch.setenv("COLUMNS", width)
        monkeypatch.setattr("rich._console", None)
        code, out, err = cli(*words)
        assert code == 0, err
        shown.append(out)
    assert shown[0] == shown[1]


def test_a_page_of_markdown_is_as_it_is_in_a_pipe(capsys):
    page = "# Results\n\n| plugin | verdict |\n|---|---|\n| amp | " + "faster " * 30 + "|\n"
    print_markdown(page)
    assert capsys.readouterr().out == page
