"""A model whose state no checkpoint can hold is refused before training.

Modules:
    core/fastloop/checks/model_state.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastloop import UsageError
from fastloop.testing import expect_problem


class Scaled(nn.Linear):
    """A layer with a value that torch saves beside its weights.

    Args:
        kept: The value.
    """

    def __init__(self, kept: Any) -> None:
        super().__init__(8, 3)
        self.kept = kept

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 2

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize("kept", [{"scale": 2}, torch.tensor(2)])
def test_extra_state_is_a_tensor_or_refused(tiny_run, kept):
    model = nn.Sequential(Scaled(kept))
    if isinstance(kept, Tensor):
        assert tiny_run(model=model, epochs=1).summary["status"] == "completed"
        return
    with expect_problem("invalid-state 0._extra_state Sequential dict get_extra_state", UsageError):
        tiny_run(model=model, epochs=1)
