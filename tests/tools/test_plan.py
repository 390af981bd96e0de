"""`fastloop plan`: the plugins with their order and reasons, the batch and the length. Nothing is trained.

Modules:
    plugins/fastloop_tools/plan/command.py
    plugins/fastloop_tools/plan/plan_json.py
    plugins/fastloop_tools/plan/show.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from fastloop.testing import assert_problem


def test_plan_shows_order_batch_and_reasons_and_trains_nothing(cli):
    arguments = [
        "train.batch_size=16",
        "train.micro_batch_size=4",
        "train.max_steps=7",
        "train.device=cpu",
        "output=out",
        "plugins.ema.decay=0.5",
    ]
    command = ["plan", "quickstart", *arguments, "--with", "ema, amp", "--without", "progress,checkpoint-best"]
    code, out, _ = cli(*command, "-v")
    assert code == 0
    listed = re.findall(r"^ ?\d+\. ([\w-]+)  \((.*)\)$", out, re.MULTILINE)
    assert [name for name, _ in listed] == [
        "ema",
        "amp",
        "log",
        "metric-check",
        "optimizer-check",
        "speed-check",
        "text-classification",
    ]
    assert "slot precision, reduced-precision" in dict(listed)["amp"]
    assert "on by default" in dict(listed)["log"]
    assert "decay=0.5" in out
    assert "sets mixed_precision=bf16" in out
    assert "16 samples a step = 4 x 4 micro-steps x 1 process" in out
    assert "7 steps" in out
    _, short, _ = cli(*command)
    rows = re.findall(r"^ ?\d+\.  ([\w-]+) +([\w-]+) +(.*?) *$", short, re.MULTILINE)
    assert [name for name, _, _ in rows] == [name for name, _ in listed]
    assert [row[1:] for row in rows][:3] == [
        ("changes-training", "listed in the recipe"),
        ("reduced-precision", "listed in the recipe"),
        ("bitwise", "on by default"),
    ]
    table, _, command_line = short.rpartition("\n`fastloop plan ")
    assert "decay=0.5" not in table
    assert "plugins.ema.decay=0.5" in command_line
    _, heading, table = out.partition("\nrecipe ")
    assert heading
    assert table in short
    assert list(Path().iterdir()) == []


def test_plan_counts_the_processes_that_a_launcher_started(cli, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    _, out, _ = cli("plan", "quickstart", "train.batch_size=32", "train.device=cpu", "--with", "ddp")
    assert "32 samples a step = 8 x 1 micro-step x 4 processes" in out
    code, _, err = cli("plan", "quickstart", "train.batch_size=30", "train.device=cpu", "--with", "ddp")
    assert code == 2
    assert_problem(err, "not-divisible train.batch_size: 30 batch_size 28 32")


def test_plan_shows_that_all_processes_train_on_the_same_samples(cli):
    _, out, _ = cli(
        "plan", "quickstart", "train.batch_size=32", "train.device=cpu", "--with", "tensor-parallel", "--nproc", "4"
    )
    assert "32 samples a step = 32 x 1 micro-step on every process" in out


INSTEAD = """
from fastloop import Plugin, hookimpl

class Wrapper(Plugin):
    @hookimpl(wrapper=True)
    def compute_loss(self):
        return (yield)

class Inner(Wrapper):
    name = "inner"
    slot = "progress"

class Outer(Wrapper):
    name = "outer"
    runs_before = ("inner",)

class Rival(Plugin):
    name = "rival"
    slot = "progress"
"""


def test_plan_shows_wrappers_of_the_loss_and_the_default_that_a_plugin_replaces(cli, tmp_path):
    (tmp_path / "own.py").write_text(INSTEAD)
    arguments = "plan", "quickstart", "train.device=cpu", "--with"
    inner, outer, rival = (f"{tmp_path / 'own.py'}:{name}" for name in ("Inner", "Outer", "Rival"))
    _, out, _ = cli(*arguments, f"{inner},{outer}", "-v")
    assert "inner  (slot progress, not declared, listed in the recipe; replaces 'progress'" in out
    assert ". progress" not in out
    assert "loss     outer around inner around text-classification\n" in out
    for other, name in ((rival, "rival"), ("progress", "progress")):
        code, _, error = cli(*arguments, f"{inner},{other}")
        assert code == 2
        assert f"'inner' and '{name}' fill the slot 'progress'. Keep one" in " ".join(error.split())


def test_json_has_the_parts_of_the_text(cli, tmp_path):
    (tmp_path / "own.py").write_text(INSTEAD)
    plugins = f"ema,amp,{tmp_path / 'own.py'}:Outer"
    command = ["plan", "quickstart", "train.batch_size=16", "train.micro_batch_size=4", "train.max_steps=7"]
    command += ["train.device=cpu", "output=out", "plugins.ema.decay=0.5", "--with", plugins, "--nproc", "2"]
    code, _, err = cli(*command, "--json", "plan.json")
    assert code == 0, err
    written = json.loads(Path("plan.json").read_text())
    assert {"recipe", "processes", "parameters", "batch", "variants", "smallest_change"} < written.keys()
    plan = written["plan"]
    _, text, _ = cli(*command, "-v")
    listed = []
    for number, plugin in enumerate(plan["plugins"], start=1):
        listed.append(plugin["name"])
        assert f"{number:>2}. {plugin['name']}  (" in text
        for key in ("numerics", "reason", "description"):
            assert plugin[key] in text
    assert listed == re.findall(r"^ ?\d+\. ([\w-]+)  \(.*\)$", text, re.MULTILINE)
    by_name = {plugin["name"]: plugin for plugin in plan["plugins"]}
    assert by_name["ema"]["options"] == {"decay": 0.5}
    assert by_name["amp"]["settings"]["mixed_precision"] == "bf16"
    assert by_name["outer"]["reference"].endswith("own.py:Outer")
    assert plan["code"] == [str(tmp_path / "own.py")]
    assert f"runs the code of {plan['code'][0]}" in text
    assert plan["batch"] == {
        "samples": 16, "micro_batch_size": 4, "micro_steps": 2, "processes": 2, "shares": 2, "splitter": ""
    }  # fmt: skip
    assert "16 samples a step = 4 x 2 micro-steps x 2 processes" in text
    assert plan["device"]["type"] == "cpu"
    assert plan["loss"] == ["amp", "outer", "text-classification"]
    assert f"loss     {' around '.join(plan['loss'])}" in text
    assert plan["length"]["max_steps"] == 7
    assert plan["output"] == "out"
    assert f"recipe   {plan['recipe']}" in text


def test_plan_fits_a_terminal_of_80_columns_and_shows_moves(cli, monkeypatch):
    monkeypatch.setattr("rich._console", Console(force_terminal=True, width=80, color_system=None))
    _, out, _ = cli("plan", "quickstart", "train.device=cpu", "--with", "compile,lora")
    assert max(map(len, out.partition("\nrecipe ")[0].splitlines())) <= 80
    assert "listed in the recipe; moved after 'lora'" in " ".join(out.split())


def test_a_numerics_class_that_no_author_declared_is_not_shown_as_a_promise(cli):
    Path("own.py").write_text(
        "from fastloop import Plugin, Strategy\n\n\n"
        "class Averaging(Strategy):\n    name = 'averaging'\n\n\n"
        "class Counting(Plugin):\n    name = 'counting'\n\n\n"
        "class Kept(Counting):\n    name = 'kept'\n    numerics = 'reassociated'\n\n\n"
        "class Watching(Plugin):\n    name = 'watching'\n    read_only = True\n"
    )
    files = [f"./own.py:{name}" for name in ("Averaging", "Kept", "Counting", "Watching")]
    code, out, _ = cli("plan", "quickstart", "--with", ",".join(files))
    assert code == 0
    rows = {line.split()[1]: line for line in out.splitlines() if re.match(r" *\d+\. ", line)}
    assert "not declared" in rows["averaging"]
    assert "reassociated" in rows["kept"]
    assert "not declared" in rows["counting"]
    assert "bitwise" in rows["watching"]
    _, out, _ = cli("plan", "quickstart", "-v", "--with", files[0])
    assert "not declared" in out
