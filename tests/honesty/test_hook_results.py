"""Every hook x {None, another type, NaN}: a run works as specified, or its error names plugin and hook.

Modules:
    core/fastloop/checks/hook_results.py
    core/fastloop/checks/hook_types.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastloop import Output, Plugin, PluginError, hookimpl, hookspecs
from fastloop.checks.hook_results import NEEDED
from fastloop.cli import startup
from fastloop.lifecycle import open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Inference, make_recipe
from fastloop.testing import VECTORS, expect_problem
from fastloop_tools.inference.chunks import Chunks
from fastloop_tools.inference.predictions import predict_dataset
from fastloop_tools.trainer.task import TrainerTask

HOOKS = [name for name, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")]
NOT_CHECKED = ("teardown",)
"""Hooks whose results are ignored: an error at the end of a run would hide the run's own."""
AT_LAUNCH = ("environment",)
AFTER_AN_ERROR = ("recover",)
OF_LOGGED_ROWS = ("log_rows",)
IN_A_RESUMED_RUN = ("before_resume", "load_state")
TO_PREDICT = ("build_prediction_data", "predict")
NAN = float("nan")


def returning(hook: str, value: Any) -> Plugin:
    """A plugin whose implementation of a hook returns a value."""

    def implementation(self: Any) -> Any:
        return value

    return type("Wrong", (Plugin,), {"name": "wrong", hook: hookimpl(implementation)})()


class Fails(Plugin):
    """Raises in the second step."""

    name = "fails"

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step == 2:
            raise ValueError("out of luck")


class LogsRows(Plugin):
    """Logs a row, so that ``log_rows`` is called."""

    name = "logs-rows"

    @hookimpl
    def after_step(self, run: Any) -> None:
        run.log_rows("samples", [{"a": 1}])


class Saves(Plugin):
    """Has a state, so that ``load_state`` is called."""

    name = "saves"

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return {"a": 1}


def replacing(hook: str, value: Any) -> Plugin:
    """A plugin that wraps a hook of the task, and replaces its result."""

    def implementation(self: Any) -> Any:
        yield
        return value

    return type("Wrong", (Plugin,), {"name": "wrong", hook: hookimpl(wrapper=True)(implementation)})()


def predict(plugin: Plugin) -> dict[str, list[Any]]:
    """Predict a split of the vectors that the test helpers train on, with an untrained model."""
    recipe = make_recipe({**VECTORS, "train": {"device": "cpu"}})
    recipe.inference = Inference(None, "validation", chunk=8)
    with open_run(resolve(recipe, objects=[plugin]), [Chunks(None)]) as run:
        return predict_dataset(run, run.eval_loaders["validation"])


def train(tiny_run: Callable[..., Any], hook: str, plugin: Plugin) -> Any:
    """Train in a way that calls the hook."""
    if hook in AT_LAUNCH:
        return startup.environment(resolve(make_recipe({}), objects=[plugin]))
    if hook in AFTER_AN_ERROR:
        return tiny_run([plugin, Fails()], epochs=1)
    if hook in OF_LOGGED_ROWS:
        return tiny_run([plugin, LogsRows()], epochs=1)
    if hook in IN_A_RESUMED_RUN:
        return tiny_run([plugin], epochs=2, output="run", resume=True)
    return tiny_run([plugin], epochs=1)


@pytest.mark.parametrize("value", [object(), NAN, "text", 1], ids=["object", "nan", "text", "number"])
@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook not in (*TO_PREDICT, *NOT_CHECKED)])
def test_a_result_of_another_type_is_refused_by_plugin_and_hook(tiny_run, hook, value):
    if hook in IN_A_RESUMED_RUN:
        first = returning("save_state", {"a": 1})
        tiny_run([first], epochs=1, output="run")
    with pytest.raises(PluginError) as refused:
        train(tiny_run, hook, returning(hook, value))
    assert "'wrong'" in str(refused.value)
    assert hook in str(refused.value)


@pytest.mark.parametrize("value", [object(), NAN, "text", 1], ids=["object", "nan", "text", "number"])
@pytest.mark.parametrize("hook", TO_PREDICT)
def test_a_result_of_another_type_is_refused_to_predict(hook, value):
    with pytest.raises(PluginError) as refused:
        predict(replacing(hook, value))
    assert "'wrong'" in str(refused.value)
    assert hook in str(refused.value)


@pytest.mark.parametrize(
    "values", [{"a": [1]}, {"a": torch.zeros(3)}, {"a": None}, {"a": NAN}, {"a": "x" * 8}, {1: [0] * 8}, {}]
)
def test_predictions_that_are_not_one_for_each_sample_are_refused(values):
    with expect_problem("wrong-result predict", PluginError):
        predict(replacing("predict", values))


@pytest.mark.parametrize("values", [[NAN] * 8, torch.full((8,), NAN), [None] * 8, ["text"] * 8], ids=str)
def test_predictions_may_be_any_values(values):
    found = predict(replacing("predict", {"a": values}))["a"]
    assert repr(found) == repr(list(values))


NESTED: dict[str, tuple[str, Any]] = {
    "environment, a number": ("environment", {"A": 1}),
    "environment, a key": ("environment", {1: "a"}),
    "environment, None": ("environment", {"A": None}),
    "configure, an unknown setting": ("configure", {"no_such_setting": 1}),
    "configure, a precision": ("configure", {"mixed_precision": NAN}),
    "configure, an object": ("configure", {"mixed_precision": object()}),
    "configure, optimizer": ("configure", {"optimizer": 3}),
    "configure, workers": ("configure", {"num_workers": NAN}),
    "configure, workers as text": ("configure", {"num_workers": "2"}),
    "configure, workers as a boolean": ("configure", {"num_workers": True}),
    "configure, a timeout": ("configure", {"timeout": NAN}),
    "configure, a flag": ("configure", {"pin_memory": "no"}),
    "configure, None": ("configure", {"processes_per_batch": None}),
    "build_datasets, None": ("build_datasets", {"train": None}),
    "build_datasets, a number": ("build_datasets", {"train": NAN}),
    "build_optimizer, numbers": ("build_optimizer", {"a": NAN}),
    "build_scheduler, numbers": ("build_scheduler", {"a": NAN}),
    "evaluate, text": ("evaluate", {"loss": "high"}),
    "evaluate, None": ("evaluate", {"loss": None}),
    "evaluate, a key": ("evaluate", {1: 1.0}),
    "evaluate, an object": ("evaluate", {"loss": object()}),
    "save_state, an object": ("save_state", {"a": object()}),
    "write_checkpoint, another future": ("write_checkpoint", torch.futures.Future()),
    "export_model": ("export_model", NAN),
    "train_step": ("train_step", torch.tensor([NAN])),
    "compute_loss": ("compute_loss", Output(torch.tensor([NAN]))),
}


@pytest.mark.parametrize("case", NESTED)
def test_a_wrong_value_in_a_result_is_refused_by_plugin_and_hook(tiny_run, case):
    hook, value = NESTED[case]
    with pytest.raises(PluginError) as refused:
        train(tiny_run, hook, returning(hook, value))
    assert "wrong" in str(refused.value)
    assert hook in str(refused.value)


@pytest.mark.parametrize(
    ("hook", "value"),
    [*((hook, None) for hook in sorted(NEEDED - {"build_datasets"})), ("build_optimizer", {"a": NAN})],
    ids=str,
)
def test_a_wrapper_must_return_what_the_run_needs(tiny_run, hook, value):
    with expect_problem(f"wrong-result 'wrong' {hook}", PluginError):
        tiny_run([replacing(hook, value)], epochs=1, save_every=3)


def test_a_run_without_datasets_is_refused(tiny_run):
    with expect_problem("no-dataset", PluginError):
        tiny_run([replacing("build_datasets", None)], epochs=1)


@pytest.mark.parametrize("loss", [NAN, float("inf"), 1])
def test_an_evaluation_may_return_values_that_are_not_finite(tiny_run, loss):
    class Wraps(Plugin):
        name = "wraps"

        @hookimpl(wrapper=True)
        def evaluate(self) -> Any:
            yield
            return {"loss": loss}

    result = tiny_run([Wraps()], epochs=1)
    assert result.summary["status"] == "completed"
    assert repr(result.summary["validation"]) == repr({"loss": loss})


def test_a_plugin_that_returns_none_from_every_hook_changes_nothing(tiny_run):
    hooks: dict[str, Any] = {hook: hookimpl(lambda self: None) for hook in HOOKS}
    first = [hook for hook in HOOKS if getattr(hookspecs, hook).fastloop_spec["firstresult"]]
    shared = tuple(hook for hook in first if hasattr(TrainerTask, hook))
    nothing = type("Nothing", (Plugin,), {"name": "nothing", "fallback_hooks": shared, **hooks})()
    result = tiny_run([nothing], epochs=2, save_every=3)
    plain = tiny_run(epochs=2, save_every=3)
    assert result.summary["status"] == "completed"
    assert result.losses == plain.losses
    assert result.recorder.metrics == plain.recorder.metrics
