"""A run as callbacks of transformers read it: the arguments, the state and the control, and the calls of events."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from fastloop import PluginError, Problem
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, ExportableState

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")

NAMES = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "learning_rate"}
"""The core's name of a value -> the HF Trainer's. Other values keep their names."""
BEFORE_STEPS = ("on_init_end", "on_train_begin", "on_epoch_begin")
"""Events before a step, which resets the control's requests to log, evaluate and save."""


class Flow(DefaultFlowCallback):
    """The first callback: sets the control as the run's schedule decides, in place of ``TrainingArguments``."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def due(self, event: str) -> dict[str, bool]:
        """The control's requests that the schedule sets after this event, without those of callbacks."""
        schedule = self.run.schedule
        epoch_ended = event == "on_epoch_end"
        return {
            "should_log": not epoch_ended and self.run.state.step % self.run.recipe.train.log_every == 0,
            "should_evaluate": schedule.evaluation_due(epoch_ended),
            "should_save": schedule.save_due(epoch_ended),
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        vars(control).update(self.due("on_step_end"))
        control.should_training_stop = control.should_training_stop or state.global_step == self.run.total_steps

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        vars(control).update(self.due("on_epoch_end"))


class Handler(CallbackHandler):
    """Calls the callbacks one by one, and keeps the name of the one that stops the run."""

    stopped_by: str | None = None

    callbacks: list[Any]  # of the base class

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        every = self.callbacks
        try:
            for callback in every:
                self.callbacks = [callback]
                stops = control.should_training_stop
                control = super().call_event(event, args, state, control, **kwargs)  # type: ignore[no-untyped-call]
                if control.should_training_stop and not stops and not isinstance(callback, Flow):
                    self.stopped_by = f"{type(callback).__name__} in {event}"
        except Exception as error:
            where = f"plugin 'transformers-callbacks': {type(callback).__name__} failed in {event}"
            raise PluginError(f"{where}: {type(error).__name__}: {error}", code="plugin-crashed") from error
        finally:
            self.callbacks = every
        return control


class TrainerEvents:
    """The callbacks of a run.

    Attributes:
        state: The ``TrainerState``; counters are set before each event.
        evaluating: The split whose evaluation runs, or None.
        batches: Batches of the evaluation so far.
        lr: The learning rate of the newest step.
    """

    def __init__(self, run: Run, callbacks: list[TrainerCallback], args: TrainingArguments) -> None:
        self.run = run
        self.args = args
        self.control = TrainerControl()
        self.ignored: set[str] = set()
        self.evaluating: str | None = None
        self.batches = 0
        self.started = 0.0
        self.lr: Any = 0.0
        task: Any = run.plugins.task
        tokenizer = getattr(getattr(task, "text_model", None), "tokenizer", None)
        self.flow = Flow(run)
        self.handler = Handler(  # type: ignore[no-untyped-call]
            [self.flow, *callbacks],
            run.unwrap_model(),
            getattr(task, "processing_class", tokenizer),
            run.optimizer,
            run.scheduler,
        )
        self.handler.train_dataloader = run.train_loader.loader
        if "validation" in run.eval_loaders:
            self.handler.eval_dataloader = run.eval_loaders["validation"].loader
        self.state = TrainerState(
            max_steps=run.total_steps or 0,
            num_train_epochs=run.schedule.epochs or sys.maxsize,  # as Trainer has it for a stream
            train_batch_size=run.train_loader.micro_batch_size,
            is_local_process_zero=run.accelerator.is_local_main_process,
            is_world_process_zero=run.is_main,
        )
        self.state.compute_steps(args, self.state.max_steps)  # type: ignore[no-untyped-call]

    def fire(self, event: str, **values: Any) -> None:
        """Call an event of all callbacks, then pass what they set in the control on to the run."""
        self.update_state()
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **values)
        self.apply_control(event)

    def log(self, values: dict[str, float]) -> None:
        """Call ``on_log``, and keep the values in the state's history."""
        self.update_state()
        values["epoch"] = self.state.epoch
        self.state.log_history.append({**values, "step": self.state.global_step})
        self.fire("on_log", logs=values)

    def log_training(self, scalars: Mapping[str, float]) -> None:
        """Call ``on_log`` with the values of a log point."""
        named = {NAMES.get(name, name.removeprefix("train/")): value for name, value in scalars.items()}
        if "learning_rate" in named:
            named["learning_rate"] = float(self.lr)
        self.log(named)

    def begin_evaluation(self, split: str) -> None:
        """An evaluation begins; it calls ``on_prediction_step`` after each batch."""
        self.evaluating = split
        self.batches = 0
        self.started = perf_counter()
        self.handler.eval_dataloader = self.run.eval_loaders[split].loader

    def end_evaluation(self, split: str, metrics: Mapping[str, float]) -> None:
        """Call ``on_log`` and ``on_evaluate``, then update the best metric, as in the HF Trainer. For the test split,
        call ``on_predict``."""
        prefix = "eval" if split == "validation" else split
        seconds = perf_counter() - self.started
        named = {f"{prefix}_{name}": value for name, value in metrics.items()}
        named |= {f"{prefix}_runtime": seconds, f"{prefix}_steps_per_second": self.batches / seconds}
        if split == "validation":
            self.log(named)
            self.fire("on_evaluate", metrics=named)
            self.update_best(named)
        else:
            self.fire("on_predict", metrics=named)
        self.evaluating = None

    def update_best(self, metrics: Mapping[str, float]) -> None:
        """Keep the best value of ``metric_for_best_model``."""
        state = self.state
        name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        better = np.greater if self.args.greater_is_better else np.less
        if name in metrics and (state.best_metric is None or better(metrics[name], state.best_metric)):
            state.best_metric = metrics[name]
            state.best_global_step = state.global_step

    def end_training(self, mean_loss: float) -> None:
        """Call ``on_log`` with the values of the whole run, then ``on_train_end``."""
        seconds = self.run.clock.read("train")
        speed = self.run.state.samples / max(seconds, 1e-9)
        self.log({"train_runtime": seconds, "train_samples_per_second": speed, "train_loss": mean_loss})
        self.fire("on_train_end")

    def update_state(self) -> None:
        """Set the state's counters to those of the run. Within an epoch, ``epoch`` counts micro-batches, as in the HF
        Trainer."""
        run = self.run
        state = self.state
        loader = self.run.train_loader
        state.global_step = run.state.step
        state.num_input_tokens_seen = run.state.tokens
        size = run.schedule.samples_per_epoch
        samples = loader.micro_batch_size * loader.world_size
        state.epoch = float(run.state.epoch)
        if size:
            state.epoch += -(-run.state.epoch_samples // samples) / -(-size // samples)
        if run.state.best is not None:
            state.best_model_checkpoint = str(run.folder / run.state.best["path"])

    def apply_control(self, event: str) -> None:
        """Pass requests on to the run. Log a request once if the run has no counterpart.

        Raises:
            PluginError: A callback ends an epoch, or requests an evaluation without a validation split.
        """
        run = self.run
        control = self.control
        where = f"{self.run.recipe.where}: plugins.transformers-callbacks"
        if control.should_epoch_stop:
            raise PluginError(
                f"a callback set control.should_epoch_stop in {event}. An epoch cannot end early in fastloop.",
                code="unsupported-callback",
                place=where,
                remedy="Set should_training_stop instead, or train.max_steps in the recipe.",
            )
        if self.handler.stopped_by is not None:
            run.state.request_stop(f"transformers-callbacks: {self.handler.stopped_by}")
        if event in BEFORE_STEPS or event == "on_save":
            return
        if event in ("on_step_end", "on_epoch_end"):
            for flag, due in self.flow.due(event).items():
                if due and not getattr(control, flag):
                    self.ignore(f"{flag}=False", "the recipe's schedule applies")
                if flag == "should_log" and control.should_log and not due:
                    self.ignore("should_log", "the run logs every train.log_every steps")
        if control.should_save:
            run.state.request_save()
        if control.should_evaluate and self.evaluating is None:
            if "validation" not in run.eval_loaders:
                raise PluginError(
                    f"a callback set control.should_evaluate in {event}, and the run has no validation split.",
                    code="unknown-split",
                    place=where,
                    remedy="Add one (data.validation_fraction), or remove the callback.",
                )
            run.state.request_evaluate()

    def ignore(self, request: str, instead: str) -> None:
        """Log once that a request has no effect."""
        if request not in self.ignored:
            logger.warning(
                Problem(
                    f"a callback set control.{request}, which is ignored: {instead}.",
                    code="request-ignored",
                    place="transformers-callbacks",
                )
            )
            self.ignored.add(request)

    def saved(self) -> dict[str, Any]:
        """The state to save: of callbacks that are an ``ExportableState``, by class, and of the ``TrainerState``."""
        states: dict[str, list[Any]] = {}
        for callback in self.handler.callbacks:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        names = ("log_history", "best_metric", "best_global_step")
        return {"callbacks": states, **{name: getattr(self.state, name) for name in names}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Replace callbacks with state by those of the checkpoint, as the HF Trainer does."""
        states = {name: list(values) for name, values in saved["callbacks"].items()}
        for index, callback in enumerate(self.handler.callbacks):
            cls: Any = type(callback)
            if isinstance(callback, ExportableState) and states.get(cls.__name__):
                self.handler.callbacks[index] = cls.from_state(states[cls.__name__].pop(0))
        for name in sorted(name for name, values in states.items() if values):
            logger.warning(
                Problem(
                    f"the checkpoint has a state of {name}, which is not listed.",
                    code="callback-not-listed",
                    place="transformers-callbacks",
                )
            )
        vars(self.state).update({name: value for name, value in saved.items() if name != "callbacks"})
        self.state.log_history = list(self.state.log_history)
