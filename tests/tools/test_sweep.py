"""`fastloop sweep`: a grid of runs with several seeds, which survives failures and kills.

Modules:
    plugins/fastloop_tools/shared/command_lines.py
    plugins/fastloop_tools/shared/result_folders.py
    plugins/fastloop_tools/shared/tables.py
    plugins/fastloop_tools/sweep/arguments.py
    plugins/fastloop_tools/sweep/command.py
    plugins/fastloop_tools/sweep/grid.py
    plugins/fastloop_tools/sweep/grid_runs.py
    plugins/fastloop_tools/trials/record.py
    plugins/fastloop_tools/trials/runs.py
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shlex
import signal
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import forked
import pytest
import rich
import yaml
from rich.console import Console

from fastloop.errors import RecipeError, UsageError
from fastloop.testing import assert_problem, expect_problem
from fastloop_tools.report.read import read
from fastloop_tools.shared.command_lines import command_line
from fastloop_tools.sweep.grid import parse, split_values
from fastloop_tools.trials.record import Record, compare, results_table
from fastloop_tools.trials.runs import TrialRun
from fastloop_tools.trials.statistics import mean_interval

CODE = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self, width=4, sizes=()):
        if width == 13:
            raise ValueError("no width of 13")
        super().__init__(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
        self.width = width

    def forward(self, x):
        logits = super().forward(x)
        if self.width == 17 and not self.training:
            return logits * float("nan")
        return logits

class Rows(Dataset):
    def __init__(self, wait=False):
        self.x, self.wait = torch.randn(48, 8, generator=torch.Generator().manual_seed(0)), wait
    def __len__(self):
        return 48
    def __getitem__(self, index):
        if self.wait and Path("run/lr-3e-2_seed-123/checkpoints").exists() and not Path("free").exists():
            Path("waiting").touch()   # in the second run, after its first checkpoint
            time.sleep(0.05)
        return self.x[index], int(self.x[index, :3].argmax())

def rows(wait=False):
    return {"train": Rows(wait), "validation": Rows()}

def only_train():
    return {"train": Rows()}
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"epochs": 2, "batch_size": 8, "lr": 1e-2, "save_every": 2, "device": "cpu"},
    "plugins": [
        {"module": {"loss": "cross_entropy", "metrics": {"accuracy": {"type": "MulticlassAccuracy", "num_classes": 3}}}}
    ],
    "output": "run",
}


@pytest.fixture(autouse=True)
def _recipe():
    Path("code.py").write_text(CODE)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def fastloop(*arguments: str) -> Any:
    return forked.run("-m", "fastloop", *arguments, timeout=600)


def record(folder: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "sweep.json").read_text())
    return found


def metrics(folder: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(Path(folder, "summary.json").read_text())["validation"]
    return found


def test_values_are_split_at_commas_outside_brackets_and_quotes():
    assert split_values("1e-5,3e-5") == ["1e-5", "3e-5"]
    assert split_values("[1,2],[3,4]") == ["[1,2]", "[3,4]"]
    assert split_values("{a: [1,2], b: 3},{a: 4}") == ["{a: [1,2], b: 3}", "{a: 4}"]
    assert split_values("'a,b','c'") == ["'a,b'", "'c'"]
    assert split_values("don't,stop") == ["don't", "stop"]
    assert split_values("a") == ["a"]


def test_a_printed_command_has_the_options_that_were_given():
    options = {
        "--with": ["a", "b"],
        "--without": [],
        "--seeds": None,
        "--port": 0,
        "--resume": True,
        "--quality": False,
    }
    words = command_line("sweep", ["r.yaml", "a=1 2"], options)
    assert words == "fastloop sweep r.yaml 'a=1 2' --with a,b --port 0 --resume"


def test_a_grid_has_every_combination_with_readable_and_distinct_names():
    runs = parse(["train.lr=1e-2,3e-2", "model.sizes=[1,2],[3,4]", "train.epochs=1"]).runs([5, 6])
    assert len({run.name for run in runs}) == len(runs) == 8
    assert runs[0].overrides == ["train.lr=1e-2", "model.sizes=[1,2]", "train.seed=5"]
    assert runs[0].name.startswith("lr-1e-2_sizes-1-2-")
    assert [run.seed for run in runs] == [5] * 4 + [6] * 4
    names = [run.name for run in parse(["train.name=a/b,a-b,a b", "model.name=x,y"]).runs([None])]
    assert len(set(names)) == 6
    assert all("/" not in name and " " not in name for name in names)
    assert names[2] == "train.name-a-b_model.name-x"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["train.lr=1,,2"], "repeated-value"),
        (["train.lr=1,1"], "repeated-value"),
        (["train.lr=1e-3,1e-2,0.001"], "repeated-value 0.001 1e-3"),
        (["train.lr=1,2,1.0"], "repeated-value 1 1.0"),
        (["train.lr=1000,1_000"], "repeated-value 1_000 1000"),
        (["model.name=a,'a'"], "repeated-value 'a'"),
        (["model.sizes=[1,2],[1.0, 2]"], "repeated-value"),
        (["model.sizes={a: 1, b: 2},{b: 2, a: 1}"], "repeated-value"),
        (["model.flag=true,yes"], "repeated-value"),
        (["model.name=007,008"], "ambiguous-yaml YAML 007"),
        (["output=a,b"], "wrong-format"),
        (["train.lr=1", "train.lr=2,3"], "repeated-key"),
    ],
)
def test_a_wrong_list_is_refused(values, expected):
    with expect_problem(expected, UsageError):
        parse(values)


def test_values_that_are_read_differently_are_points_of_their_own():
    for values in (
        "1,true",
        "'1',1",
        "0,false",
        "null,'null'",
        "1e-3,1.0000001e-3",
        "a,A",
        "9007199254740993,9007199254740992",
    ):
        assert len(parse([f"a.b={values}"]).axes["a.b"]) == 2


@pytest.mark.parametrize(("mode", "shown"), [("min", "lower is better"), ("max", "higher is better"), (None, "loss")])
def test_the_table_of_a_sweep_has_the_direction_of_its_metric(tmp_path, capsys, mode, shown):
    Record(tmp_path, {}, points({"1": [1.0, 2.0], "2": [2.0, 3.0]}), "loss", mode).show()
    words = " ".join(capsys.readouterr().out.split())
    assert shown in words
    assert ("better" in words) is (mode is not None)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [300, 80, 60, 20])
def test_a_table_shows_every_cell_on_any_terminal_and_in_a_file(monkeypatch, tmp_path, width, terminal):
    shown = io.StringIO()
    console = Console(file=shown, width=width, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    record = Record(tmp_path, {}, points({"5e-4": [0.5, 0.25], "1e-3": [2.0, 3.0]}), "loss", "min")
    record.show()
    table = results_table(record.contents())
    shown_words = set(shown.getvalue().split())
    assert shown_words >= set(" ".join(table.columns).split())
    for name, cells in table.rows:
        assert shown_words >= {name, *" ".join(cell.text for cell in cells).split()}


def test_a_resumed_sweep_knows_its_points_in_another_spelling(tmp_path):
    runs = parse(["train.lr=1e-3,1e-2"]).runs([5, 6])
    for run in runs[:3]:
        run.status, run.metrics = "finished", {"loss": 1.0}
    Record(tmp_path / "run", {}, runs, "loss", "min").start(resume=False, again="")
    again = parse(["train.lr=0.01,0.001"]).runs([5, 6])
    Record(tmp_path / "run", {}, again, "loss", "min").start(resume=True, again="")
    assert {(run.name, run.status) for run in again} == {(run.name, run.status) for run in runs[:3]} | {
        ("lr-0.01_seed-6", "pending")
    }


def test_the_interval_of_a_mean_has_its_coverage():
    rng = random.Random(0)
    for size in (3, 12):
        draws = [mean_interval([rng.gauss(1, 2) for _ in range(size)]) for _ in range(4000)]
        covered = sum(low <= 1 <= high for low, high in draws) / len(draws)
        assert abs(covered - 0.95) < 0.015
    assert mean_interval([1.0]) is None


def points(values: dict[str, list[float]], failed: str = "") -> list[TrialRun]:
    return [
        TrialRun(
            f"{name}{seed}",
            {"train.lr": name},
            seed,
            "failed" if f"{name}{seed}" == failed else "finished",
            {"loss": value},
        )
        for name, listed in values.items()
        for seed, value in enumerate(listed)
    ]


def test_points_are_compared_with_the_best_by_seed():
    rows, best = compare(points({"a": [1.0, 2.0, 3.0], "b": [1.5, 2.4, 3.6]}), "loss", mode="min")
    assert best == "train.lr=a"
    assert rows[0]["mean"] == 2.0
    assert rows[0]["deviation"] == 1.0
    assert rows[0]["difference"] is None
    over = rows[1]["difference"]
    assert over["pairs"] == 3
    assert over["mean"] == pytest.approx(0.5)
    assert (over["low"], over["high"]) == pytest.approx(
        (0.5 - 4.3027 * 0.1 / 3**0.5, 0.5 + 4.3027 * 0.1 / 3**0.5), abs=1e-4
    )
    assert compare(points({"a": [1.0], "b": [2.0]}), "loss", mode="max")[1] == "train.lr=b"


def test_a_point_with_a_run_that_failed_or_diverged_is_not_the_best():
    runs = points({"a": [0.1, math.nan], "b": [2.0, 3.0]})
    rows, best = compare(runs, "loss", mode="min")
    assert best == "train.lr=b"
    assert [row["finished"] for row in rows] == [1, 2]
    assert rows[0]["difference"] == {"mean": pytest.approx(-1.9), "low": None, "high": None, "pairs": 1}


@pytest.mark.slow
def test_a_run_whose_metric_is_nan_has_failed():
    done = fastloop("sweep", "recipe.yaml", "model.arguments.width=4,17", "train.epochs=1", "--monitor", "loss")
    assert done.returncode == 1, done.stdout
    assert [run["status"] for run in record()["runs"]] == ["finished", "failed"]
    assert "failed: width-17: validation loss is nan" in done.stdout


def test_folds_are_pairs_too_and_their_overlap_widens_the_interval():
    listed = [
        TrialRun(f"{name}{fold}", {"train.lr": name}, None, "finished", {"loss": value}, fold=fold)
        for name, values in {"a": [1.0, 2.0, 3.0], "b": [1.5, 2.4, 3.6]}.items()
        for fold, value in enumerate(values)
    ]
    over = compare(listed, "loss", mode="min")[0][1]["difference"]
    half = 4.3027 * 0.1 * (1 / 3 + 1 / 2) ** 0.5
    assert over["pairs"] == 3
    assert (over["low"], over["high"]) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)
    runs = parse(["train.lr=1,2"]).runs([None], range(3))
    assert [run.overrides[-1] for run in runs[::2]] == [f"plugins.folds.number={fold}" for fold in range(3)]
    assert runs[0].name == "lr-1_fold-0"
    assert len({run.name for run in runs}) == 6


@pytest.mark.slow
def test_a_sweep_cross_validates_and_resumes_with_a_new_point():
    command = ["sweep", "recipe.yaml", "--folds", "2", "--without", "progress", "train.epochs=1"]
    done = fastloop(*command, "train.lr=1e-2,3e-2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = record()
    assert [(run["name"], run["fold"]) for run in found["runs"]] == [
        ("lr-1e-2_fold-0", 0), ("lr-3e-2_fold-0", 0), ("lr-1e-2_fold-1", 1), ("lr-3e-2_fold-1", 1),
    ]  # fmt: skip
    losses = [metrics(f"run/lr-1e-2_fold-{fold}")["loss"] for fold in (0, 1)]
    assert losses[0] != losses[1]
    assert found["points"][0]["mean"] == fmean(losses)
    assert {row["difference"]["pairs"] for row in found["points"] if row["difference"]} == {2}
    alone = fastloop("train", "recipe.yaml", "train.epochs=1", "train.lr=1e-2", "--with", "folds", "plugins.folds.of=2",
                     "plugins.folds.number=1", "output=alone", "--without", "progress")  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    assert metrics("alone") == metrics("run/lr-1e-2_fold-1")
    refused = fastloop("evaluate", "alone", "--split", "validation")
    assert refused.returncode == 2
    assert_problem(refused.stderr, "trained-on-split plugins.folds: train validation")
    resumed = fastloop(*command, "train.lr=3e-2,1e-1", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [line for line in resumed.stdout.splitlines() if " of 4: " in line] == [
        "run 2 of 4: train.lr=1e-1 plugins.folds.number=0",
        "run 4 of 4: train.lr=1e-1 plugins.folds.number=1",
    ]
    assert_problem(fastloop(*command, "plugins.folds.of=3").stderr, "set-twice plugins.folds.of=3: --folds")


@pytest.mark.slow
def test_a_sweep_trains_the_grid_and_continues_after_a_failure():
    done = fastloop(
        "sweep",
        "recipe.yaml",
        "model.arguments.width=4,13",
        "--seeds",
        "2",
        "--monitor",
        "accuracy",
        "--without",
        "progress",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = record()
    assert [run["status"] for run in found["runs"]] == ["finished", "failed", "finished", "failed"]
    assert found["runs"][1]["reason"].startswith("exit code 1, before training")
    assert "no width of 13" in done.stderr
    assert found["best"] == "model.arguments.width=4"
    assert found["better"] == "higher"
    ours = [metrics(f"run/width-4_seed-{seed}")["accuracy"] for seed in (123, 124)]
    assert found["points"][0]["mean"] == fmean(ours)
    assert found["points"][0]["deviation"] == stdev(ours)
    assert "failed: width-13_seed-123" in done.stdout
    finished = re.findall(r"^completed: validation loss .*accuracy .*; summary: (.*)$", done.stdout, re.MULTILINE)
    assert finished == ["run/width-4_seed-123/summary.json", "run/width-4_seed-124/summary.json"]
    assert "peak" not in done.stdout, "a run has no table of its own"

    alone = fastloop(
        "train", "recipe.yaml", "model.arguments.width=4", "train.seed=124", "output=alone", "--without", "progress"
    )
    assert alone.returncode == 0, alone.stderr
    assert metrics("alone") == metrics("run/width-4_seed-124")

    assert [run.name for run in read([Path("run")]).runs] == ["width-4_seed-123", "width-4_seed-124"]
    shown = fastloop("report", "run")
    assert shown.returncode == 0, shown.stderr
    assert '<th scope="row">model.arguments.width=4</th>' in Path("report.html").read_text()


@pytest.mark.slow
def test_a_run_that_keeps_its_best_weights_counts_by_their_value():
    best = ["--with", "checkpoint-best", "--without", "progress", "train.evaluate_every=1"]
    done = fastloop("sweep", "recipe.yaml", "train.lr=3e-2,1", "--monitor", "loss", *best)
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = [json.loads(Path("run", name, "summary.json").read_text()) for name in ("lr-3e-2", "lr-1")]
    values = [summary["best"]["value"] for summary in summaries]
    assert values != [summary["validation"]["loss"] for summary in summaries], (
        "the last evaluation of a run is not its best"
    )
    assert [point["mean"] for point in record()["points"]] == values
    other = fastloop("sweep", "recipe.yaml", "train.lr=3e-2,1", "--monitor", "accuracy", *best, "output=other")
    assert other.returncode == 0, other.stdout + other.stderr
    last = [metrics(f"other/{name}")["accuracy"] for name in ("lr-3e-2", "lr-1")]
    assert [point["mean"] for point in record("other")["points"]] == last, "checkpoint-best goes by the loss"


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["checkpoint-best", "early-stopping"])
def test_the_metric_is_the_one_that_the_recipe_monitors(plugin):
    options = ["--with", plugin, f"plugins.{plugin}.monitor=accuracy", "--without", "progress"]
    done = fastloop("sweep", "recipe.yaml", "train.lr=3e-2,1", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (record()["monitor"], record()["better"]) == ("validation accuracy", "higher")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_sweep_resumes_without_repeating_a_finished_run(number):
    command = [
        "sweep",
        "recipe.yaml",
        "train.lr=1e-2,3e-2",
        "--seeds",
        "1",
        "--without",
        "progress",
        "data.arguments={wait: true}",
        "--monitor",
        "accuracy",
    ]
    with forked.Command("-m", "fastloop", *command) as process:
        deadline = time.monotonic() + 300
        while not Path("waiting").exists():
            assert process.poll() is None, process.stdout + process.stderr
            assert time.monotonic() < deadline
            time.sleep(0.05)
        owner = json.loads(Path("run/lr-3e-2_seed-123/.lock").read_text())["pid"]
        os.kill(process.pid, number)
        code = process.wait(300)
    assert code == (-number if number == signal.SIGKILL else 130), process.stdout + process.stderr
    while Path("/proc", str(owner)).exists():  # the run saves and stops when its launcher is killed
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [run["status"] for run in record()["runs"]] == [
        "finished",
        "running" if number == signal.SIGKILL else "stopped",
    ]
    Path("free").touch()
    before = Path("run/lr-1e-2_seed-123/summary.json").stat().st_mtime_ns

    refused = fastloop(*command)
    assert refused.returncode == 2
    assert_problem(refused.stderr, "folder-not-empty output: run")
    # a killed sweep prints nothing
    printed = re.findall(r": (fastloop sweep .*)", refused.stderr + process.stdout)
    assert len(printed) == 1 + (number == signal.SIGINT)
    assert set(printed) == {printed[0]}
    words = shlex.split(printed[0])
    assert words[0] == "fastloop"
    resumed = fastloop(*words[1:])
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "run 1 of 2" not in resumed.stdout
    assert "/checkpoints/step-" in resumed.stdout
    assert Path("run/lr-1e-2_seed-123/summary.json").stat().st_mtime_ns == before
    assert [run["status"] for run in record()["runs"]] == ["finished", "finished"]

    undisturbed = fastloop(
        "train", "recipe.yaml", "train.lr=3e-2", "train.seed=123", "output=alone", "--without", "progress"
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert metrics("run/lr-3e-2_seed-123") == metrics("alone")

    changed = fastloop(*command, "train.epochs=3", "--resume")
    assert changed.returncode == 2
    assert_problem(changed.stderr, "resume-differs run/")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "nothing-to-sweep --seeds --folds"),
        (("train.seed=1,2", "--seeds", "2"), "set-twice train.seed --seeds"),
        (("train.lr=1e-2,fast",), "invalid-value train.lr 'fast'"),
    ],
)
def test_a_wrong_command_line_is_explained_before_the_first_run(arguments, expected):
    done = fastloop("sweep", "recipe.yaml", *arguments)
    assert done.returncode == 2
    assert_problem(done.stderr, expected)
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_recipe_without_validation_data_ends_the_sweep_after_one_run():
    options = ["data.module=code.py:only_train", "--monitor", "loss", "--without", "progress"]
    done = fastloop("sweep", "recipe.yaml", "--seeds", "2", *options)
    assert done.returncode == 2
    assert_problem(done.stderr, "unknown-split --monitor loss: Add one to the data.")


@pytest.mark.slow
def test_a_metric_that_does_not_exist_ends_the_sweep_after_one_run():
    done = fastloop("sweep", "recipe.yaml", "--seeds", "2", "--monitor", "acuracy", "--without", "progress")
    assert done.returncode == 2
    assert_problem(done.stderr, "unknown-metric --monitor acuracy: validation 'acuracy' 'accuracy'")
    assert [run["status"] for run in record()["runs"]] == ["finished", "pending"]
    done = fastloop(
        "sweep", "recipe.yaml", "--seeds", "2", "--monitor", "accuracy", "--without", "progress", "--resume"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_sweeps_with_one_url_keep_their_runs_apart():
    Path("recipe.yaml").write_text(
        yaml.safe_dump(RECIPE | {"plugins": [*RECIPE["plugins"], {"remote-output": {"url": "far"}}]})
    )
    for output in ("run", "deep/other"):
        done = fastloop("sweep", "recipe.yaml", "--seeds", "1", f"output={output}")
        assert done.returncode == 0, done.stdout + done.stderr
    kept = sorted(str(path.parent) for path in Path("far").rglob("summary.json"))
    assert kept == ["far/other/seed-123", "far/run/seed-123"]
    assert json.loads(Path("far/run/seed-123/summary.json").read_text())["upload"]["url"].endswith("far/run/seed-123")
    again = fastloop("sweep", "recipe.yaml", "--seeds", "1", "output=another/run")
    assert again.returncode == 1
    assert_problem(again.stderr, "folder-not-empty remote-output.url: run/seed-123")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train.lr=1e-5..1e-3",), "missing-value train.lr=1e-5..1e-3 --trials"),
        (("train.lr=1,2", "--storage", "sqlite:///study.db"), "missing-value --storage"),
        (("train.lr=1,2", "--heartbeat", "9"), "missing-value --heartbeat"),
    ],
)
def test_what_needs_trials_is_refused_without_them(cli, arguments, expected):
    code, _, err = cli("sweep", "recipe.yaml", *arguments)
    assert code == 2
    assert_problem(err, expected)


@pytest.mark.parametrize("kind", ["sweep", "search"])
def test_a_folder_that_cannot_be_created_is_named(cli, kind):
    options = ("--trials", "2", "--mode", "min") if kind == "search" else ()
    if kind == "search":
        pytest.importorskip("optuna")
    Path("file").touch()
    code, _, err = cli("sweep", "digits_module", "train.lr=1e-3,1e-4", "output=file/runs", *options)
    assert code == 2
    assert_problem(err, "folder-not-writable output file/runs")


@pytest.mark.parametrize(
    ("kind", "files", "shown"),
    [
        ("search", ("recipe.yaml", "summary.json"), "a run of `fastloop train`"),  # another worker may be in it
        ("sweep", ("bench.json", "bench.md"), "bench.json, bench.md"),  # a search may begin beside other files
    ],
)
def test_a_folder_of_another_command_is_named_with_a_free_one(cli, kind, files, shown):
    if kind == "search":
        pytest.importorskip("optuna")
    Path("runs/a").mkdir(parents=True)
    Path(f"runs/a-{kind}").mkdir()
    for name in files:
        Path("runs/a", name).touch()
    options = ("--trials", "2", "--mode", "min") if kind == "search" else ()
    code, _, err = cli("sweep", "digits_module", "train.lr=1e-3,1e-4", "output=runs/a", *options)
    assert code == 2
    assert_problem(err, f"folder-not-empty output runs/a output=runs/a-{kind}2")
    assert shown in err


HOLD_LOCK = """
import time
from pathlib import Path
from fastloop.checkpoint.lock import Lock

lock = Lock(Path("runs/a"), "other.yaml")
Path("locked").touch()
time.sleep(600)
"""
"""Locks the run folder ``runs/a``, as a run that trains in it."""


def start_record(resume: bool = False) -> None:
    """Start the record of a sweep in the folder ``runs/a``."""
    Record(Path("runs/a"), {"recipe": "recipe.yaml", "base": {}}, [], "loss", "min").start(resume, "fastloop sweep")


def write_earlier_run() -> None:
    """Write files as `fastloop train` leaves them into ``runs/a``."""
    Path("runs/a").mkdir(parents=True)
    for name in (".lock", "recipe.yaml", "summary.json"):
        Path("runs/a", name).touch()


def test_an_earlier_run_in_the_folder_of_a_sweep_is_moved_aside(caplog):
    caplog.set_level("INFO", "fastloop")
    write_earlier_run()
    start_record()
    assert [path.name for path in Path("runs/a").iterdir()] == ["sweep.json"]
    assert Path("runs/a.1/summary.json").is_file()
    assert "an earlier run was in runs/a: moved to runs/a.1" in caplog.text


def test_a_sweep_does_not_move_a_run_that_trains():
    write_earlier_run()
    Path("hold.py").write_text(HOLD_LOCK)
    with forked.Command("hold.py") as process:
        while not Path("locked").exists():
            assert process.poll() is None, process.stdout + process.stderr
            time.sleep(0.05)
        with expect_problem("folder-in-use runs/a", RecipeError):
            start_record()
    assert Path("runs/a/summary.json").is_file()


def test_a_sweep_that_resumes_does_not_move_a_run():
    write_earlier_run()
    with expect_problem("folder-not-empty runs/a", UsageError):
        start_record(resume=True)
    assert Path("runs/a/summary.json").is_file()
