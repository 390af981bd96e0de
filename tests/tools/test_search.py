"""`fastloop sweep --trials`: trials of Optuna, by workers that share a SQLite file and may be killed.

Modules:
    plugins/fastloop_tools/sweep/search.py
    plugins/fastloop_tools/sweep/space.py
    plugins/fastloop_tools/sweep/study.py
    plugins/fastloop_tools/sweep/worker.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import forked
import optuna
import pytest
import yaml
from search_runs import CODE, RECIPE

from fastloop.errors import UsageError
from fastloop.testing import assert_problem, expect_problem
from fastloop_tools.report.read import read
from fastloop_tools.sweep.space import parse
from fastloop_tools.sweep.study import is_counted, open_study, rank_trials, read_trials
from fastloop_tools.sweep.worker import TrialFailed, Worker
from fastloop_tools.trials.runs import SweepSettings

SEARCH = ("sweep", "recipe.yaml", "--trials", "20", "--without", "progress")
COMMAND = (*SEARCH, "train.lr=1e-4..1e-1", "--storage", "sqlite:///study.db")


@pytest.fixture(autouse=True)
def _recipe():
    Path("code.py").write_text(CODE)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


def fastloop(*arguments: str) -> Any:
    return forked.run("-m", "fastloop", *arguments, timeout=600)


def trials() -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="run", storage="sqlite:///study.db").trials


def test_ranges_and_lists_are_axes_and_the_rest_is_fixed():
    axes, fixed = parse(
        [
            "a=1e-5..1e-3",
            "b=4,8,16",
            "c=1..8",
            "d=0.1..0.9",
            "e=log(1..1024)",
            "f=../data",
            "g=3",
            "h=-1..1.5",
            "i=1..1000",
            "j=9e-5..9e-3",
            "k=9e-5..8.9e-3",
        ]
    )
    assert fixed == ["f=../data", "g=3"]
    found = {axis.key: (axis.values or axis.ends, axis.log) for axis in axes}
    assert found == {
        "a": ((1e-5, 1e-3), True),
        "b": (("4", "8", "16"), False),
        "c": ((1, 8), False),
        "d": ((0.1, 0.9), False),
        "e": ((1, 1024), True),
        "h": ((-1.0, 1.5), False),
        "i": ((1, 1000), False),
        "j": ((9e-5, 9e-3), True),
        "k": ((9e-5, 8.9e-3), False),
    }


@pytest.mark.parametrize("digits", ["1", "2", "3", "4", "5", "6", "7", "8", "9", "1.1", "2.5", "3.3", "7.7"])
def test_a_range_of_exactly_two_decades_is_logarithmic(digits):
    for power in range(-12, 9):
        ends = f"{digits}e{power}..{digits}e{power + 2}"
        (axis,), _ = parse([f"a={ends}"])
        assert axis.log, ends
        assert "logarithmic" in axis.describe()
        whole = float(digits)
        (below,), _ = parse([f"a={whole * 1.01:g}e{power}..{digits}e{power + 2}"])
        assert not below.log
        assert "linear" in below.describe()


def test_values_lie_in_their_range_and_are_text_of_the_command_line():
    axes, _ = parse(["a=1e-5..1e-3", "b=x,[1,2]", "c=log(1..1024)"])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    values = [{axis.key: axis.suggest(trial) for axis in axes} for trial in (study.ask() for _ in range(200))]
    assert all(1e-5 <= float(row["a"]) <= 1e-3 for row in values)
    assert {row["b"] for row in values} == {"x", "[1,2]"}
    assert all(1 <= int(row["c"]) <= 1024 for row in values)
    assert 0.3 < sum(int(row["c"]) <= 32 for row in values) / 200 < 0.7  # half of a logarithmic scale
    assert 0.3 < sum(float(row["a"]) <= 1e-4 for row in values) / 200 < 0.7


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("train.lr=1e-3..1e-5", "out-of-range"),
        ("train.lr=4..4", "out-of-range"),
        ("train.lr=1e-5..", "wrong-format"),
        ("train.lr=1..inf", "wrong-format"),
        ("train.lr=log(fast..slow)", "wrong-format"),
        ("train.lr=log(1..2", "wrong-format"),
        ("train.lr=log(0..1)", "out-of-range"),
        ("train.lr=1,,2", "repeated-value"),
    ],
)
def test_a_wrong_range_is_refused(item, expected):
    with expect_problem(expected, UsageError):
        parse([item])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "nothing-to-sweep"),
        (("train.lr=1..2", "--folds", "2"), "exclusive-options --trials --folds"),
        (("train.lr=1..2", "--resume"), "exclusive-options --trials --resume"),
        (("train.lrr=1e-5..1e-3",), "unknown-option 'lr'"),
        (("plugins.checkpoint-best.keep=1..2",), "unknown-option"),
        (("train.epochs=1.0..2.5",), "invalid-value train.epochs"),
        (("train.seed=1,2", "--seeds", "2"), "set-twice --seeds"),
        (("output=1..2",), "wrong-format"),
        (("train.lr=1..2", "--storage", "study.db"), "unreachable-url --storage study.db"),
        (("train.lr=1..2", "--storage", "sqlite:////no/such/folder/study.db"), "unreachable-url"),
        (
            ("train.lr=1..2", "--storage", "nodb://user:open-sesame@host/name"),
            "unreachable-url --storage nodb://(hidden)@host/name",
        ),
    ],
)
def test_a_wrong_command_line_is_explained_before_the_first_trial(cli, arguments, expected):
    code, out, err = cli(*SEARCH, *arguments)
    assert code == 2
    assert_problem(err, expected)
    assert "open-sesame" not in out + err
    assert not list(Path().glob("run/trial-*"))


def test_a_missing_optuna_is_named_with_its_extra(cli, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    code, _, err = cli(*COMMAND)
    assert code == 2
    assert "pip install 'fastloop-train[optuna]'" in err


@pytest.mark.slow
def test_a_search_shows_its_trials_and_its_study_takes_no_other_settings():
    done = fastloop(*COMMAND, "model.arguments.width=4,8", "--trials", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(Path("run/sweep.json").read_text())
    assert (found["monitor"], found["better"]) == ("validation accuracy", "higher")  # those of checkpoint-best
    assert "higher is better" in " ".join(done.stdout.split())
    assert "train.lr: numbers from 0.0001 to 0.1, logarithmic scale\n" in done.stdout
    assert "model.arguments.width: one of 4, 8\n" in done.stdout
    assert len({run["name"] for run in found["runs"]}) == 2
    bests = {}
    for run in found["runs"]:
        best = json.loads(Path("run", run["name"], "summary.json").read_text())["best"]["value"]
        assert run["metrics"]["accuracy"] == best  # the value of the model that the run exports
        bests[int(run["name"].removeprefix("trial-"))] = best
        recipe = yaml.safe_load(Path("run", run["name"], "recipe.yaml").read_text())
        lr, width = run["values"]["train.lr"], run["values"]["model.arguments.width"]
        assert (recipe["train"]["lr"], recipe["model"]["arguments"]["width"]) == (float(lr), int(width))
    assert {trial.number: trial.value for trial in trials()} == bests
    shown = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("trial-")]
    assert [value for _, value in shown] == [f"{value:.4f}" for value in sorted(bests.values(), reverse=True)]

    again = fastloop(*COMMAND, "model.arguments.width=4,8", "--trials", "2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "The study goes on: 2 trials are done, 0 of 2 trials remain.\n" in again.stdout
    assert "trial 1 of 2, in trial-0000: " in done.stdout
    assert "of 2, in " not in again.stdout, "nothing is trained"
    assert "best: fastloop train recipe.yaml --without progress train.lr=" in again.stdout
    assert len(trials()) == 2
    assert sorted(run.name for run in read([Path("run")]).runs) == ["trial-0000", "trial-0001"]

    for change, message in (
        (("model.arguments.width=4,16",), "search.model.arguments.width: 4,8 in the study, 4,16 here"),
        (("model.arguments.width=4,8", "train.epochs=1"), "recipe.train.epochs: 2 in the study, 1 here"),
        (
            ("model.arguments.width=4,8", "--monitor", "loss"),
            "optimized: highest accuracy in the study, lowest loss here",
        ),
    ):
        refused = fastloop(*COMMAND, *change)
        assert refused.returncode == 2
        assert message in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "direction"),
    [("MulticlassAccuracy", "MAXIMIZE"), ("MulticlassHammingDistance", "MINIMIZE"), ("MulticlassSpecificity", None)],
)
def test_the_direction_of_a_search_is_that_of_the_metric_and_not_of_its_name(metric, direction):
    task = {"loss": "cross_entropy", "metrics": {"score": {"type": metric, "num_classes": 3}}}
    plugins = [{"module": task}, {"checkpoint-best": {"monitor": "loss"}}]
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"plugins": plugins}))
    done = fastloop(*COMMAND, "--monitor", "score", "--trials", "1")
    if direction is None:
        assert done.returncode == 2, done.stdout + done.stderr
        assert_problem(done.stderr, "unknown-direction 'score' --mode min max")
        assert not Path("run").exists()
        done = fastloop(*COMMAND, "--monitor", "score", "--trials", "1", "--mode", "max")
    assert done.returncode == 0, done.stdout + done.stderr
    study = optuna.load_study(study_name="run", storage="sqlite:///study.db")
    assert study.direction.name == (direction or "MAXIMIZE")


@pytest.mark.slow
def test_a_run_that_fails_counts_and_the_same_values_are_not_trained_twice():
    # Width 13 fails. The draw has no seed: four trials would all have width 4 in one of 16 runs of this test.
    done = fastloop(
        "sweep", "recipe.yaml", "model.arguments.width=4,13", "--trials", "12", "--seeds", "2", "--without", "progress"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: exit code 1, before training" in done.stdout
    found = optuna.load_study(study_name="run", storage="sqlite:///run/study.db").trials
    assert len(found) == 12
    finished = [trial for trial in found if trial.state.name == "COMPLETE"]
    assert all(trial.params == {"model.arguments.width": "4"} for trial in finished)
    assert len({trial.value for trial in finished}) <= 1
    trained = [path for path in Path("run").glob("trial-*") if (path / "summary.json").exists()]
    assert len(trained) == 2 * bool(finished)
    if finished:
        bests = [json.loads((path / "summary.json").read_text())["best"]["value"] for path in trained]
        assert finished[0].value == pytest.approx(sum(bests) / 2)


@pytest.mark.slow
def test_two_workers_share_the_trials_of_a_new_database():
    arguments = ("-m", "fastloop", *COMMAND, "--trials", "5")
    with forked.Command(*arguments) as first, forked.Command(*arguments) as second:
        codes = first.wait(400), second.wait(400)
    shown = first.stdout + first.stderr + second.stdout + second.stderr
    assert codes == (0, 0), shown
    finished = [trial for trial in trials() if trial.state.name == "COMPLETE"]
    assert len(finished) in (5, 6), "both workers may begin the last one"
    assert len({trial.params["train.lr"] for trial in finished}) == len(finished)
    assert len({trial.user_attrs["fastloop:worker"] for trial in finished}) == 2
    assert len(list(Path("run").glob("trial-*/summary.json"))) == len(finished)
    assert first.stdout.count("best: fastloop train") == second.stdout.count("best: fastloop train") == 1


def test_a_trial_that_other_workers_made_superfluous_is_not_trained():
    """Several workers see that one trial is missing, and begin it."""
    settings = SweepSettings("recipe.yaml", [], [], [], "loss", 1)
    study = open_study("sqlite:///study.db", "run", "min", {"search": {"train.lr": "1e-4..1e-1"}}, 60)
    axes, _ = parse(["train.lr=1e-4..1e-1"])
    worker = Worker(study, axes, [None], 2, settings, lambda: None)
    for _ in range(2):
        study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING))
    study.optimize(worker.run_trial, n_trials=1, catch=(TrialFailed,))
    assert [trial.state.name for trial in read_trials(study)] == ["RUNNING", "RUNNING", "FAIL"]
    assert [row.number for row in rank_trials(study)] == [0, 1]
    assert sum(map(is_counted, read_trials(study))) == 2
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_another_worker_completes_the_search_of_a_stopped_one(number):
    command = (*COMMAND, "data.arguments={wait: true}", "--trials", "3", "--heartbeat", "1")
    with forked.Command("-m", "fastloop", *command) as worker:
        deadline = time.monotonic() + 300
        while not Path("waiting").exists():
            assert worker.poll() is None, worker.stdout + worker.stderr
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(worker.pid, number)
        code = worker.wait(300)
    assert code == (-number if number == signal.SIGKILL else 130), worker.stdout + worker.stderr
    Path("free").touch()
    before = Path("run/trial-0000/summary.json").stat().st_mtime_ns

    done = fastloop(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path("run/trial-0000/summary.json").stat().st_mtime_ns == before
    assert [trial.state.name for trial in trials()] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    # the first worker's second trial is lost, or still seems to run
    assert re.search(r"The study goes on: 1 trial is done,( 1 is running,)? [12] of 3 trials remains?\.", done.stdout)
    begun = [line.partition(":")[0] for line in done.stdout.splitlines() if " of 3, in " in line]
    assert [line.split(" in ")[1] for line in begun] == ["trial-0002", "trial-0003"]
    assert begun[-1] == "trial 3 of 3, in trial-0003"
    assert ["trial-0001", "lost"] in [row.split()[:2] for row in done.stdout.splitlines()]
