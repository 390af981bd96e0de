"""Trains on samples in the order of a value, such as from easy to hard.

    plugins:
      - curriculum: {by: difficulty}

``by`` names an attribute of the training dataset with a number for each sample, such as ``lengths`` (the tokens of
texts), or a number that each sample has under this name. Samples with the same value are shuffled in each epoch.
Evaluations keep their order. Method: Bengio et al., "Curriculum Learning", 2009.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Run
    from torch import Generator


class Curriculum(Plugin):
    """Orders the training samples by a value, in each epoch."""

    name = "curriculum"
    numerics = "changes-training"

    by: str = option("Attribute of the dataset, or key of each sample, with a number.", default="lengths")
    descending: bool = option("Begin with the largest value.", default=False)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dataset: Any = None  # the one whose values are known
        self.values: list[float] = []

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"arrange": self.arrange}

    @hookimpl
    def check_run(self, run: Run) -> None:
        dataset = run.train_loader.dataset
        if run.train_loader.sampler is None:
            raise self.error("by", f"{type(dataset).__name__} is iterable, with its own order. Remove the plugin.")
        values = self.values_of(dataset)
        if min(values) == max(values):
            self.log.warning("all samples have %s %g: there is nothing to sort", self.by, values[0])

    def arrange(self, dataset: Any, ids: list[int], batch_size: int, generator: Generator | None) -> list[int]:
        """Order samples; see ``Settings.arrange``."""
        if generator is None:  # an evaluation
            return ids
        return sorted(ids, key=self.values_of(dataset).__getitem__, reverse=self.descending)

    def values_of(self, dataset: Any) -> list[float]:
        """The value of each sample, read once."""
        if self.dataset is dataset:
            return self.values
        try:
            values = getattr(dataset, self.by, None)
            if values is None:
                values = [dataset[place][self.by] for place in range(len(dataset))]
            self.values = [float(value) for value in values]
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise PluginError(
                f"plugin 'curriculum': {type(dataset).__name__} has no {self.by!r}: expected an attribute with a "
                f"number for each sample, or a number in each sample ({type(error).__name__}: {error})."
            ) from None
        self.dataset = dataset
        return self.values
