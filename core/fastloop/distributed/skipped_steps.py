"""Skip optimizer steps, and detect those that fp16's loss scaling skipped."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.amp import GradScaler

if TYPE_CHECKING:
    from torch import Tensor


class SkippedSteps:
    """Steps the optimizer in each update of a step, and knows whether all updates were skipped.

    A plugin skips the next update by ``request``. On overflow, ``GradScaler`` does not call ``step`` of an ordinary
    optimizer, and Accelerate's wrapper detects that. It always calls ``step`` of a fused optimizer, which reads
    ``found_inf`` and skips the update on the device. For those, a hook after ``step`` stores that tensor.

    Args:
        optimizer: The prepared optimizer.
        scaler: The run's ``GradScaler``; None: no loss scaling.
    """

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.is_requested = False
        self.skipped: list[Tensor | bool] = []
        """Whether each update of the step was skipped. A tensor is on the device, and not read yet. The loop empties
        the list where a step begins."""
        self.found_inf: Tensor | None = None
        # without the run's scaler, only an optimizer skips that a strategy made, which scales losses itself
        scales_itself = hasattr(optimizer, "step_was_skipped") and not isinstance(optimizer, AcceleratedOptimizer)
        self.optimizer_may_skip = scaler is not None or scales_itself
        self.inner = getattr(optimizer, "optimizer", optimizer)
        if scaler is not None and getattr(self.inner, "_step_supports_amp_scaling", False):
            self.inner.register_step_post_hook(self._store_found_inf)

    def _store_found_inf(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.found_inf = getattr(optimizer, "found_inf", None)

    def request(self) -> None:
        """Skip the next update."""
        self.is_requested = True

    def step_optimizer(self) -> None:
        """Step the optimizer, unless a plugin requested to skip this update."""
        if self.is_requested:
            self.is_requested = False
            self._forget_gradients()
            self.skipped.append(True)
            return
        self.optimizer.step()
        self.skipped.append(self._take_answer() if self.optimizer_may_skip else False)

    def _take_answer(self) -> Tensor | bool:
        """Whether the optimizer skipped the update that it was just given."""
        found_inf = self.found_inf
        self.found_inf = None
        if found_inf is not None:
            return found_inf
        return bool(getattr(self.optimizer, "step_was_skipped", False))

    def _forget_gradients(self) -> None:
        """Let the loss scaler expect new gradients. It lowers the scale if these have overflowed, as in any step."""
        if isinstance(self.scaler, GradScaler):
            with suppress(RuntimeError):  # clipping has unscaled them already
                self.scaler.unscale_(self.inner)
            self.scaler.update()

    def is_step_skipped(self) -> bool:
        """Whether every update of the step was skipped. With a fused optimizer, the first call waits for the device."""
        self.skipped = [bool(skipped) for skipped in self.skipped]
        return len(self.skipped) > 0 and all(self.skipped)
