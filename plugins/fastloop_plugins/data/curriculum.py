"""Trains on samples in the order of a value, such as from easy to hard (Bengio et al., 2009,
https://doi.org/10.1145/1553374.1553380).

    plugins:
      - curriculum: {by: lengths}

``by`` names an attribute of the training dataset with a number for each sample, such as ``lengths`` (the tokens of
texts), or a number that each sample has under this name. A dataset of your own (``data.module``) may have any. Samples
with the same value are shuffled in each epoch. Evaluations keep their order. Of files of texts, no columns but texts
and labels are read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import Plugin, PluginError, hookimpl, option

if TYPE_CHECKING:
    from torch import Generator

    from fastloop import Run

logger = logging.getLogger("fastloop")


class Curriculum(Plugin):
    """Arranges each epoch's samples by a value."""

    name = "curriculum"
    numerics = "changes-training"
    description = "orders the training samples by a value"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        by: Annotated[str, option("Attribute of the dataset, or key of each sample, with a number.")] = "lengths"
        descending: Annotated[bool, option("Begin with the largest value.")] = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: tuple[Any, list[float]] = (None, [])  # a dataset, and the value of each sample

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"arrange": self.arrange}

    @hookimpl
    def check_run(self, run: Run) -> None:
        dataset = run.train_loader.dataset
        if run.train_loader.sampler is None:
            raise PluginError(
                f"{run.recipe.where}: plugins.curriculum: {type(dataset).__name__} is iterable, with its own order. "
                "Remove curriculum."
            )
        values = self.values(dataset)
        if min(values) == max(values):
            logger.warning("curriculum: all samples have %s %g: there is nothing to sort", self.config.by, values[0])

    def arrange(self, dataset: Any, ids: list[int], batch_size: int, generator: Generator | None) -> list[int]:
        """Order samples; see ``Settings.arrange``."""
        if generator is None:
            return ids
        return sorted(ids, key=self.values(dataset).__getitem__, reverse=self.config.descending)

    def values(self, dataset: Any) -> list[float]:
        """The value of each sample, read once.

        Raises:
            PluginError: The samples have none, or it is not a number.
        """
        if self.known[0] is not dataset:
            by = self.config.by
            try:
                found = getattr(dataset, by, None)
                found = [dataset[place][by] for place in range(len(dataset))] if found is None else found
                self.known = dataset, [float(value) for value in found]
            except (TypeError, KeyError, IndexError, ValueError) as error:
                raise PluginError(
                    f"plugin 'curriculum': {type(dataset).__name__} has no {by!r}: expected an attribute with a number "
                    f"for each sample, or a number in each sample ({type(error).__name__}: {error})."
                ) from None
        return self.known[1]
