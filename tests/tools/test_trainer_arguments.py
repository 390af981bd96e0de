"""Arguments that ``Trainer`` does not have are refused with what serves instead, before the data is read."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from fastloop import Trainer, UsageError
from fastloop.testing import expect_problem
from fastloop_tools.trainer.arguments import INSTEAD

DATA = [(torch.zeros(2), 0)]


def make(**arguments: Any) -> Trainer:
    return Trainer(nn.Linear(2, 2), DATA, loss=nn.functional.cross_entropy, **arguments)


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_an_argument_of_another_trainer_names_what_serves(name):
    with pytest.raises(UsageError, match=re.escape(INSTEAD[name])) as raised:
        make(**{name: None})
    assert repr(name) in str(raised.value)


def test_no_argument_of_another_trainer_is_one_of_ours():
    assert not INSTEAD.keys() & inspect.signature(Trainer).parameters.keys()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("metric", "metrics"), ("epoch", "epochs"), ("plugin", "plugins"), ("eval_loaders", "eval_loader")],
)
def test_a_typing_error_is_compared_with_all_arguments(name, meant):
    with pytest.raises(UsageError, match=f"Did you mean '{meant}'"):
        make(**{name: None})


def test_a_function_as_metric_is_refused_with_its_name():
    with expect_problem("wrong-type metrics['f1']", UsageError):
        make(metrics={"f1": lambda predictions, targets: 0.0}, batch_size=1)
