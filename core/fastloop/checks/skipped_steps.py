"""Which optimizer steps fp16's loss scaling skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class SkippedSteps:
    """Tells whether the newest optimizer step was skipped.

    ``GradScaler`` does not call ``step`` of an ordinary optimizer on overflow, which Accelerate's wrapper notices. It always calls
    ``step`` of a fused one, which reads ``found_inf`` and skips the update on the device. A hook at the end of ``step`` keeps that tensor.

    Args:
        optimizer: As the loop steps it.
        scaler: The run's ``GradScaler``; None: there is no loss scaling.
    """

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self.optimizer = optimizer
        self.found_inf: Tensor | bool | None = None
        inner = getattr(optimizer, "optimizer", optimizer)
        if scaler is not None and getattr(inner, "_step_supports_amp_scaling", False):
            inner.register_step_post_hook(self._keep)

    def _keep(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.found_inf = getattr(optimizer, "found_inf", None)

    def newest(self) -> bool:
        """Whether the newest step was skipped. With a fused optimizer the first call after a step waits for the device."""
        if self.found_inf is None:
            return bool(getattr(self.optimizer, "step_was_skipped", False))
        self.found_inf = bool(self.found_inf)
        return self.found_inf
