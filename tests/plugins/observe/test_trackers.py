"""The plugin ``trackers``: what MLflow and W&B themselves read back, without a network."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastloop import Plugin, PluginError, hookimpl

CURVES = {
    f"train/{name}" for name in ("loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second", "memory_bytes")
}
TRACKERS_OWN_WARNINGS = pytest.mark.filterwarnings("ignore")


class Logs(Plugin):
    """Logs a value of its own."""

    name = "logs"

    @hookimpl
    def after_step(self, run: Any) -> None:
        run.log("logs/step", run.state.step, reduce="max")


@TRACKERS_OWN_WARNINGS
def test_mlflow_reads_the_run_back_from_sqlite(tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("sqlalchemy")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    result = tiny_run(
        [Logs(), {"trackers": {"trackers": ["mlflow"], "project": "tiny"}}, "ema"],
        log_every=6,
        output=tmp_path / "first",
    )
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/runs.db")
    experiment = client.get_experiment_by_name("tiny")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert {
        "train.log_every": "6",
        "train.lr": "0.01",
        "plugins.trackers.project": "tiny",
        "plugins.ema": "on",
    }.items() <= run.data.params.items()
    assert {*CURVES, "logs/step", "validation/loss", "summary/steps"} <= run.data.metrics.keys()
    assert run.data.metrics["summary/steps"] == 18
    points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert [step for step, _ in points] == [6, 12, 18]
    assert [value for _, value in points] == pytest.approx(
        [sum(result.losses[step - 6 : step]) / 6 for step in (6, 12, 18)]
    )
    evaluations = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "validation/loss")]
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


@TRACKERS_OWN_WARNINGS
def test_wandb_offline_reads_the_run_back(tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    tiny_run([Logs(), {"trackers": {"trackers": ["wandb"], "project": "tiny"}}], log_every=6, output=tmp_path / "first")
    (file,) = Path(tmp_path).rglob("*.wandb")
    history: dict[str, list[str]] = {}
    names, config = set(), set()
    deadline = time.monotonic() + 300
    records: list[Any] = []
    # written by W&B's own process
    while not any(record.HasField("exit") for record in records) and time.monotonic() < deadline:
        records = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file.read_bytes())]
    for record in records:
        for item in record.history.item:
            history.setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
        if record.HasField("run"):
            names.add((record.run.project, record.run.display_name))
            config |= {item.key for item in record.run.config.update}
        config |= {item.key for item in record.config.update}
    assert names == {("tiny", "first")}
    assert {*CURVES, "logs/step", "validation/loss", "summary/steps"} <= history.keys()
    assert list(map(float, history["logs/step"])) == [6, 12, 18]
    assert "train.log_every" in config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlflw", r"plugins.trackers.trackers: no tracker 'mlflw'. Did you mean 'mlflow'\?"),
        ("tensorboard", "List the plugin tensorboard instead"),
        ("comet_ml", "comet_ml is not installed. Install it: pip install comet_ml"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_before_data_is_loaded(
    tiny_run, hook_calls, monkeypatch, name, message
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginError, match=message):
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
