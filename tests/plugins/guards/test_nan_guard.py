"""``nan-guard`` with ``max_loss``. tests/reliability/test_numbers.py tests stop, skip, rollback and spikes.

Modules:
    plugins/fastloop_plugins/guards/nan_guard.py
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from fastloop import FastloopError, PluginError
from fastloop.testing import expect_problem


def scripted(values):
    """A loss with these values, one a call in training, then the last one."""
    left = list(values)

    def loss(predictions, targets):
        value = left.pop(0) if len(left) > 1 and predictions.requires_grad else left[0]
        return predictions.sum() * 0 + torch.tensor(value)

    return loss


HIGH = [1.0, 9.0, 9.0, 1.0, 9.0, float("nan"), 9.0, 1.0]
"""Above 5 at the steps 2 and 3, and from 5 to 7."""
FOUND = "the loss is 9, and above 5 at 3 log points in a row"


def test_it_stops_after_the_third_log_point_in_a_row_above_the_threshold(tiny_run):
    result = tiny_run([{"nan-guard": {"max_loss": 5.0, "action": "skip"}}], loss=scripted(HIGH), log_every=1)
    assert len(result.losses) == 7
    assert (result.summary["status"], result.summary["reason"]) == ("stopped", f"nan-guard: {FOUND}")


def test_it_fails_with_action_error(tiny_run):
    guard = {"nan-guard": {"max_loss": 5.0, "max_loss_action": "error", "action": "skip"}}
    with expect_problem(f"high-loss plugins.nan-guard.max_loss 7 {FOUND}", FastloopError):
        tiny_run([guard], loss=scripted(HIGH), log_every=1)


@pytest.mark.parametrize(
    ("action", "plugin", "expected"),
    [
        pytest.param(
            "skip",
            "deepspeed",
            "unsupported-strategy plugins.nan-guard.action: skip: 'deepspeed'",
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
        ),
        ("rollback", "sample-audit", "excluded-plugin plugins.nan-guard.action: rollback: 'sample-audit'"),
    ],
)
def test_plugins_that_an_action_does_not_work_with_are_refused_before_data_is_loaded(
    tiny_run, hook_calls, action, plugin, expected
):
    with expect_problem(expected, PluginError):
        tiny_run([{"nan-guard": {"action": action}}, plugin])
    assert "build_datasets" not in [call.hook for call in hook_calls]


def test_only_log_points_count_and_a_resumed_run_keeps_the_count(tiny_run):
    guard = {"nan-guard": {"max_loss": 0.0, "max_loss_patience": 2}}
    assert len(tiny_run([guard], log_every=5).losses) == 10
    tiny_run([guard], epochs=1, log_every=5, output="run")
    assert len(tiny_run([guard], epochs=2, log_every=5, output="run", resume=True).losses) == 1
