"""The pending checkpoint, and the outcome of earlier saves."""

from __future__ import annotations

from concurrent import futures

from fastloop.errors import SaveError


class CheckpointSaver:
    """The pending save of this process.

    Attributes:
        last_saved_step: Step of the newest checkpoint that is known to be complete, or None.
        errors: Number of failed saves, on any process.
    """

    def __init__(self) -> None:
        self.last_saved_step: int | None = None
        self.errors = 0
        self._pending: futures.Future[None] | None = None
        self._pending_step = 0
        self._failure: str | None = None

    def start(self, pending: futures.Future[None], step: int) -> None:
        """Set the future of a save at ``step``."""
        self._pending, self._pending_step = pending, step

    def resumed(self, step: int) -> None:
        """Record that the run resumed from a checkpoint at ``step``."""
        self.last_saved_step = step

    def wait(self) -> None:
        """Wait for the pending save. ``take_failure`` returns a failure."""
        self.finish()
        self.poll()

    def finish(self) -> None:
        """Wait for the pending save without recording its outcome."""
        if self._pending is not None:
            futures.wait([self._pending])

    def poll(self) -> None:
        """Record the outcome of the pending save, if it is done.

        Raises:
            Exception: The save failed with another error than ``SaveError``.
        """
        if self._pending is None or not self._pending.done():
            return
        error, self._pending = self._pending.exception(), None
        if error is None:
            self.last_saved_step = self._pending_step
        elif isinstance(error, SaveError):
            self.report_failure(str(error))
        else:
            raise error

    @property
    def is_pending(self) -> bool:
        """Whether a save is pending."""
        return self._pending is not None

    def report_failure(self, message: str) -> None:
        """Report a failed save to ``Run.sync_requests``. Plugins that write weights themselves call it, too."""
        self._failure = message

    def take_failure(self) -> str | None:
        """Poll the pending save. Return and clear the message of a failed save, or None."""
        if self._pending is not None:
            self.poll()
        failure, self._failure = self._failure, None
        return failure

    def count_error(self) -> None:
        """Count a failed save of any process."""
        self.errors += 1
