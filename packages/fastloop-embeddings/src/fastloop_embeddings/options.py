"""Options of the task, and of its section ``data``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastloop import option
from fastloop_plugins.text import Data


@dataclass(kw_only=True)
class PairData(Data):
    """The ``data`` section."""

    other: Annotated[str, option("The column of the texts that those of data.text are compared with.")] = "other"
    negative: Annotated[str | None, option("The column of hard negatives: texts that are not similar.")] = None


@dataclass(kw_only=True)
class Options:
    """Options of the plugin."""

    loss: Annotated[
        Literal["multiple_negatives", "cosent", "cosine", "triplet"],
        option("The loss: the first and the last need similar texts, the others a score for each row."),
    ] = "multiple_negatives"
    pooling: Annotated[
        Literal["mean", "first", "last"], option("The vector of a text: the mean of its tokens', or one token's.")
    ] = "mean"
    normalize: Annotated[bool, option("Scale the vectors to length 1.")] = True
    temperature: Annotated[
        float,
        option("multiple_negatives, cosent: divides similarities; smaller: the hardest texts count more.", gt=0),
    ] = 0.05
    margin: Annotated[float, option("triplet: how much nearer the similar text must be than the other one.", gt=0)] = (
        1.0
    )
    dims: Annotated[
        list[int], option("Sum the loss over the first so many numbers of the vectors; empty: use all, once.")
    ] = field(default_factory=list)
