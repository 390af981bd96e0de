"""Skips samples that cannot be read and counts them, instead of ending the run.

    plugins:
      - skip-unreadable: {limit: 100}

A sample is unreadable if the dataset raises an error for it; in the text tasks, also if a row is not valid CSV or JSON,
if its text is not a string, or if it has no label. The log names the first skipped samples of each split. An iterable
dataset ends at its first error.

The summary's ``unreadable_samples`` counts the skipped samples of training and the rows that a text task has left out.
Each counts once, however many epochs read it, and so it does for ``limit``. Samples that an evaluation skips are in the
log alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import Plugin, Problem, hookimpl, option
from fastloop.errors import DataError
from fastloop.problem import counted

if TYPE_CHECKING:
    from fastloop import Run


class SkipUnreadable(Plugin):
    """Skips samples that cannot be read."""

    name = "skip-unreadable"
    numerics = "changes-training"
    on_resume = {"limit": "free"}
    for_inference = True

    limit: int = option("Samples to skip before the run ends with an error, each counted once.", default=100, ge=0)

    @hookimpl
    def configure(self) -> dict[str, Any]:
        from fastloop_plugins.data._skipping_reader import SkippingReader

        return {"skip_unreadable": True, "reader_class": SkippingReader}

    @hookimpl
    def check_run(self, run: Run) -> None:
        dataset = run.datasets["train"]
        if run.train_loader.stream is not None:
            self.log.warning(
                Problem(f"{type(dataset).__name__} is iterable: its samples cannot be skipped.", code="no-effect")
            )

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.unreadable > self.limit:
            raise DataError(
                f"{counted(run.state.unreadable, 'sample')} could not be read; plugins.skip-unreadable.limit is "
                f"{self.limit}. log.txt in the run folder names the first ones.",
                code="sample-unreadable",
            )
