"""Leaves out samples that cannot be read, and counts them, instead of ending the run.

    plugins:
      - skip-unreadable: {limit: 100}

A sample is unreadable when the dataset raises for it; in the text tasks, also when its row is no CSV or JSON, when its text is no text, or
when it has no label. The step it belongs to is smaller by it. The first ones are named in the log, and the summary's
``unreadable_samples`` counts those that training met. Samples of an iterable dataset cannot be left out: after an error it is at its end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastloop import DataLoaderDraft, Plugin, hookimpl, option
from fastloop.errors import DataError

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")


class SkipUnreadable(Plugin):
    """Goes on without samples that cannot be read."""

    name = "skip-unreadable"
    numerics = "changes-training"
    description = "leaves out samples that cannot be read"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        limit: Annotated[int, option("Samples left out before the run ends all the same.", ge=0)] = 100

    @hookimpl
    def configure_dataloader(self, draft: DataLoaderDraft) -> None:
        draft.skip_unreadable = True

    @hookimpl
    def check_run(self, run: Run) -> None:
        dataset = run.datasets["train"]
        if run.train_loader.stream is not None:
            logger.warning("skip-unreadable: %s is iterable: nothing of it can be left out", type(dataset).__name__)

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.unreadable > self.config.limit:
            raise DataError(
                f"{run.state.unreadable} samples could not be read; plugins.skip-unreadable.limit is {self.config.limit}. "
                "log.txt in the run folder names the first ones."
            )
