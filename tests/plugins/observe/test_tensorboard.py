"""The plugin ``tensorboard``: what TensorBoard itself reads back.

Modules:
    plugins/fastloop_plugins/observe/tensorboard.py
"""

from __future__ import annotations

import importlib.metadata
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fastloop import Plugin, PluginCrash, PluginError, hookimpl
from fastloop.testing import expect_problem

pytest.importorskip("tensorboard")


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_curves_hold_the_losses_rates_and_metrics_of_the_run(tiny_run):
    result = tiny_run(["tensorboard"], log_every=3)
    curves = scalars(result.trainer.run.folder)
    names = ("loss", "grad_norm", "lr", "samples_per_second", "tokens_per_second", "memory_bytes")
    assert set(curves) == {"validation/loss", *(f"train/{name}" for name in names)}
    assert [step for step, _ in curves["train/loss"]] == [3, 6, 9, 12, 15, 18]
    means = [sum(result.losses[step - 3 : step]) / 3 for step in range(3, 19, 3)]
    assert [value for _, value in curves["train/loss"]] == pytest.approx(means)
    assert [step for step, _ in curves["validation/loss"]] == [9, 18]


class FailsInTheSecondEpoch(Plugin):
    name = "fails-in-the-second-epoch"

    @hookimpl
    def before_epoch(self, run) -> None:
        if run.state.epoch == 1:
            raise ValueError("out of luck")


@pytest.mark.parametrize("save_every", ["epoch", 9, 4])
def test_a_resumed_run_goes_on_in_the_same_curves_with_one_point_a_step(tiny_run, save_every):
    """The checkpoint of step 9 is written before the evaluation of the epoch if ``save_every`` counts steps, so the
    resumed run repeats this evaluation."""
    settings = {"log_every": 3, "output": "run", "save_every": save_every}
    with pytest.raises(PluginCrash):
        tiny_run(["tensorboard", FailsInTheSecondEpoch()], epochs=2, **settings)
    # TensorBoard reads files in the order of their names: the second, the process, and a number of the file as text
    time.sleep(1)
    tiny_run(["tensorboard"], epochs=2, resume=True, **settings)
    curves = scalars(Path("run"))
    assert [step for step, _ in curves["train/loss"]] == [3, 6, 9, 12, 15, 18]
    assert [step for step, _ in curves["validation/loss"]] == [9, 18]


class FailsOnce(Plugin):
    """Makes the gradients of a step NaN, when it is computed for the first time."""

    name = "fails-once"

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    @hookimpl(tryfirst=True)
    def before_optimizer_step(self, run) -> None:
        if run.state.step == self.step - 1:
            self.step = 0
            for parameter in run.model.parameters():
                parameter.grad.fill_(float("nan"))


@pytest.mark.parametrize(("save_every", "failing"), [(4, 15), (9, 10), (9, 14)])
def test_a_run_that_rolls_back_has_one_point_a_step(tiny_run, save_every, failing):
    """The checkpoint of step 9 is written before the evaluation of the epoch, so that the run repeats it."""
    plugins = ["tensorboard", {"nan-guard": {"action": "rollback"}}, FailsOnce(failing)]
    result = tiny_run(plugins, epochs=2, log_every=1, output="run", save_every=save_every)
    assert result.summary["nan-guard"]["acted"] == 1
    curves = scalars(Path("run"))
    assert [step for step, _ in curves["train/loss"]] == [*range(1, 18)]  # the samples of a step are left out
    assert [step for step, _ in curves["validation/loss"]] == [9, 17]


def test_the_status_of_the_run_is_its_last_text(tiny_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Fails(Plugin):
        name = "fails"

        @hookimpl
        def after_fit(self) -> None:
            raise ValueError("out of luck")

    for plugins, status in (([], b"completed"), ([Fails()], b"failed: ")):
        folder = Path(f"runs/{len(plugins)}")
        with suppress(PluginCrash):
            tiny_run(["tensorboard", *plugins], output=folder)
        read = EventAccumulator(str(folder / "tensorboard"))
        read.Reload()
        assert read.Tensors("status/text_summary")[-1].tensor_proto.string_val[0].startswith(status)


def test_a_missing_extra_is_an_error_that_names_the_install_command(tiny_run, monkeypatch):
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "tensorboard":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with expect_problem(
        "requirement-missing 'tensorboard' tensorboard>=2.18 'fastloop-train[tensorboard]'", PluginError
    ):
        tiny_run(["tensorboard"])


def test_rows_are_tables(tiny_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Samples(Plugin):
        name = "samples"

        @hookimpl
        def after_fit(self, run) -> None:
            run.log_rows("samples", [{"prompt": "a|b", "answer": "one\ntwo"}, {"prompt": "c", "score": 0.5}])

    result = tiny_run(["tensorboard", Samples()])
    read = EventAccumulator(str(result.trainer.run.folder / "tensorboard"))
    read.Reload()
    (point,) = read.Tensors("samples/text_summary")
    assert point.step == 18
    assert point.tensor_proto.string_val[0].decode().splitlines() == [
        "| prompt | answer | score |",
        "| --- | --- | --- |",
        "| a\\|b | one<br>two | null |",
        "| c | null | 0.5 |",
    ]
