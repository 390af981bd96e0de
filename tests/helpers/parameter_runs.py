"""Runs on several processes in which a plugin replaces weights: ``processes(2, all_of, runs)``.

A run: ``name``, its folder; ``plugins``; ``replaces``: the hook in which a weight is replaced; ``freezes``: the hook in
which the first layer is frozen, which trains from the second step on; ``skips``: the second process does not use the
first layer. Its result: the error, the warnings about trained parameters, the step after which the check of the first
updates ended, and the sum of the first layer's weights before training and, on each process, after it.
"""

from __future__ import annotations

import logging
from typing import Any

from strategy_runs import Deep, data
from torch import nn
from torch.distributed.tensor import DTensor

from fastloop import FastloopError, Plugin, Trainer, hookimpl
from fastloop.distributed.ranks import rank


class Warnings(logging.Handler):
    """Keeps them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class Replaces(Plugin):
    """Puts a new Parameter in place of the weight of the model's last layer, in one hook."""

    name = "replaces"

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def replace(self, hook: str, model: Any) -> None:
        if self.hook == hook:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    @hookimpl
    def before_prepare(self, model: Any) -> None:
        self.replace("before_prepare", model)

    @hookimpl
    def after_prepare(self, run: Any) -> None:
        self.replace("after_prepare", run.unwrap_model())

    @hookimpl
    def before_fit(self, run: Any) -> None:
        self.replace("before_fit", run.unwrap_model())


class Unfreezes(Plugin):
    """Freezes the model's first layer in one hook, and trains it from the second step on."""

    name = "unfreezes"

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    @hookimpl
    def before_prepare(self, model: Any) -> None:
        first_layer(model).requires_grad_(self.hook != "before_prepare")

    @hookimpl
    def before_fit(self, run: Any) -> None:
        first_layer(run.unwrap_model()).requires_grad_(False)

    @hookimpl
    def before_step(self, run: Any) -> None:
        first_layer(run.unwrap_model()).requires_grad_(run.state.step > 0)


def first_layer(model: nn.Module) -> nn.Module:
    """The first module of a model that has weights."""
    return next(module for module in model.modules() if any(True for _ in module.parameters(recurse=False)))


def examines_updates(run: Any) -> bool:
    """Whether `optimizer-check` still examines optimizer steps."""
    (check,) = (plugin for plugin in run.plugins if plugin.name == "optimizer-check")
    return check.updates is not None


class LastExaminedStep(Plugin):
    """The step after which every trained parameter was known to change."""

    name = "last-examined-step"
    step: int | None = None

    @hookimpl
    def after_step(self, run: Any) -> None:
        if self.step is None and not examines_updates(run):
            self.step = run.state.step


def run_one(spec: dict[str, Any]) -> dict[str, Any]:
    """One run, or its error."""
    warnings = Warnings()
    ended = LastExaminedStep()
    plugins = [
        {"log": False},
        {"progress": False},
        *spec["plugins"],
        ended,
        *([Replaces(spec["replaces"])] if "replaces" in spec else []),
        *([Unfreezes(spec["freezes"])] if "freezes" in spec else []),
    ]
    train = {"lr": 1e-2, "batch_size": 8, "device": "cpu", "max_steps": 3, "save_every": None, "evaluate_every": None}
    logging.getLogger("fastloop").addHandler(warnings)
    error = None
    model = Deep()
    if spec.get("skips") and rank() == 1:
        first_layer(model).register_forward_hook(lambda module, inputs, output: inputs[0])
    before = total(model)
    after: list[float] = []
    trainer = Trainer(
        model, data(64, 0), plugins=plugins, loss=nn.functional.cross_entropy, output=spec["name"], **train
    )
    try:
        trainer.fit()
        after = trainer.run.processes.all_gather_object(total(model))
    except FastloopError as failed:
        error = f"{type(failed).__name__}: {failed}"
    finally:
        logging.getLogger("fastloop").removeHandler(warnings)
    return {
        "error": error,
        "warnings": [text for text in warnings.messages if "trained parameters" in text],
        "step": ended.step,
        "before": before,
        "after": after,
    }


def total(model: nn.Module) -> float:
    """The sum of the weights of the first layer, unless they are divided over processes."""
    weights = next(first_layer(model).parameters()).detach()
    return 0.0 if isinstance(weights, DTensor) else float(weights.double().sum())


def all_of(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results by name."""
    return {spec["name"]: run_one(spec) for spec in runs}
