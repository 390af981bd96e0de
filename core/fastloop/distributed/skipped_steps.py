"""Detect optimizer steps that fp16's loss scaling skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class SkippedSteps:
    """Detects whether the newest optimizer step was skipped.

    On overflow, ``GradScaler`` does not call ``step`` of an ordinary optimizer, and Accelerate's wrapper detects that.
    It always calls ``step`` of a fused optimizer, which reads ``found_inf`` and skips the update on the device. For
    those, a hook after ``step`` stores that tensor.

    Args:
        optimizer: The prepared optimizer.
        scaler: The run's ``GradScaler``; None: no loss scaling.
    """

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self.optimizer = optimizer
        self.found_inf: Tensor | bool | None = None
        inner = getattr(optimizer, "optimizer", optimizer)
        if scaler is not None and getattr(inner, "_step_supports_amp_scaling", False):
            inner.register_step_post_hook(self._store_found_inf)

    def _store_found_inf(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.found_inf = getattr(optimizer, "found_inf", None)

    def newest(self) -> bool:
        """Whether the newest step was skipped. With a fused optimizer, the first call after a step waits for the
        device."""
        if self.found_inf is None:
            return bool(getattr(self.optimizer, "step_was_skipped", False))
        self.found_inf = bool(self.found_inf)
        return self.found_inf
