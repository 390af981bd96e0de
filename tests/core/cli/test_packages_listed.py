"""The command line with what other packages and files bring: lists, plan, train, traces, and commands of their own.

Modules:
    core/fastloop/cli/commands.py
    core/fastloop/cli/hook_timing.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest

from fastloop.cli.plugins import KEYWORD
from fastloop.testing import assert_problem

pytest_plugins = ["installing"]

WARMTH = '''"""How warm it is."""

from fastloop import Plugin, hookimpl, option


class Warmth(Plugin):
    name = "warmth"
    slot = "weather"
    read_only = True

    degrees: float = option("How warm.", default=20.0)
    fails: int = option("The process that fails.", default=-1)

    @hookimpl
    def after_step(self, run):
        if run.rank == self.fails and run.state.step == 2:
            raise OSError("too hot")

    @hookimpl
    def write_summary(self, summary):
        summary["warmth"] = self.degrees
'''
CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return {"train": TensorDataset(inputs, inputs[:, :3].argmax(1))}

def net():
    return nn.Linear(4, 3)
"""


def recipe(path: str, *plugins: Any) -> str:
    """A recipe of the task `module`, with its code beside it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    (target.parent / "code_of_test.py").write_text(CODE)
    tree = {
        "model": {"module": "code_of_test.py:net"},
        "data": {"module": "code_of_test.py:data"},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.1, "device": "cpu"},
        "plugins": [*plugins, {"module": {"loss": "cross_entropy"}}, {"log": False}, {"progress": False}],
        "output": "out",
    }
    target.write_text(json.dumps(tree))
    return path


def summary(folder: str = "out") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return found


# -- plugins of one name -----------------------------------------------------------------------------------------------


def test_plugins_of_one_name_are_both_listed_planned_and_trained(cli, install):
    install("warm-pack", WARMTH, warmth="warm_pack:Warmth")
    install("hot-pack", WARMTH.replace("20.0", "90.0"), warmth="hot_pack:Warmth")
    _, out, _ = cli("plugins")
    assert re.search(
        r"^warm-pack 1.2 *\nplugin.*\nwarm-pack:warmth +bitwise +How warm it is \(slot weather\)", out, re.MULTILINE
    )
    assert re.search(r"^hot-pack 1.2 *\nplugin.*\nhot-pack:warmth +bitwise", out, re.MULTILINE)
    _, out, _ = cli("plugins", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert [rows[f"{package}:warmth"]["distribution"] for package in ("warm-pack", "hot-pack")] == [
        "warm-pack",
        "hot-pack",
    ]
    assert not {"warm_pack", "hot_pack"} & set(sys.modules)
    _, out, _ = cli("plugins", "hot-pack:warmth")
    assert out.startswith("warmth (hot-pack 1.2)")
    assert re.search(r"degrees +float +90\.0", out)
    assert re.search(r"on_error +raise \| disable +raise", out)
    path = recipe("r.yaml", "hot-pack:warmth")
    code, out, _ = cli("plan", path, "-v", "plugins.warmth.degrees=91.0")
    assert code == 0
    assert "1. warmth  (slot weather, bitwise, listed in the recipe as hot-pack:warmth)\n      degrees=91.0\n" in out
    assert cli("train", path, "plugins.warmth.degrees=91.0")[0] == 0
    assert summary()["warmth"] == 91.0
    assert cli("plan", "out/recipe.yaml", "plugins.warmth.degrees=92.0")[0] == 0
    code, out, err = cli("train", recipe("s.yaml", "warmth"))
    assert (code, err.count("\n")) == (2, 1)
    fields = json.loads(err)  # as JSON since the call with --json
    assert (fields["code"], fields["key"]) == ("ambiguous-name", "plugins[0]")
    assert "hot-pack:warmth" in fields["remedy"]
    assert "warm-pack:warmth" in fields["remedy"]


def test_an_installed_package_with_the_keyword_but_without_plugins_is_reported(cli, install):
    install("warm-pack", group="other.group", warmth="warm_pack:Warmth")
    install("cold-pack", "", warmth="cold_pack:Warmth")
    for name in ("warm_pack", "cold_pack"):
        (metadata,) = Path("site").glob(f"{name}-*/METADATA")
        metadata.write_text(metadata.read_text() + f"Keywords: fastloop,{KEYWORD},pytorch\n")
    install("old-pack", group="other.group")
    Path("site/old_pack-1.2.dist-info/METADATA").write_bytes(
        "Name: old-pack\nVersion: 1.2\nAuthor: Ünal\n".encode("latin-1")
    )
    _, out, _ = cli("plugins")
    assert f"warm-pack 1.2 has the keyword {KEYWORD}, but no entry point in the group fastloop.plugins" in out
    assert "cold-pack 1.2 has" not in out
    assert "warm_pack" not in sys.modules


# -- plugins in files --------------------------------------------------------------------------------------------------


def test_plan_says_first_whose_code_will_run(cli):
    path = recipe("deep/r.yaml", {"./warm.py": {"degrees": 3.0, "on_error": "disable"}})
    Path("deep/warm.py").write_text(WARMTH + "\nprint('ran')\n")
    code, out, _ = cli("plan", path, "-v")
    files = [f"runs the code of {Path('deep', name).resolve()}" for name in ("warm.py", "code_of_test.py")]
    assert code == 0
    assert out.splitlines()[:3] == [*files, "ran"]
    assert (
        "1. warmth  (slot weather, bitwise, listed in the recipe as ./warm.py)\n      degrees=3.0, on_error=disable\n"
        in out
    )
    code, out, _ = cli("plan", path, "--without", "warmth")
    assert out.splitlines()[0] == files[1]
    assert "ran" not in out


@pytest.mark.slow
def test_a_file_plugin_trains_on_two_processes_and_an_observer_that_fails_on_one_is_disabled():
    path = recipe("deep/r.yaml", {"./warm.py": {"fails": 1, "on_error": "disable"}}, "ddp")
    Path("deep/warm.py").write_text(WARMTH)
    done = forked.run("-m", "fastloop", "train", path, "--nproc", "2", "--trace-hooks")
    assert done.returncode == 0, done.stderr
    found = summary()
    assert (found["steps"], found["world_size"], found["warmth"]) == (4, 2, 20.0)
    assert re.fullmatch(
        r"process 1: plugin 'warmth' \(.*warm\.py\) failed in after_step: OSError: too hot", found["disabled"]["warmth"]
    )
    assert re.search(r"^warmth +after_step +4 ", done.stdout, re.MULTILINE), "on the main process it went on"
    assert_problem(done.stdout, f"plugin-disabled {found['disabled']['warmth']}")
    assert "plugins     warmth (disabled), ddp, module" in done.stdout


@pytest.mark.slow
def test_bench_measures_a_file_plugin_in_its_own_processes():
    path = recipe("deep/r.yaml", "./warm.py")
    Path("deep/warm.py").write_text(WARMTH)
    options = [
        "--steps",
        "2",
        "--seconds",
        "0",
        "--warmup",
        "1",
        "--repeats",
        "1",
        "--output",
        "bench",
        "--variants",
        "./warm.py",
    ]
    done = forked.run("-m", "fastloop", "bench", path, *options)
    record = json.loads(Path("bench/bench.json").read_text())
    assert done.returncode == 0, done.stdout
    assert [variant["title"] for variant in record["variants"]] == ["baseline", "+ warmth"]
    assert [found["verdict"] for found in record["numerics"]] == ["holds"]


# -- what hooks took ---------------------------------------------------------------------------------------------------


def test_trace_hooks_prints_what_plugins_did_in_the_order_of_the_first_calls(cli):
    path = recipe("r.yaml", "./warm.py", "ema")
    Path("warm.py").write_text(WARMTH)
    code, out, _ = cli("train", path, "--trace-hooks")
    assert code == 0
    rows = [line.split()[:3] for line in out.splitlines() if re.match(r"(warmth|ema|module) +\w+ +\d+ ", line)]
    assert rows[0] == ["module", "check_recipe", "1"]
    assert ["warmth", "after_step", "4"] in rows
    assert ["module", "compute_loss", "4"] in rows
    assert rows.index(["module", "compute_loss", "4"]) < rows.index(["warmth", "after_step", "4"])
    assert rows[-1] == ["warmth", "write_summary", "1"]
    _, out, _ = cli("train", path)
    assert "us a call" not in out
    assert [name for name in summary()["plugins"] if not name.endswith("-check")] == ["warmth", "ema", "module"]


# -- commands of packages ----------------------------------------------------------------------------------------------

COMMAND = """
import typer

def warm(degrees: float = 20.0):
    "Says how warm it is."
    typer.echo(f"{degrees} degrees")

def picky():
    from fastloop import UsageError
    raise UsageError("not today")

number = 3
"""


def test_a_command_of_a_package_is_listed_without_an_import_and_imported_when_it_is_called(cli, install):
    install("warm-pack", COMMAND, group="fastloop.commands", warm="warm_pack:warm", picky="warm_pack:picky")
    code, out, _ = cli("--help")
    assert code == 0
    assert re.search(r"warm +Of warm-pack 1\.2\.", out)
    assert re.search(r"train +Train a recipe", out)
    assert "warm_pack" not in sys.modules
    assert cli("recipes")[0] == 0
    assert "warm_pack" not in sys.modules
    code, out, _ = cli("warm", "--help")
    assert code == 0
    assert "Says how warm it is." in out
    assert "fastloop warm [OPTIONS]" in out
    assert cli("warm", "--degrees", "3") == (0, "3.0 degrees\n", "")
    assert cli("picky") == (2, "", "error: not today [invalid-usage]\n")
    code, _, err = cli("wram")
    assert code == 2
    assert "Did you mean 'warm'?" in err


def test_a_command_cannot_take_a_name_of_ours_or_of_another_package(cli, install):
    install("warm-pack", COMMAND, group="fastloop.commands", train="warm_pack:warm", warm="warm_pack:warm")
    install("hot-pack", COMMAND, group="fastloop.commands", warm="hot_pack:warm")
    _, out, _ = cli("--help")
    assert re.search(r"warm-pack:train +Of warm-pack 1\.2; `train` alone is fastloop's own\.", out)
    assert re.search(r"hot-pack:warm +Of hot-pack 1\.2\.", out)
    _, out, _ = cli("train", "--help")
    assert "--nproc" in out
    assert cli("warm-pack:train") == (0, "20.0 degrees\n", "")
    assert cli("hot-pack:warm", "--degrees", "5") == (0, "5.0 degrees\n", "")
    code, out, err = cli("warm")
    assert (code, out) == (2, "")
    assert_problem(err, "ambiguous-name warm")


@pytest.mark.parametrize(
    ("code", "reference", "requires", "expected"),
    [
        ("1 / 0", "warm_pack:warm", "", "import-failed ZeroDivisionError: division zero"),
        ("import sys; sys.exit(3)", "warm_pack:warm", "", "import-failed SystemExit: 3"),
        (COMMAND, "warm_pack:wram", "", "import-failed AttributeError"),
        (COMMAND, "nothing_here:warm", "", "import-failed ModuleNotFoundError"),
        (
            COMMAND,
            "warm_pack:number",
            "",
            "import-failed TypeError: typer.Typer int",
        ),
        (COMMAND, "warm_pack:warm", "fastloop-train>=99", "unsupported-version >=99"),
    ],
    ids=["error", "exit", "attribute", "module", "no function", "version"],
)
def test_a_command_that_fails_breaks_only_itself(cli, install, code, reference, requires, expected):
    install("warm-pack", code, group="fastloop.commands", requires=requires, warm=reference)
    assert cli("--help")[0] == 0
    assert cli("recipes")[0] == 0
    returned, out, err = cli("warm")
    assert (returned, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: command 'warm' ({reference} of warm-pack 1.2) ")
    assert_problem(err, expected)


COUNTED = """
import collections, json, sys
calls, opened = 0, collections.Counter()

def count(frame, event, argument):
    global calls
    calls += event == "call"

def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and "/many_" in arguments[0]:
        opened[arguments[0].rpartition("/many_")[2]] += 1

from fastloop.cli import main
sys.argv = ["fastloop", *sys.argv[1:]]
sys.addaudithook(audit)
sys.setprofile(count)
try:
    main()
finally:
    sys.setprofile(None)
    print(json.dumps([calls, opened]), file=sys.stderr)
"""


def counted(count: int, *arguments: str) -> tuple[int, dict[str, int]]:
    """The function calls of a command beside ``count`` packages of others, and how often each of their files was
    opened."""
    site = Path(f"site{count}")
    for number in range(count):
        metadata = site / f"many_{number}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: many-{number}\nVersion: 1.0\n\n" + "Text.\n" * 50
        )
        points = {"plugins": f"one-{number} = many_{number}:One", "commands": f"run-{number} = many_{number}:run"}
        (metadata / "entry_points.txt").write_text(
            "".join(f"[fastloop.{group}]\n{line}\n" for group, line in points.items())
        )
    Path("counted.py").write_text(COUNTED)
    environment = os.environ | {"PYTHONPATH": str(site.absolute()), "COLUMNS": "100"}
    command = [sys.executable, "-P", "counted.py", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    if count:
        assert f"-{count - 1} " in done.stdout, "they are listed"
    calls, opened = json.loads(done.stderr)
    return calls, opened


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["plugins"]], ids=" ".join)
def test_many_packages_are_read_once_each(arguments):
    counts = (0, 20, 120)
    (none, _), (few, _), (many, opened) = (counted(count, *arguments) for count in counts)
    assert len(opened) == 2 * counts[-1]
    for file, times in opened.items():
        assert times <= (1 if file.endswith("entry_points.txt") or arguments == ["--help"] else 2), (
            "`plugins` also reads the keywords"
        )
    assert many - none <= 1.1 * (few - none) * counts[-1] / counts[1], "each package costs the same number of calls"
