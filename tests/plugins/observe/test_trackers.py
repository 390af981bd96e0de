"""The plugin ``trackers``: what MLflow and W&B themselves read back, without a network.

Modules:
    plugins/fastloop_plugins/observe/_tracker_names.py
    plugins/fastloop_plugins/observe/trackers.py
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fastloop import Plugin, PluginCrash, PluginError, hookimpl
from fastloop.testing import expect_problem, find_problems
from fastloop_plugins.observe._tracker_names import MLFLOW_NAMES, TRACKERS, TrackerNames, TrackerRules
from fastloop_plugins.observe.trackers import Started

CURVES = {
    f"train/{name}" for name in ("loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second", "memory_bytes")
}
TRACKERS_OWN_WARNINGS = pytest.mark.filterwarnings("ignore")


class Logs(Plugin):
    """Logs a value of its own, and rows at two steps."""

    name = "logs"

    @hookimpl
    def after_step(self, run: Any) -> None:
        run.log("logs/step", run.state.step, reduce="max")
        if run.state.step in (6, 12):
            run.log_rows("samples", [{"prompt": "a", "answer": "b"}, {"prompt": f"step {run.state.step}"}])


@pytest.fixture(scope="module")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a database. MLflow needs ten seconds to make one, so tests share it, each with its own project."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/runs.db"


@pytest.fixture
def mlflow_client(mlflow_database: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("sqlalchemy")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_database)
    return mlflow.MlflowClient(mlflow_database)


def mlflow_run(client: Any, project: str) -> Any:
    """The only run of a project."""
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    return run


@TRACKERS_OWN_WARNINGS
def test_mlflow_reads_the_run_back_from_sqlite(tiny_run, tmp_path, mlflow_client):
    import mlflow

    result = tiny_run(
        [Logs(), {"trackers": {"trackers": ["mlflow"], "project": "tiny"}}, "ema"],
        log_every=6,
        output=tmp_path / "first",
    )
    run = mlflow_run(mlflow_client, "tiny")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert {
        "train.log_every": "6",
        "train.lr": "0.01",
        "plugins.trackers.project": "tiny",
        "plugins.ema": "on",
    }.items() <= run.data.params.items()
    assert {*CURVES, "logs/step", "validation/loss", "summary/steps"} <= run.data.metrics.keys()
    assert run.data.metrics["summary/steps"] == 18
    table = json.loads(Path(mlflow_client.download_artifacts(run.info.run_id, "samples.json")).read_text())
    assert table["columns"] == ["step", "prompt", "answer"]
    assert table["data"] == [[6, "a", "b"], [6, "step 6", None], [12, "a", "b"], [12, "step 12", None]]
    points = [(point.step, point.value) for point in mlflow_client.get_metric_history(run.info.run_id, "train/loss")]
    assert [step for step, _ in points] == [6, 12, 18]
    assert [value for _, value in points] == pytest.approx(
        [sum(result.losses[step - 6 : step]) / 6 for step in (6, 12, 18)]
    )
    evaluations = [
        (point.step, point.value) for point in mlflow_client.get_metric_history(run.info.run_id, "validation/loss")
    ]
    assert evaluations == [(9, result.recorder.metrics[0][1]["loss"]), (18, result.recorder.metrics[1][1]["loss"])]
    assert mlflow.active_run() is None, "the run is closed"


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes."""
    record, place = b"", 7
    while place + 7 <= len(data):
        if (left := -place % 32768) and left < 7:
            place += left  # no record header fits into the rest of a block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of W&B, which reads its settings once a process."""
    return tmp_path_factory.mktemp("wandb")


@pytest.fixture
def wandb_offline(wandb_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let W&B write to a folder only."""
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(wandb_folder), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    return wandb_folder


def read_wandb(folder: Path) -> list[Any]:
    """The records of the newest run in a folder, which W&B's own process writes."""
    from wandb.proto import wandb_internal_pb2

    file = max(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    deadline = time.monotonic() + 300
    records: list[Any] = []
    while not any(record.HasField("exit") for record in records) and time.monotonic() < deadline:
        records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file.read_bytes())]
    return records


@TRACKERS_OWN_WARNINGS
def test_wandb_offline_reads_the_run_back(tiny_run, tmp_path, wandb_offline):
    tiny_run([Logs(), {"trackers": {"trackers": ["wandb"], "project": "tiny"}}], log_every=6, output=tmp_path / "first")
    history: dict[str, list[str]] = {}
    names, config = set(), set()
    for record in read_wandb(wandb_offline):
        for item in record.history.item:
            history.setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
        if record.HasField("run"):
            names.add((record.run.project, record.run.display_name))
            config |= {item.key for item in record.run.config.update}
        config |= {item.key for item in record.config.update}
    assert names == {("tiny", "first")}
    assert {*CURVES, "logs/step", "validation/loss", "summary/steps"} <= history.keys()
    assert list(map(float, history["logs/step"])) == [6, 12, 18]
    assert any(name.startswith("samples") for name in history)
    assert "train.log_every" in config


# -- how a run ends ----------------------------------------------------------------------------------------------------


class Ends(Plugin):
    """Ends the run in its third step, or in a later hook."""

    name = "ends"

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step != 3:
            return
        if self.how == "error in a step":
            raise ValueError("out of luck")
        if self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.how == "second Ctrl-C":
            raise KeyboardInterrupt
        if self.how == "early stop":
            run.state.request_stop("it is good enough")

    @hookimpl
    def after_fit(self) -> None:
        if self.how == "error after training":
            raise ValueError("out of luck")

    @hookimpl
    def write_summary(self) -> None:
        if self.how == "error in the summary":
            raise ValueError("out of luck")


ENDS = {
    "completed": ("FINISHED", 0),
    "early stop": ("FINISHED", 0),
    "signal": ("KILLED", 255),
    "second Ctrl-C": ("KILLED", 255),
    "error in a step": ("FAILED", 1),
    "error after training": ("FAILED", 1),
    "error in the summary": ("FAILED", 1),
}
"""How a run ends -> its status in MLflow, and its exit code in W&B."""


def end(tiny_run: Any, how: str, tracker: str) -> None:
    """Train a run with a tracker that ends in a certain way, which also names its project."""
    with suppress(PluginCrash, KeyboardInterrupt):
        tiny_run([Ends(how), {"trackers": {"trackers": [tracker], "project": how}}], epochs=1)


@TRACKERS_OWN_WARNINGS
@pytest.mark.parametrize("how", ENDS)
def test_mlflow_has_the_status_of_the_run(tiny_run, mlflow_client, how):
    end(tiny_run, how, "mlflow")
    assert mlflow_run(mlflow_client, how).info.status == ENDS[how][0]


@TRACKERS_OWN_WARNINGS
@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_wandb_has_the_exit_code_of_the_run(tiny_run, wandb_offline, how):
    end(tiny_run, how, "wandb")
    (code,) = [record.exit.exit_code for record in read_wandb(wandb_offline) if record.HasField("exit")]
    assert code == ENDS[how][1]


@TRACKERS_OWN_WARNINGS
def test_every_tracker_is_finished_though_one_fails_to(tiny_run, mlflow_client):
    class Breaks(Plugin):
        name = "breaks"

        @hookimpl
        def after_fit(self, run: Any) -> None:
            trackers = next(plugin for plugin in run.plugins if plugin.name == "trackers")
            trackers.started.append(Started("another", None, TrackerNames("another", TrackerRules()), {}))

        @hookimpl
        def write_summary(self, run: Any) -> None:
            raise ValueError("out of luck")  # so that `trackers` logs nothing to it

    with pytest.raises(PluginCrash):
        tiny_run([Breaks(), {"trackers": {"trackers": ["mlflow"], "project": "breaks"}}], epochs=1)
    assert mlflow_run(mlflow_client, "breaks").info.status == "FAILED"


# -- names and values --------------------------------------------------------------------------------------------------

NAMES = ("mape_2_", "mape@2%", "a//b", "/a", "..", ".", "../a", "a/..", "a/", "a" * 300, "ü", "a'b", "a b:c", "a\nb")


class LogsNames(Plugin):
    """Logs a value under each name."""

    name = "names"

    @hookimpl
    def after_step(self, run: Any) -> None:
        for number, name in enumerate(NAMES):
            run.log(name, float(number), reduce="max")


@TRACKERS_OWN_WARNINGS
def test_refused_names_and_long_values_are_replaced_and_reported_once(tiny_run, mlflow_client, tmp_path, caplog):
    project = "O'Brien's " + "x" * 7000
    tracked = {"trackers": {"trackers": ["mlflow"], "project": project}}
    result = tiny_run([LogsNames(), tracked], log_every=6, output=tmp_path / ("r" * 252))
    assert result.summary["status"] == "completed"
    run = mlflow_run(mlflow_client, TRACKERS["mlflow"].project.replace(project))
    values = {value for name, value in run.data.metrics.items() if not name.startswith(("train", "valid", "summary"))}
    assert values == set(map(float, range(len(NAMES)))), "each name has a metric of its own"
    messages = [str(problem) for problem in find_problems(caplog, "name-replaced")]
    assert len(messages) == len(set(messages))
    assert {name for name in NAMES if any(f"name {name!r}." in message for message in messages)} == {
        name for name in NAMES if name not in run.data.metrics
    }
    assert run.data.params["plugins.trackers.project"] == project[:6000]
    assert len([record for record in caplog.records if "'plugins.trackers.project'" in record.getMessage()]) == 1


def test_mlflow_accepts_each_replaced_name_and_keeps_each_accepted_name():
    validation = pytest.importorskip("mlflow.utils.validation")
    from mlflow.exceptions import MlflowException

    def accepts(name: str) -> bool:
        try:
            validation._validate_metric(name, 1.0, 0, 0)
            validation._validate_param(name, "value")
        except MlflowException:
            return False
        return True

    for letters in itertools.product("a./ @ü", repeat=4):
        name = "".join(letters)
        for size in (name, name * 70):
            replaced = MLFLOW_NAMES.replace(size)
            assert accepts(replaced), (size, replaced)
            assert accepts(MLFLOW_NAMES.replace_apart(size))
            assert (replaced == size) is accepts(size), size


def test_names_that_are_replaced_alike_stay_apart():
    names = TrackerNames("mlflow", TRACKERS["mlflow"])
    metrics = {"a@b": 1.0, "a%b": 2.0, "a_b": 3.0, "x" * 300: 4.0, "x" * 301: 5.0}
    first = names.metrics(metrics)
    assert sorted(first.values()) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert names.metrics(dict(reversed(metrics.items()))) == first, "the same names at each step"


def test_a_param_that_is_too_long_is_cut_with_a_warning(caplog):
    names = TrackerNames("mlflow", TRACKERS["mlflow"])
    assert names.params({"short": "x" * 6000, "long": "y" * 6001}) == {"short": "x" * 6000, "long": "y" * 6000}
    (problem,) = find_problems(caplog, "value-cut plugins.trackers: mlflow 6000")
    assert "'long' has 6001" in str(problem)


@TRACKERS_OWN_WARNINGS
def test_wandb_accepts_a_replaced_project(tiny_run, tmp_path, wandb_offline):
    project = "a/b\\c#d?e%f:g" + "h" * 200
    tiny_run([{"trackers": {"trackers": ["wandb"], "project": project}}], epochs=1, output=tmp_path / ("r" * 200))
    (run,) = [record.run for record in read_wandb(wandb_offline) if record.HasField("run")][:1]
    assert run.project.startswith("a_b_c_d_e_f_g")
    assert (len(run.project), len(run.display_name)) == (128, 128)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlflw", "unknown-choice plugins.trackers.trackers: 'mlflw' 'mlflow'"),
        ("tensorboard", "unknown-choice plugins.trackers.trackers: tensorboard"),
        ("comet_ml", "not-installed pip install comet_ml"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_before_data_is_loaded(
    tiny_run, hook_calls, monkeypatch, name, expected
):
    find_spec = importlib.util.find_spec

    def find_no_tracker(module: str, package: str | None = None) -> Any:
        return None if module == name else find_spec(module, package)

    monkeypatch.setattr("importlib.util.find_spec", find_no_tracker)
    with expect_problem(expected, PluginError):
        tiny_run([{"trackers": {"trackers": [name]}}])
    assert "build_datasets" not in [call.hook for call in hook_calls]


def test_secrets_of_the_recipe_are_hidden_and_nested_keys_are_dotted():
    from fastloop.recipe import secrets
    from fastloop_plugins.observe.trackers import flatten

    tree = {"data": {"api_key": "abcdef123", "files": ["a", "b"]}, "plugins": {"ema": {}, "log": False}, "model": None}
    assert dict(flatten(secrets.hidden(tree))) == {
        "data.api_key": "(hidden)",
        "data.files": "['a', 'b']",
        "plugins.ema": "on",
        "plugins.log": False,
        "model": "None",
    }
