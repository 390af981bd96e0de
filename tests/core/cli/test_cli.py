"""The command line: what each command prints, and its exit code. What bad input is told is in test_bad_input.py."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastloop.recipe import load_recipe, shipped_recipes
from fastloop.registry import installed


def test_program_prints_usage_error_to_stderr_and_exits_2():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "fastloop", "recipes", "nothing"], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nothing: no such file")


def test_internal_error_prints_traceback_without_secrets_and_exits_1():
    code = "import os, torch, fastloop.cli as cli\ndef main(): raise LookupError(os.environ['HF_TOKEN'])\ncli.main = main\ncli.process()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_TOKEN": "hf_abcdefgh"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1] == "LookupError: (hidden)"


def test_help_lists_every_command(cli):
    for flag in ("--help", "-h"):
        code, out, _ = cli(flag)
        assert code == 0
        assert set(re.findall(r"^│ (\w+) ", out, re.MULTILINE)) >= {"train", "plan", "plugins", "recipes", "doctor"}


@pytest.mark.parametrize("command", ["train", "plan", "plugins", "recipes", "doctor"])
def test_every_command_has_help(cli, command):
    code, out, _ = cli(command, "--help")
    assert code == 0
    assert f"fastloop {command}" in out


def test_the_version_is_the_distributions(cli):
    assert cli("--version") == (0, f"fastloop {importlib.metadata.version('fastloop')}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train"], "Missing argument 'RECIPE'"),
        (["plan", "quickstart", "--wiht", "a"], "--with"),
        (["plugins", "a", "b"], "unexpected extra argument"),
    ],
    ids=" ".join,
)
def test_misspelled_command_exits_2(cli, arguments, said):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert said in err


# -- plugins -----------------------------------------------------------------------------------------------------------------------


def test_plugins_lists_installed_with_distribution(cli):
    code, out, _ = cli("plugins")
    assert code == 0
    assert out.startswith(f"fastloop {importlib.metadata.version('fastloop')}")
    rows = {line.split()[0]: line for line in out.splitlines()[2:] if line and not line.startswith("`")}
    assert set(rows) == set(installed())
    assert "bitwise" in rows["log"]
    assert "precision" in rows["amp"]


def test_plugins_json_has_the_same_content(cli):
    code, out, _ = cli("plugins", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)}
    assert set(rows) == set(installed())
    assert rows["amp"] == {
        "name": "amp",
        "distribution": "fastloop",
        "version": importlib.metadata.version("fastloop"),
        "slot": "precision",
        "numerics": "reduced-precision",
        "summary": rows["amp"]["summary"],
    }
    assert all(row["summary"] and row["numerics"] for row in rows.values())


def test_a_plugins_page_has_its_options_with_their_whole_types(cli):
    code, out, _ = cli("plugins", "lora")
    assert code == 0
    assert "modules_to_save  list[str] | null" in out  # brackets are no markup
    assert "Rank of the adapters." in out
    assert "hooks: before_prepare" in out


@pytest.mark.parametrize("name", sorted(installed()))
def test_every_plugins_page_has_a_recipe_snippet_and_its_options_have_help(cli, name):
    code, out, _ = cli("plugins", name)
    assert code == 0
    assert name in out
    code, out, _ = cli("plugins", name, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["hooks"]
    assert all(option["help"] for option in facts["options"])


def test_plugins_listing_matches_class(cli):
    """The listing reads source text, so that nothing is imported: it must not differ from the class."""
    _, out, _ = cli("plugins", "--json")
    for row in json.loads(out):
        cls = installed()[row["name"]].load()
        assert (row["slot"], row["numerics"]) == (cls.slot, cls.numerics), row["name"]


# -- recipes -----------------------------------------------------------------------------------------------------------------------


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
    assert load_recipe("mine.yaml").to_dict() == load_recipe("quickstart").to_dict()


# -- plan --------------------------------------------------------------------------------------------------------------------------


def test_plan_shows_order_batch_and_reasons_and_trains_nothing(cli):
    arguments = [
        "train.batch_size=16",
        "train.micro_batch_size=4",
        "train.max_steps=7",
        "train.device=cpu",
        "output=out",
        "plugins.ema.decay=0.5",
    ]
    code, out, _ = cli("plan", "quickstart", *arguments, "--with", "ema, amp", "--without", "progress,checkpoint-best")
    assert code == 0
    listed = re.findall(r"^ ?\d+\. ([\w-]+)  \((.*)\)$", out, re.MULTILINE)
    assert [name for name, _ in listed] == ["ema", "amp", "log", "metric-check", "optimizer-check", "text-classification"]
    assert "slot precision, reduced-precision" in dict(listed)["amp"]
    assert "on by default" in dict(listed)["log"]
    assert "decay=0.5" in out
    assert "sets mixed_precision=bf16" in out
    assert "16 samples a step = 4 x 4 micro-steps x 1 processes" in out
    assert "7 steps" in out
    assert list(Path().iterdir()) == []


def test_plan_counts_the_processes_that_a_launcher_started(cli, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    _, out, _ = cli("plan", "quickstart", "train.batch_size=32", "train.device=cpu", "--with", "ddp")
    assert "32 samples a step = 8 x 1 micro-steps x 4 processes" in out
    code, _, err = cli("plan", "quickstart", "train.batch_size=30", "train.device=cpu", "--with", "ddp")
    assert code == 2
    assert "Nearest that are: batch_size 28 or 32" in err


# -- doctor ------------------------------------------------------------------------------------------------------------------------


def test_doctor_reports_environment(cli):
    import torch

    code, out, _ = cli("doctor")
    assert code == 0
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert {"device", "dtypes", "processors", "compiler", "python", "[dev]"} <= set(facts)
    assert facts["torch"] == torch.__version__
    assert "fp32" in facts["dtypes"]
    assert "missing" not in facts.values()
