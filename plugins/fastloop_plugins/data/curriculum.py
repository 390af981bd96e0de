"""Trains on samples in the order of a value, such as from easy to hard (Bengio et al., 2009,
https://doi.org/10.1145/1553374.1553380).

    plugins:
      - curriculum: {column: difficulty}

``column`` names a column of numbers of the training rows of a text task. It is read into memory, so ``data.streaming``
is refused, and samples must be rows: those of ``causal-lm`` are blocks of a text. Files to evaluate need no such
column.

``by`` names an attribute of the training dataset with a number for each sample, such as ``lengths`` (the tokens of
texts), or a number that each sample has under this name. A dataset of your own (``data.module``) may have any.

Samples with the same value are shuffled in each epoch. Evaluations keep their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, RecipeError, hookimpl, option

if TYPE_CHECKING:
    from torch import Generator

    from fastloop import Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe


class Curriculum(Plugin):
    """Orders the training samples by a value, in each epoch."""

    name = "curriculum"
    numerics = "changes-training"

    by: str = option("Attribute of the dataset, or key of each sample, with a number.", default="lengths")
    column: str | None = option("Column of the rows of a text task, instead of by.", default=None)
    descending: bool = option("Begin with the largest value.", default=False)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.data: Any = None  # the section of the task, which reads the column
        self.known: tuple[Any, list[float]] = (None, [])  # a dataset, and the value of each sample

    @hookimpl(trylast=True)  # after that of the task, which reads its sections there
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        if self.column is None:
            return
        from fastloop_plugins.text.data import TextData

        task, where = next(plugin for plugin in plugins if plugin.slot == "task"), "plugins.curriculum.column"
        self.data = getattr(task, "data", None)
        if not isinstance(self.data, TextData):
            raise RecipeError(f"{recipe.where}: {where}: the task {task.name!r} reads no rows of texts. Use by.")
        if self.data.options.streaming:
            raise RecipeError(f"{recipe.where}: {where}: data.streaming reads rows in their order. Set it to false.")
        self.data.rank_column, self.data.rank_option = self.column, where

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
            what = self.column or self.by
            self.log.warning("all samples have %s %g: there is nothing to sort", what, values[0])

    def arrange(self, dataset: Any, ids: list[int], batch_size: int, generator: Generator | None) -> list[int]:
        """Order samples; see ``Settings.arrange``."""
        if generator is None:
            return ids
        return sorted(ids, key=self.values(dataset).__getitem__, reverse=self.descending)

    def values(self, dataset: Any) -> list[float]:
        """The value of each sample, read once.

        Raises:
            PluginError: The samples have none, or it is not a number.
        """
        if self.known[0] is not dataset and self.data is not None:
            from fastloop_plugins.text.batches import Sequences

            if not isinstance(dataset, Sequences) or len(dataset) != len(self.data.ranks):
                count = f"{len(dataset)} samples ({type(dataset).__name__}) are not the {len(self.data.ranks)} rows"
                raise PluginError(f"plugin 'curriculum': {count} that have a {self.column!r}. Use by.")
            self.known = dataset, self.data.ranks.tolist()
        elif self.known[0] is not dataset:
            by = self.by
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
