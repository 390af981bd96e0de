"""Numbers of the device, copied to the host without waiting for the device."""

from __future__ import annotations

from time import monotonic, sleep

from torch import Event, Tensor

POLL_SECONDS = 0.01
"""Seconds between two questions whether a copy has arrived."""


class HostCopy:
    """A copy of a tensor that begins now, and is read later.

    The copy waits its turn among the operations that the device was given before. The host continues at once, and waits
    in ``read`` if the device has not come that far. A tensor that is on the host is not copied.

    Args:
        tensor: Any tensor. It may change afterwards: the copy has the numbers that it has at this place in the stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Event | None = None
        self._tensor = tensor
        if tensor.device.type != "cpu":
            self._tensor = tensor.to("cpu", non_blocking=True)  # torch takes page-locked memory for it
            self._event = Event(tensor.device)
            self._event.record()

    def arrives_within(self, seconds: float) -> bool:
        """Wait for the copy, but not longer than this. Returns whether it has arrived."""
        if self._event is None:
            return True
        end = monotonic() + seconds
        while not self._event.query():
            if monotonic() > end:
                return False
            sleep(POLL_SECONDS)
        return True

    def read(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
