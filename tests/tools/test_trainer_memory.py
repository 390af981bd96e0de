"""A ``Trainer`` that nobody holds frees its model at once, without the help of the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fastloop import Plugin, Run, Trainer, hookimpl
from fastloop.testing import tiny_data, tiny_model


class Holder(Plugin):
    """Keeps the run, as many plugins do."""

    name = "holder"

    @hookimpl
    def before_fit(self, run: Run) -> None:
        self.run = run

    @hookimpl(wrapper=True)
    def train_step(self, run: Run) -> Iterator[None]:
        return (yield)


def fit(trainer: Trainer) -> None:
    trainer.fit()


def fit_and_use(trainer: Trainer) -> None:
    trainer.validate()
    trainer.fit()
    trainer.validate()
    trainer.predict(tiny_data(8))
    trainer.save_pretrained("saved")


def validate(trainer: Trainer) -> None:
    trainer.validate()


CASES: dict[str, tuple[Callable[[Trainer], None], list[Any]]] = {
    "fit": (fit, []),
    "fit, validate, predict and save": (fit_and_use, []),
    "validate": (validate, []),
    "a plugin that keeps the run": (fit, [Holder]),
    "amp": (fit_and_use, ["amp"]),
    "plugins": (fit, ["ema", "nan-guard", "checkpoint-best", "sample-audit", "device-prefetch", "async-save"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_models_of_several_trainers_are_freed(case):
    use, plugins = CASES[case]
    models: list[weakref.ref[nn.Module]] = []
    optimizers: list[weakref.ref[Any]] = []
    gc.collect()
    gc.disable()
    try:
        for number in range(2):
            trainer = Trainer(
                tiny_model(),
                tiny_data(32),
                tiny_data(16, seed=1),
                plugins=[{"log": False}, {"progress": False}, *(p() if isinstance(p, type) else p for p in plugins)],
                loss=cross_entropy,
                optimizer=lambda model: torch.optim.AdamW(model.parameters()),
                batch_size=8,
                epochs=1,
                device="cpu",
                output=f"run{number}",
            )
            use(trainer)
            models.append(weakref.ref(trainer.task.model))
            if hasattr(trainer, "run"):
                optimizers.append(weakref.ref(trainer.run.optimizer))
            del trainer
            assert [model() is None for model in models] == [True] * len(models)
            assert [optimizer() is None for optimizer in optimizers] == [True] * len(optimizers)
    finally:
        gc.enable()


def test_a_run_outlives_its_trainer_without_plugins():
    trainer = Trainer(
        tiny_model(), tiny_data(32), plugins=[{"log": False}, {"progress": False}], loss=cross_entropy, batch_size=8,
        epochs=1, device="cpu", output="run",
    )  # fmt: skip
    trainer.fit()
    run, expected = trainer.run, {name: value.clone() for name, value in trainer.task.model.state_dict().items()}
    assert run.plugins.names()
    del trainer
    assert (run.state.step, run.plugins.names()) == (4, [])
    found = run.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_model_is_left_as_it_was_given():
    """``amp`` wraps its forward during a run only."""
    model = tiny_model()
    before = set(vars(model))
    trainer = Trainer(
        model, tiny_data(32), tiny_data(8), plugins=["amp", {"log": False}, {"progress": False}], loss=cross_entropy,
        batch_size=8, epochs=1, device="cpu", output="run",
    )  # fmt: skip
    trainer.fit()
    assert set(vars(model)) == before
    trainer.validate()
    assert set(vars(model)) == before
