"""`fastloop bench --select`: what is planted to be slow is found, measured and undone; what breaks a promise is not.

Modules:
    plugins/fastloop_plugins/_time.py
    plugins/fastloop_tools/bench/selected_recipe.py
    plugins/fastloop_tools/bench/selection.py
    plugins/fastloop_tools/shared/recipe_text.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from long_form import long_form_only

from fastloop.cli import main
from fastloop.cli.arguments import ACCEPTED
from fastloop.errors import UsageError
from fastloop.recipe import Recipe, load_recipe, make_recipe
from fastloop.testing import assert_problem
from fastloop_plugins._time import parse_time
from fastloop_tools.bench.selected_recipe import text
from fastloop_tools.bench.selection import EditSelection, decide
from fastloop_tools.trials import pairs, profile_observer
from fastloop_tools.trials.measuring_process import Spec, Window, measure

CODE = """
import os
import time
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

class Numbers(Dataset):
    def __init__(self, sleep=0.0, rank=None):
        self.sleep = sleep if rank is None or int(os.environ.get("RANK", 0)) == rank else 0.0
        self.rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.sleep)
        return self.rows[index], index % 3

def data(sleep=0.0, rank=None):
    return {"train": Numbers(sleep, rank)}
"""

PLUGINS = """
import time
from fastloop import Plugin, SpeedupEstimate, hookimpl, option

class Brake(Plugin):
    "Is there for speed, and costs some."
    name = "brake"

    @classmethod
    def estimate_speedup(cls, seen, recipe):
        return None

    @hookimpl
    def before_step(self):
        time.sleep(0.05)

class Claims(Plugin):
    "Estimates a speedup, which its option turns on."
    share = 0.9

    on: bool = option("Take effect.", default=False)

    @classmethod
    def estimate_speedup(cls, seen, recipe):
        claim = SpeedupEstimate(seconds=cls.share * seen.seconds, why="Trust me.", options={"on": True})
        return None if recipe.plugins[cls.name].get("on") else claim

class Cheat(Claims):
    "Says that it is exact. It is fast because it trains on something else."
    name = "cheat"

    @hookimpl
    def before_fit(self, run):
        if self.on:
            run.datasets["train"].sleep = 0.0
            run.datasets["train"].rows *= 3.0

class Slowstart(Claims):
    "Is fast, once it has begun."
    name = "slowstart"

    @hookimpl
    def before_epoch(self, run):
        if self.on:
            run.datasets["train"].sleep = 0.0
            if not run.state.step:
                time.sleep(5.0)

class Awake(Claims):
    "Removes the planted delay."
    name = "awake"
    share = 0.8

    @hookimpl
    def before_fit(self, run):
        if self.on:
            run.datasets["train"].sleep = 0.0

class Drag(Claims):
    "Estimates a speedup, and slows training."
    name = "drag"
    share = 0.5

    @hookimpl
    def before_step(self):
        if self.on:
            time.sleep(0.1)

class Fails(Claims):
    "Would be fast, if it worked."
    name = "fails"

    @hookimpl
    def before_fit(self):
        if self.on:
            raise ValueError("planted")
"""

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""As many workers are proposed at most: beyond that torch warns."""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Write a recipe of a small net with planted plugins: its path."""
    site = tmp_path / "site"
    metadata = site / "planted-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    points = "".join(
        f"{name} = planted_edits:{name.capitalize()}\n"
        for name in ("awake", "brake", "cheat", "drag", "fails", "slowstart")
    )
    (metadata / "entry_points.txt").write_text(f"[fastloop.plugins]\n{points}")
    (site / "planted_edits.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    Path("net.py").write_text(CODE)

    def put(*plugins: Any, sleep: float = 0.0, rank: int | None = None) -> str:
        tree = {
            "model": {"module": "net.py:Net"},
            "data": {"module": "net.py:data", "arguments": {"sleep": sleep, "rank": rank}},
            "train": {"batch_size": 8, "device": "cpu", "seed": 0, "lr": 1e-3},
            "plugins": [{"module": {"loss": "cross_entropy"}}, *plugins],
        }
        Path("tiny.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return "tiny.yaml"

    yield put
    sys.modules.pop("planted_edits", None)


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """Run a command and its measurements in this process; returns the exit code and the output."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rich._console", None)

    def in_this_process(spec: Spec, length: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        started = time.monotonic()
        spec.recipe["output"] = str(tmp_path / f"measured{time.monotonic_ns()}")
        return measure(spec, length) | {"process_seconds": time.monotonic() - started, "foreign_load": 0.0}

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(pairs, "run_process", in_this_process)
        # measuring them takes seconds
        monkeypatch.setattr(profile_observer, "peaks", lambda device, dtypes: dict.fromkeys(dtypes, 1e11))
        monkeypatch.setattr(sys, "argv", ["fastloop", *arguments])
        code = 0
        try:
            main()
        except SystemExit as exited:
            code = int(exited.code or 0)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


SELECT = ("--select", "tiny.fast.yaml")
SHORT = ("--steps", "4", "--seconds", "0", "--warmup", "1")


@pytest.mark.slow
def test_selection_adds_workers_for_slow_dataset(recipe, command):
    done = forked.run(
        "-m", "fastloop", "bench", recipe(sleep=0.005), *SELECT, "--budget", "5m", "--accept", "bitwise", *SHORT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_recipe("tiny.fast.yaml")
    assert found.plugins["dataloader-workers"] == {"num_workers": CORES}
    record = json.loads(Path("tiny.fast.json").read_text())
    assert record["check"]["numerics"]["verdict"] == "holds"
    written = Path("tiny.fast.yaml").read_text()
    assert "times as fast as given" in written
    assert "# x " in written.split("dataloader-workers")[1].splitlines()[0]
    assert found.to_dict() == record["found"]
    assert command("train", "tiny.fast.yaml", "train.epochs=1", "--without", "progress")[0] == 0


@pytest.mark.slow
def test_selection_tries_edits_one_by_one_and_keeps_those_that_are_faster(recipe, command):
    """`awake` claims most, and is fast; `drag` claims a speedup, and slows training; `fails` fails."""
    given = (recipe("awake", "drag", "fails", sleep=0.1), "--without", "dataloader-workers,fused-optimizer")
    code, out = command("bench", *given, *SELECT, "--budget", "5m", "--accept", "bitwise", *SHORT)
    assert code == 0, out
    record = json.loads(Path("tiny.fast.json").read_text())
    trials = {trial["edit"]: trial for trial in record["trials"]}
    awake, drag, fails = (trials[f"plugins.{name}.on=True"] for name in ("awake", "drag", "fails"))
    assert awake["kept"], out
    assert not drag["kept"], out
    assert not fails["kept"]
    assert "plugin 'fails' (planted 1.0) failed in before_fit: ValueError: planted" in fails["why"]
    assert len(drag["ratios"]) == 1, "one measurement with the edit shows that it slows training"
    assert drag["ratios"][0] < 1 < awake["ratios"][0]
    found = load_recipe("tiny.fast.yaml").plugins
    assert found["awake"] == {"on": True}
    assert found["drag"] in ({}, False)  # by noise it may be left out, since it costs nothing without the edit
    assert record["check"]["ratios"][0] >= 2
    assert record["check"]["numerics"]["class"] == "bitwise"


@pytest.mark.slow
def test_selection_rejects_edit_that_breaks_its_numerics_class(recipe, command):
    given = (recipe("cheat", sleep=0.005), "--without", "dataloader-workers")
    code, out = command("bench", *given, *SELECT, "--budget", "5m", "--accept", "bitwise", *SHORT)
    assert code == 0, out
    assert "plugins.cheat.on=True: x" in out
    assert "nothing is changed" in out
    assert "found nothing faster" in out
    assert not Path("tiny.fast.yaml").exists()
    record = json.loads(Path("tiny.fast.json").read_text())
    assert record["check"]["numerics"]["verdict"] == "broken"
    assert not any(trial["kept"] for trial in record["trials"])


@pytest.mark.slow
def test_selection_skips_numerics_classes_that_are_not_accepted(recipe, command):
    code, out = command(
        "bench", recipe(sleep=0.005), *SELECT, "--budget", "5m", "--accept", "reduced-precision", *SHORT
    )
    assert code == 0, out
    record = json.loads(Path("tiny.fast.json").read_text())
    assert {trial["numerics"] for trial in record["trials"]} <= {"reduced-precision"}
    assert "the time is over" not in out


def test_a_budget_too_short_for_one_edit_is_refused_after_the_first_measurement(recipe, command):
    code, out = command("bench", recipe(), *SELECT, "--budget", "0.01s", *SHORT)
    assert code == 2
    assert "as given: " in out
    assert_problem(out, "budget-too-small --budget")
    assert not Path("tiny.fast.json").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--budget", "soon"], "wrong-format --budget soon 90s 10m 1h"),
        (["--accept", "bitwize"], "unknown-choice --accept 'bitwize' 'bitwise'"),
        (["--select", "tiny.yaml"], "file-in-use --select tiny.yaml"),
        (["--select", "tiny.json"], "unknown-format --select tiny.json"),
        (["--variants", "ema"], "exclusive-options --select --variants"),
        (["--repeats", "6"], "exclusive-options --select --repeats"),
        (["--no-numerics"], "exclusive-options --select --no-numerics"),
        (["--with", "nosuch"], "unknown-plugin"),
    ],
)
def test_what_cannot_be_is_refused(recipe, command, arguments, expected):
    code, out = command("bench", recipe(), *SELECT, *arguments)
    assert code == 2
    assert_problem(out, expected)


@pytest.mark.parametrize("accept", ["bitwise", ACCEPTED])
def test_classes_to_accept_are_refused_without_a_selection(recipe, command, accept):
    code, out = command("bench", recipe(), "--accept", accept)
    assert code == 2
    assert_problem(out, "missing-value --accept --select")
    assert not Path("runs").exists()


def test_parse_time_accepts_units():
    assert [parse_time(given, "--budget") for given in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]
    with pytest.raises(UsageError):
        parse_time("0s", "--budget")


@pytest.mark.slow
def test_selection_with_failing_recipe_exits_1(recipe, command):
    Path("net.py").write_text(CODE.replace("nn.Linear(8, 3)", "nn.Linear(7, 3)"))
    recipe_path = Path("tiny.yaml")
    recipe()
    Path("net.py").write_text(CODE.replace("nn.Linear(8, 3)", "nn.Linear(7, 3)"))
    code, out = command("bench", str(recipe_path), *SELECT, "--budget", "5m", *SHORT)
    assert code == 1
    assert "the recipe cannot be measured" in out


@pytest.mark.slow
def test_selection_removes_plugin_that_slows_training_and_writes_into_another_folder(recipe, command):
    recipe("brake")
    Path("mine").mkdir()
    for name in ("tiny.yaml", "net.py"):
        Path(name).rename(Path("mine") / name)
    code, out = command(
        "bench", "mine/tiny.yaml", "--budget", "5m", "--accept", "bitwise", "--select", "elsewhere.yaml", *SHORT
    )
    assert code == 0, out
    assert load_recipe("elsewhere.yaml").plugins["brake"] is False
    assert "--without brake: x" in out
    assert "brake: false" in Path("elsewhere.yaml").read_text()
    assert load_recipe("elsewhere.yaml").model["module"] == f"{Path('mine/net.py').resolve()}:Net"
    assert command("train", "elsewhere.yaml", "train.epochs=1", "--without", "progress")[0] == 0


@pytest.mark.slow
@long_form_only
def test_selection_rejects_edit_with_startup_cost_above_its_savings(recipe, command):
    code, out = command(
        "bench", recipe("slowstart", sleep=0.005), *SELECT, "--budget", "60s", "--accept", "bitwise", *SHORT
    )
    assert code == 0, out
    assert "plugins.slowstart.on=True: x" in out
    assert "s once, which 24 steps do not save" in out
    trial = json.loads(Path("tiny.fast.json").read_text())["trials"][0]
    assert 24 < trial["pays_after"] < 400
    assert not trial["kept"]


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "estimate", "kept"),
    [
        ([1.4], 0.0, True),
        ([0.9], 1.5, False),
        ([1.2], 0.0, None),
        ([1.2], 1.1, True),
        ([1.2], 1.04, None),
        ([1.04], 1.2, None),
        ([1.2, 1.1], 0.0, True),
        ([1.2, 1.01], 1.04, None),
        ([0.98], 1.5, False),
        ([1.2, 0.98], 1.5, False),
        ([1.2, 1.01, 1.03], 0.0, True),
        ([1.2, 0.99, 1.3], 1.04, False),
        ([1.01, 1.01, 1.01], 1.5, False),
    ],
)
def test_decide_measures_more_pairs_if_ratios_are_close(ratios, estimate, kept):
    assert decide(ratios, estimate) is kept


def test_selection_written_recipe_round_trips():
    tree = {
        "model": {"name": "some/model", "config": None},
        "data": {"files": {"train": ["a.csv", "b: c.csv"]}, "label": "yes", "text": "on # off"},
        "train": {"lr": 3e-4, "max_grad_norm": 1.0, "evaluate_every": None},
        "plugins": [{"amp": {"dtype": "bf16"}}, "packing", {"compile": False}],
        "output": "runs/x: y",
    }
    recipe = make_recipe(tree)
    written = text(
        recipe, ["tuned: yes", ""], {"amp": "x 1.4; reduced-precision", "train.lr": "kept", "compile": "slower"}
    )
    Path("back.yaml").write_text(written)
    assert load_recipe("back.yaml").to_dict() == recipe.to_dict()
    assert "  - packing\n" in written
    assert written.count("# ") >= 4


class Clock:
    """Measures recipes by their learning rate: seconds of a step."""

    def measure(self, recipe: Recipe, window: Window, number: int = 0) -> dict[str, Any]:
        step = recipe.train.lr
        return {"seconds_a_step": step, "process_seconds": 5 * step, "samples": 1, "tokens": 0, "seconds": step}


@pytest.mark.parametrize(("step", "expected"), [(2.0, 1), (5.0, 1), (9.0, 5)])
def test_last_check_ends_after_one_clear_pair(step, expected):
    given, found = (make_recipe({"train": {"lr": seconds}}) for seconds in (10.0, step))
    search = EditSelection(given, {"bitwise"}, 1e6, Clock(), Window(steps=8, seconds=5.0, warmup=2), print)  # type: ignore[arg-type] # it only measures
    search.measure(given)
    search.measure(found)
    search.best = found
    search.last_check()
    assert search.check["ratios"] == pytest.approx([10 / step] * expected)
    assert search.best is found
