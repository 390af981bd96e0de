"""Options of the tasks, and of their section ``data``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastloop import RecipeError, option
from fastloop_plugins.text import Data, TextTask

SPANS_ROWS = ("multiple_negatives", "cosent")
"""Losses that compare the rows of a batch with each other. Those of parts of a batch do not add up to its loss."""
SCORED = ("cosent", "cosine")
"""Losses that read a score for each row. The others read pairs of similar texts."""


@dataclass(kw_only=True)
class PairData(Data):
    """The ``data`` section."""

    other: Annotated[str, option("The column of the texts that those of data.text are compared with.")] = "other"
    negative: Annotated[str | None, option("The column of hard negatives: texts that are not similar.")] = None


@dataclass(kw_only=True)
class SearchedData(PairData):
    """The ``data`` section of ``embedding``."""

    beir: Annotated[str | None, option("Folder in the layout of BEIR, which evaluations search, too.")] = None


@dataclass(kw_only=True)
class EmbeddingOptions:
    """Options of ``embedding``."""

    loss: Annotated[
        Literal["multiple_negatives", "cosent", "cosine", "triplet"],
        option("The loss: the first and the last need similar texts, the others a score for each row."),
    ] = "multiple_negatives"
    pooling: Annotated[Literal["mean", "first", "last"], option("Which tokens give the vector of a text.")] = "mean"
    normalize: Annotated[bool, option("Scale the vectors to length 1.")] = True
    temperature: Annotated[float, option("multiple_negatives, cosent: divides similarities.", gt=0)] = 0.05
    margin: Annotated[float, option("triplet: how much nearer the similar text must be.", gt=0)] = 1.0
    dims: Annotated[list[int], option("Sum the loss over the first so many numbers of vectors; empty: use all.")] = (
        field(default_factory=list)
    )


@dataclass(kw_only=True)
class RerankerOptions:
    """Options of ``reranker``."""

    loss: Annotated[
        Literal["multiple_negatives", "binary", "list_net"],
        option("The loss: the first needs pairs that fit, the others a score for each pair."),
    ] = "multiple_negatives"
    negatives: Annotated[int, option("multiple_negatives: documents of other rows for each query.", ge=0)] = 4
    temperature: Annotated[float, option("multiple_negatives: divides scores between 0 and 1.", gt=0)] = 0.1


def read_columns(task: Any, recipe: Any, scored: bool) -> None:
    """Check the recipe of a task whose rows have a score each, or texts that fit and maybe one that does not."""
    data, negative = f"{recipe.where}: data", recipe.data.get("negative") is not None
    if scored and negative:
        raise RecipeError(f"{data}.negative: the loss {task.config.loss} reads a score for each pair. Remove it.")
    task.columns = ("text", "other", "negative") if negative else ("text", "other")
    task.labels = "required" if scored else "none"
    TextTask.check_recipe(task, recipe)
    if scored and task.data.label_type != "number":
        raise RecipeError(f"{data}.label_type: found {task.data.label_type}, expected number: scores are numbers.")
