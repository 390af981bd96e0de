"""Batch norm over a part of a step's samples changes what is trained: a warning names the cause.

Several processes: ``test_ddp_fsdp``."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from fastloop import Plugin, hookimpl
from fastloop_plugins.memory.auto_micro_batch import AutoMicroBatch

MESSAGE = "batch norm uses only the samples of its own micro-batch, so results depend on "


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "batch norm" in record.getMessage()]


def test_micro_batches_change_batch_norm_and_a_warning_names_the_cause(tiny_run, caplog):
    caplog.set_level(logging.WARNING, "fastloop")
    whole = tiny_run([], model=normed(), max_steps=3)
    assert warnings(caplog) == []
    parts = tiny_run([], model=normed(), max_steps=3, micro_batch_size=2)
    assert warnings(caplog) == [MESSAGE + "train.micro_batch_size"]
    assert parts.losses[1:] != pytest.approx(whole.losses[1:], rel=1e-3)


@pytest.mark.parametrize("kind", ["no batch norm", "frozen"])
def test_a_model_that_micro_batches_do_not_change_has_no_warning(tiny_run, caplog, kind):
    caplog.set_level(logging.WARNING, "fastloop")
    model: Any = normed() if kind == "frozen" else nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    model[1].eval()
    tiny_run([], model=model, max_steps=3, micro_batch_size=2)
    assert warnings(caplog) == []


class Halves(Plugin):
    """Divides each step into two micro-batches."""

    name = "halves"

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"split": lambda dataset, ids, processes: [ids[: len(ids) // 2], ids[len(ids) // 2 :]]}


class FailsOnce(Plugin):
    """Runs out of memory in its third step."""

    name = "fails-once"
    failed = False

    @hookimpl(tryfirst=True)
    def compute_loss(self, run: Any) -> None:
        if run.state.step == 2 and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("out of memory")


def test_the_warning_names_the_plugin_that_splits_steps(tiny_run, caplog):
    caplog.set_level(logging.WARNING, "fastloop")
    tiny_run([Halves()], model=normed(), max_steps=3)
    assert warnings(caplog) == [MESSAGE + "plugin 'halves', which splits steps"]


@pytest.mark.slow
def test_micro_batches_that_are_halved_in_training_have_the_warning_too(tiny_run, caplog):
    caplog.set_level(logging.WARNING, "fastloop")
    tiny_run([AutoMicroBatch(snapshot=False), FailsOnce()], model=normed(), max_steps=3)
    assert warnings(caplog) == [MESSAGE + "train.micro_batch_size"]
