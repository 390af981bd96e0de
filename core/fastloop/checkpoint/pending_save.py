"""The pending checkpoint, and the outcome of earlier saves, on one process.

``Run._sync_requests`` shares a failure between all processes, counts it in ``errors``, and warns or ends the run.

A failed save does not end the run: the checkpoint before it is complete, and the training since then is in memory only.
``train.on_save_error: stop`` ends it. A plugin state that cannot be saved is an error of the plugin, and ends the run.
"""

from __future__ import annotations

from concurrent import futures

from fastloop.errors import SaveError


class CheckpointSaver:
    """The pending save of this process.

    Attributes:
        last_saved_step: Step of the newest checkpoint that is known to be complete, or None.
        errors: Number of failed saves, on any process.
        pending: The save that is not known to be complete; None: there is none.
        failure: Message of a failed save, which ``Run._sync_requests`` takes; None: there is none.
    """

    def __init__(self) -> None:
        self.last_saved_step: int | None = None
        self.errors = 0
        self.pending: futures.Future[None] | None = None
        self._pending_step = 0
        self.failure: str | None = None

    def start(self, pending: futures.Future[None], step: int) -> None:
        """Set the future of a save at ``step``."""
        self.pending = pending
        self._pending_step = step

    def wait(self) -> None:
        """Wait for the pending save. ``poll`` then records its outcome."""
        if self.pending is not None:
            futures.wait([self.pending])

    def poll(self) -> None:
        """Record the outcome of the pending save, if it is done.

        Raises:
            Exception: The save failed with another error than ``SaveError``.
        """
        if self.pending is None or not self.pending.done():
            return
        error = self.pending.exception()
        self.pending = None
        if error is None:
            self.last_saved_step = self._pending_step
        elif isinstance(error, SaveError):
            self.report_failure(str(error))
        else:
            raise error

    def report_failure(self, message: str) -> None:
        """Report a failed save to ``Run._sync_requests``. Plugins that write weights themselves call it, too."""
        self.failure = message
