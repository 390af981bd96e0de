"""Runs callbacks that were written for the HF Trainer, unchanged: subclasses of transformers' ``TrainerCallback``.

    plugins:
      - transformers-callbacks:
          callbacks:
            - transformers.integrations:TensorBoardCallback
            - transformers:EarlyStoppingCallback: {early_stopping_patience: 2}
            - my_callbacks.py:Mine
          arguments: {metric_for_best_model: accuracy}

In Python, pass the objects: ``Trainer(..., plugins=[TransformersCallbacks(Mine(), EarlyStoppingCallback(2))])``, by
``from fastloop_migrate import TransformersCallbacks``.

A callback receives ``TrainingArguments`` made from the recipe, a ``TrainerState``, and a ``TrainerControl`` whose
``should_training_stop``, ``should_save`` and ``should_evaluate`` work. ``should_log`` is ignored with a warning, and
``should_epoch_stop`` is an error. ``arguments`` does not change the run. The events have the order of the HF Trainer,
except for these:

* ``on_log`` with the values of a log point is called on the main process only.
* Gradients are already cleared in ``on_optimizer_step``.
* ``on_epoch_end`` follows the last evaluation after a stop, and precedes one that is no multiple of steps.
* ``on_predict`` is the evaluation of the test split. ``on_push_begin`` does not occur.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Output, Recipe, Run
    from torch import Tensor
    from transformers import TrainerCallback

    from fastloop_migrate._trainer_events import TrainerEvents

logger = logging.getLogger("fastloop")


class TransformersCallbacks(Plugin):
    """Runs callbacks of the HF Trainer at the matching hooks."""

    name = "transformers-callbacks"
    numerics = "changes-training"
    on_resume = {"callbacks": "free", "arguments": "free"}
    publishes = True
    waits_for_scalars = True  # a callback may stop the run in on_log

    callbacks: list[str | dict[str, dict[str, Any]]] = option(
        "package.module:Class or file.py:Class; with arguments: {package.module:Class: {...}}.",
        default_factory=list,
    )
    arguments: dict[str, Any] = option(
        "Further fields of TrainingArguments for callbacks to read.", default_factory=dict
    )

    events: TrainerEvents
    """The callbacks, once the run is built."""

    classes: list[tuple[type[TrainerCallback], Mapping[str, Any]]]  # with their arguments; from check_recipe on

    def __init__(self, *objects: TrainerCallback, **options: Any) -> None:
        super().__init__(**options)
        self.objects = objects
        self.training = False
        self.in_epoch = False
        # micro-batches of the current step, and steps of this process
        self.passes = 0
        self.steps = 0
        self.loss: Tensor | float = 0.0

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop_plugins.toolkit import importing_bitsandbytes

        key = "plugins.transformers-callbacks"
        with importing_bitsandbytes():  # transformers' Trainer imports peft
            from fastloop_migrate._trainer_arguments import check_arguments, find_callbacks

            self.classes = find_callbacks(self.callbacks, recipe, f"{key}.callbacks")
        check_arguments(self.arguments, recipe, f"{key}.arguments")
        if not self.classes and not self.objects:
            logger.warning(
                Problem(
                    f"{key}.callbacks lists no callback, so the plugin does nothing.",
                    code="no-effect",
                    place=recipe.where,
                )
            )

    @hookimpl
    def check_run(self, run: Run) -> None:
        from fastloop_migrate._trainer_arguments import training_arguments
        from fastloop_migrate._trainer_events import TrainerEvents

        callbacks = list(self.objects)
        for cls, arguments in self.classes:
            try:
                callbacks.append(cls(**arguments))
            except Exception as error:
                where = f"{run.recipe.where}: plugins.transformers-callbacks.callbacks: {cls.__name__}"
                raise PluginError(
                    f"{where} cannot be made: {type(error).__name__}: {error}", code="call-failed"
                ) from error
        self.events = TrainerEvents(run, callbacks, training_arguments(run, self.arguments))
        self.events.fire("on_init_end")

    @hookimpl
    def before_fit(self) -> None:
        self.training = True
        self.events.fire("on_train_begin")

    @hookimpl
    def before_epoch(self) -> None:
        self.in_epoch = True
        self.events.fire("on_epoch_begin")

    @hookimpl
    def before_step(self) -> None:
        self.passes = 0
        self.events.fire("on_step_begin")

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Output, Output]:
        evaluates = hasattr(self, "events") and self.events.evaluating is not None
        if self.in_epoch and self.passes and not evaluates:
            self.events.fire("on_substep_end")  # the previous micro-batch, with its backward
        output = yield
        self.passes += 1
        if evaluates:
            self.events.batches += 1
            self.events.fire("on_prediction_step")
        return output

    @hookimpl(trylast=True)
    def before_optimizer_step(self, run: Run) -> None:
        self.passes = 0
        self.events.lr = run.optimizer.param_groups[0]["lr"]
        self.events.fire("on_pre_optimizer_step")

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Tensor, Tensor]:
        loss = yield
        self.events.fire("on_optimizer_step")
        return loss

    @hookimpl(trylast=True)
    def after_step(self, loss: Tensor) -> None:
        self.loss = self.loss + loss
        self.steps = self.steps + 1
        self.events.fire("on_step_end")

    @hookimpl
    def log_scalars(self, run: Run, scalars: Mapping[str, float]) -> None:
        if self.training and next(iter(scalars)).partition("/")[0] not in run.eval_loaders:
            self.events.log_training(scalars)

    @hookimpl
    def after_epoch(self) -> None:
        self.in_epoch = False
        self.events.fire("on_epoch_end")

    @hookimpl
    def before_evaluate(self, split: str) -> None:
        self.events.begin_evaluation(split)

    @hookimpl
    def after_evaluate(self, split: str, metrics: dict[str, float]) -> None:
        self.events.end_evaluation(split, metrics)
        self.passes = 0

    @hookimpl
    def save_state(self) -> dict[str, Any]:
        return self.events.saved()

    @hookimpl(wrapper=True)
    def write_checkpoint(self) -> Generator[None, Any, Any]:
        pending = yield
        self.events.fire("on_save")
        return pending

    @hookimpl
    def load_state(self, state: dict[str, Any]) -> None:
        self.events.restore(state)

    @hookimpl
    def after_fit(self) -> None:
        if self.in_epoch:  # it stopped within an epoch
            self.after_epoch()
        self.training = False
        self.events.end_training(float(self.loss) / max(self.steps, 1))

    @hookimpl
    def teardown(self, run: Run) -> None:
        if self.training and run.interrupted:  # a signal stopped it: no after_fit, and callbacks have files to close
            self.after_fit()
