"""The plugin ``log``: metrics.jsonl and log.txt.

Modules:
    plugins/fastloop_plugins/observe/log.py
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import fastloop
from fastloop import Plugin, PluginError, hookimpl
from fastloop.testing import expect_problem, find_problems
from fastloop_plugins.observe.log import _LogFile


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def file_handlers() -> list[logging.Handler]:
    return [handler for handler in logging.getLogger("fastloop").handlers if isinstance(handler, logging.FileHandler)]


def test_a_log_point_is_the_mean_of_the_losses_since_the_last(tiny_run):
    result = tiny_run(["log"], log_every=4)
    points = [line for line in lines(result.trainer.run.folder) if "split" not in line]
    assert [point["step"] for point in points] == [4, 8, 12, 16]
    for point in points:
        expected = result.losses[point["step"] - 4 : point["step"]]
        assert point["loss"] == pytest.approx(sum(expected) / 4, rel=1e-12)
        assert point["lr"] == 1e-2
        assert point["samples_per_second"] > 0
    assert [point["epoch"] for point in points] == [1, 1, 2, 2]


class Norms(Plugin):
    """Norms of the steps' unclipped gradients, and how often the strategy computed one."""

    name = "norms"

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.calls = 0

    @hookimpl
    def after_backward(self, run: Any) -> None:
        gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())

    @hookimpl
    def before_fit(self, run: Any) -> None:
        for name in ("gradient_norm", "clip_gradients"):
            setattr(run.strategy, name, self.counted(getattr(run.strategy, name)))

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            self.calls += 1
            return method(*arguments)

        return count


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_log_point_has_the_norm_of_its_step_before_clipping(tiny_run, max_norm):
    norms = Norms()
    result = tiny_run([norms], log_every=4, max_grad_norm=max_norm)
    points = [line for line in lines(result.trainer.run.folder) if "split" not in line]
    assert [point["grad_norm"] for point in points] == [norms.norms[point["step"] - 1] for point in points]
    assert norms.calls == (18 if max_norm else 4), "without clipping, only at log points"


def test_evaluations_are_log_points_with_their_split(tiny_run):
    result = tiny_run(["log"])
    evaluations = [line for line in lines(result.trainer.run.folder) if "split" in line]
    assert [(line["step"], line["epoch"], line["split"]) for line in evaluations] == [
        (9, 1, "validation"),
        (18, 2, "validation"),
    ]
    assert [line["loss"] for line in evaluations] == [metrics["loss"] for _, metrics in result.recorder.metrics]


def test_what_is_logged_goes_to_log_txt_with_its_time(tiny_run):
    logging.getLogger("fastloop").setLevel(logging.INFO)
    folder = tiny_run(["log"]).trainer.run.folder
    text = (folder / "log.txt").read_text().splitlines()
    assert any("step 18, validation: loss" in line for line in text)
    assert all(line[:2] == "20" and " INFO " in line for line in text)
    assert not file_handlers(), "the run's handler is taken off at its end"


class Describes(Plugin):
    """Logs a line while the run is built, and may then refuse it."""

    name = "describes"

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.refuses = refuses

    @hookimpl
    def before_prepare(self) -> None:
        self.log.info("6 rows")

    @hookimpl
    def check_run(self) -> None:
        if self.refuses:
            raise PluginError("refused.")


def test_lines_of_the_build_come_first_and_once(tiny_run):
    logging.getLogger("fastloop").setLevel(logging.INFO)
    folder = tiny_run(["log", Describes()]).trainer.run.folder
    text = (folder / "log.txt").read_text().splitlines()
    assert text[0].endswith("INFO describes: 6 rows")
    assert sum("6 rows" in line for line in text) == 1


def test_a_build_that_is_refused_leaves_no_handler(tiny_run):
    before = list(logging.getLogger("fastloop").handlers)
    with pytest.raises(PluginError):
        tiny_run(["log", Describes(refuses=True)])
    assert logging.getLogger("fastloop").handlers == before


def test_a_record_after_the_end_does_not_open_the_file_again(tmp_path):
    """The thread that logs a signal may hold the handler while ``teardown`` closes it."""
    handler = _LogFile(tmp_path / "log.txt")
    record = logging.LogRecord("fastloop", logging.WARNING, "", 0, "interrupted", (), None)
    handler.handle(record)
    handler.close()
    handler.handle(record)
    assert handler.stream is None
    assert (tmp_path / "log.txt").read_text() == "interrupted\n"


def test_a_failed_run_leaves_its_record_whole_and_its_files_closed(tiny_run):
    class Fails(Plugin):
        name = "fails"

        @hookimpl
        def before_step(self, run: Any) -> None:
            if run.state.step == 5:
                raise ValueError("on purpose")

    with expect_problem("plugin-crashed 'fails' before_step: ValueError: on purpose"):
        tiny_run([Fails()], log_every=1, output="out")
    assert [line["step"] for line in lines(Path("out"))] == [1, 2, 3, 4, 5]
    assert json.loads(Path("out/summary.json").read_text())["status"] == "failed"
    assert not file_handlers()


def test_a_loss_that_is_no_number_is_null_in_the_json(tiny_run):
    model = torch.nn.Linear(8, 3)
    torch.nn.init.constant_(model.weight, float("nan"))
    folder = tiny_run(log_every=9, model=model, epochs=1).trainer.run.folder
    assert lines(folder)[0]["loss"] is None


def test_the_log_changes_no_number(tiny_run):
    with_log, without = tiny_run(log_every=1), tiny_run([{"log": False}])
    assert with_log.losses == without.losses
    assert all(torch.equal(with_log.weights[name], without.weights[name]) for name in without.weights)
    assert not (without.trainer.run.folder / "metrics.jsonl").exists()


def test_summary_has_the_versions_that_ran(tiny_run):
    versions = tiny_run(["log"]).summary["versions"]
    versions["torch"] = versions["torch"].partition("+")[0]  # its build, such as +cu130, may be missing in its metadata
    assert versions == {
        "python": platform.python_version(),
        "fastloop": fastloop.__version__,
        "torch": torch.__version__.partition("+")[0],
        "accelerate": accelerate.__version__,
    }


class Samples(Plugin):
    """Logs rows in every third step."""

    name = "samples"

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step % 3 == 0:
            run.log_rows("samples", [{"prompt": f"step {run.state.step}", "ids": [1, None]}, {"prompt": "ä|b"}])


def sample_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows" / "samples.jsonl").read_text().splitlines()]


def test_rows_are_in_a_file_of_their_name(tiny_run):
    folder = tiny_run(["log", Samples()]).trainer.run.folder
    rows = sample_lines(folder)
    assert [row["step"] for row in rows] == [3, 3, 6, 6, 9, 9, 12, 12, 15, 15, 18, 18]
    assert rows[:2] == [{"step": 3, "prompt": "step 3", "ids": [1, None]}, {"step": 3, "prompt": "ä|b"}]


class BlocksRows(Plugin):
    """Makes a file where the folder of the rows would be."""

    name = "blocks-rows"

    @hookimpl
    def before_fit(self, run: Any) -> None:
        (run.folder / "rows").touch()


def test_rows_that_cannot_be_written_are_one_warning(tiny_run, caplog):
    assert tiny_run(["log", BlocksRows(), Samples()], epochs=1).summary["status"] == "completed"
    assert len(find_problems(caplog, "file-not-writable log: rows/samples.jsonl")) == 1


def test_a_resumed_run_repeats_no_rows(tiny_run):
    whole = sample_lines(tiny_run(["log", Samples()], output="whole").trainer.run.folder)
    first = tiny_run(["log", Samples()], output="run", epochs=1, save_every=9)
    with (first.trainer.run.folder / "rows" / "samples.jsonl").open("a") as file:
        file.write('{"step": 10, "prompt": "after the checkpoint"}\n')
    assert sample_lines(tiny_run(["log", Samples()], output="run", resume=True).trainer.run.folder) == whole


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [("../samples", {"a": 1}, "'../samples'"), ("samples", {"a": object()}, "JSON"), ("", {}, "''")],
)
def test_rows_that_no_file_can_hold_are_refused(tiny_run, name, row, problem):
    class Wrong(Plugin):
        name = "wrong"

        @hookimpl
        def after_step(self, run: Any) -> None:
            run.log_rows(rows_name, [row])

    rows_name = name
    with pytest.raises(PluginError, match=problem):
        tiny_run(["log", Wrong()])
