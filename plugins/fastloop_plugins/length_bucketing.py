"""Puts samples of like length into one batch, so that little padding is computed.

    plugins:
      - length-bucketing: {window: 100}

Samples are shuffled, sorted by length inside windows of so many batches, and the batches are shuffled again: nearly all padding goes,
and the order stays random from epoch to epoch. Every sample comes once, whatever the number of processes, and a run resumes inside an
epoch. Evaluation goes by length altogether: its metrics are sums. For map-style datasets whose samples have ``input_ids``, or that have
``lengths``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import DataLoaderDraft, Plugin, PluginError, hookimpl, option

if TYPE_CHECKING:
    from torch import Generator

    from fastloop import Run

logger = logging.getLogger("fastloop")


class LengthBucketing(Plugin):
    """Batches of like length."""

    name = "length-bucketing"
    parity = "changes-training"
    configures = "makes batches of samples of like length"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        window: Annotated[int, option("Batches among whose samples lengths are matched: more is less padding and less chance.", ge=2)] = 100

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[int, Sequence[int]] = {}  # id of a dataset -> its lengths

    @hookimpl
    def configure_dataloader(self, draft: DataLoaderDraft) -> None:
        draft.arrange = self.arrange

    @hookimpl
    def check_run(self, run: Run) -> None:
        if run.train_loader.sampler is None:
            kind = type(run.datasets["train"]).__name__
            raise PluginError(f"{run.recipe.where}: plugins.length-bucketing: {kind} is iterable: its order is its own. Leave this out.")
        lengths = self.lengths(run.datasets["train"])
        if min(lengths) == max(lengths):
            logger.warning("length-bucketing: all samples are of length %d: there is nothing to match", lengths[0])
            return
        plain, bucketed = (self.padding(run, ids) for ids in (list(range(len(lengths))), run.train_loader.sampler.order()))
        logger.info("length-bucketing: %.0f%% of what is computed is padding, instead of %.0f%%", 100 * bucketed, 100 * plain)

    def padding(self, run: Run, ids: list[int]) -> float:
        """The share of padding when batches of a device are padded to their longest sample."""
        lengths, size = self.lengths(run.datasets["train"]), run.device_batch_size
        batches = [[lengths[index] for index in ids[start : start + size]] for start in range(0, len(ids), size)]
        return 1 - sum(map(sum, batches)) / sum(max(batch) * len(batch) for batch in batches)

    def arrange(self, dataset: Any, ids: list[int], batch_size: int, generator: Generator | None) -> list[int]:
        """Like lengths together; see ``DataLoaderDraft.arrange``."""
        import torch

        lengths = self.lengths(dataset)

        def by_length(ids: list[int]) -> list[int]:
            return sorted(ids, key=lambda index: -lengths[index])

        if generator is None:
            return by_length(ids)
        whole = len(ids) // batch_size * batch_size
        batches = []
        for start in range(0, whole, self.config.window * batch_size):
            window = by_length(ids[start : min(start + self.config.window * batch_size, whole)])
            batches += [window[first : first + batch_size] for first in range(0, len(window), batch_size)]
        shuffled = [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
        return [index for batch in [*shuffled, by_length(ids[whole:])] for index in batch]  # a short batch can only be the last

    def lengths(self, dataset: Any) -> Sequence[int]:
        """The length of each sample, looked up once.

        Raises:
            PluginError: Samples have none.
        """
        if id(dataset) not in self.known:
            found = getattr(dataset, "lengths", None)
            try:
                self.known[id(dataset)] = list(found) if found is not None else [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
            except (TypeError, KeyError, IndexError):
                raise PluginError(
                    f"plugin 'length-bucketing': {type(dataset).__name__} has no lengths. "
                    "Give it an attribute `lengths`, a number for each sample, or samples that are mappings with `input_ids`."
                ) from None
        return self.known[id(dataset)]
