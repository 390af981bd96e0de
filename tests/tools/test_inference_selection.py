"""`fastloop predict` and `fastloop evaluate` select plugins by `auto`, also for a run that was trained without it."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from inference_runs import texts, train, write_csv, write_recipe

from fastloop import hookimpl
from fastloop.testing import assert_problem, find_problems
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.kernels.cls_last_layer import ClsLastLayer
from fastloop_plugins.tasks.text_classification import TextClassification
from fastloop_tools.inference import target

LINE = "auto: selects cls-last-layer, packing (--without auto: none)\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was trained without plugins."""
    folder = tmp_path_factory.mktemp("trained")
    train(write_recipe(folder))
    write_csv(folder / "large.csv", texts(600, 200))
    assert (folder / "large.csv").stat().st_size > target.SHORT
    return folder / "run"


def predict(cli: Any, *arguments: Any) -> tuple[list[float], str]:
    """The probabilities of a class, and what the command printed."""
    code, out, err = cli("predict", *map(str, arguments), "--out", "out.csv")
    assert code == 0, err
    rows = csv.DictReader(io.StringIO(Path("out.csv").read_text()))
    return [float(row["probability_good"]) for row in rows], out + err


def test_a_large_file_is_predicted_with_selected_plugins(run, cli):
    large = run.parent / "large.csv"
    found, said = predict(cli, run, large)
    expected, said_without = predict(cli, run, large, "--without", "auto")
    assert LINE in said
    assert "auto:" not in said_without
    assert found == pytest.approx(expected, rel=1e-5)
    for few in ("a fine film", run.parent / "test.csv"):
        assert "auto:" not in predict(cli, run, few)[1]
    listed = predict(cli, run, large, "--without", "packing")[1]
    assert "auto: selects cls-last-layer (" in listed, "plugins that are off stay off"
    code, out, err = cli("evaluate", str(run))
    assert code == 0, err
    assert LINE in out + err


def test_an_error_of_the_selection_is_logged_and_nothing_is_selected(run, cli, monkeypatch):
    def fail(*args: Any) -> None:
        raise RuntimeError("no rule")

    large = run.parent / "large.csv"
    monkeypatch.setattr(Packing, "recommend", fail)
    found, said = predict(cli, run, large)
    assert_problem(said, "nothing-selected auto: no rule")
    assert len(found) == 600
    code, _, err = cli("predict", str(run), str(large), "plugins.auto.numerics=bitwise", "--with", "auto")
    assert code == 0, err
    code, _, err = cli("predict", str(run), str(large), "--with", "no-such-plugin")
    assert code == 2
    assert_problem(err, "unknown-plugin 'no-such-plugin'")
    assert not find_problems(err, "nothing-selected"), "the recipe itself is wrong"


def test_a_selected_plugin_with_which_a_prediction_fails_is_left_out(run, cli, monkeypatch):
    usual = TextClassification.predict

    @hookimpl
    def reads_no_rows(self: Any, run: Any, batch: Any) -> Any:
        if "packed" in batch:
            raise ValueError("packed rows")
        return usual(self, run=run, batch=batch)

    monkeypatch.setattr(TextClassification, "predict", reads_no_rows)
    found, said = predict(cli, run, run.parent / "large.csv")
    assert_problem(said, "plugin-left-out packing DistilBertForSequenceClassification ValueError")
    assert len(found) == 600


def test_no_line_of_stdin_is_lost_when_the_run_is_built_again(run, cli, monkeypatch):
    monkeypatch.setattr(ClsLastLayer, "adapt", lambda self, model: "has other layers")
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{row['text']}\n" for row in texts(40))))
    found, said = predict(cli, run, "-", "--with", "auto", "--chunk", "16")
    assert_problem(said, "plugin-left-out auto: cls-last-layer: DistilBertForSequenceClassification")
    assert len(found) == 40
