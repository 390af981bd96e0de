"""Two classes: which one is positive, and how their scores become a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import hookimpl, option
from fastloop.errors import did_you_mean
from fastloop_plugins.tasks.shared.losses import ClassifierOptions

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Decision:
    """How the scores of classes become a prediction.

    Attributes:
        threshold: Predict the positive class of two if its probability is above this; None: the class with the largest
            score.
        positive: Id of the positive class of two.
    """

    threshold: float | None = None
    positive: int = 1

    def probability(self, logits: Tensor) -> Tensor:
        """The probability of the positive class: (N, 2) -> (N,), float32."""
        return logits.float().softmax(1)[:, self.positive]

    def classes(self, scores: Tensor) -> Tensor:
        """The class that each row of scores predicts: (N, classes) -> (N,) int64."""
        if self.threshold is None:
            return scores.argmax(1)
        # The ids of two classes are 0 and 1. If 0 is positive, a probability above the threshold predicts 0.
        is_positive = (self.probability(scores) > self.threshold).long()
        return is_positive if self.positive == 1 else 1 - is_positive

    def positives(self, scores: Tensor) -> Tensor:
        """Whether each row of scores predicts the positive class: (N, 2) -> (N,) of 0 and 1, int64."""
        return self.are_positive(self.classes(scores))

    def are_positive(self, classes: Tensor) -> Tensor:
        """Whether each class is the positive one: ids (N,) -> (N,) of 0 and 1, int64."""
        return classes if self.positive == 1 else 1 - classes


class TwoClassOptions(ClassifierOptions):
    """Options of tasks whose samples have one class each, for data with two classes. A task has ``threshold``, too.

    Attributes:
        scored_classes: Metric -> the name of the only class that it scores; ``build_metrics`` sets it.
        decided: The last result of ``decision``.
    """

    threshold: float | None = option(
        "Predict the positive class of two if its probability is above this; null: the likelier.",
        default=None,
        gt=0,
        lt=1,
    )
    positive: str | int | None = option(
        "The class of two that f1, Binary metrics and threshold are about; null: the second.", default=None
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scored_classes: dict[str, str] = {}
        self.decided = Decision()

    def decision(self, names: Sequence[str]) -> Decision:
        """The decision between classes of these names, in the order of their ids.

        Raises:
            RecipeError: An option is for two classes, and there are others, or ``positive`` is none of them.
        """
        for key in ("threshold", "positive"):
            if getattr(self, key) is not None and len(names) != 2:
                raise self.error(
                    key,
                    f"is for two classes, and the data has {len(names)}.",
                    code="unknown-option",
                    remedy="Remove it.",
                )
        self.decided = Decision(self.threshold)
        if self.positive is None:
            return self.decided
        name = str(self.positive)
        if name not in names:
            raise self.error(
                "positive", f"the data has no class {name!r}.", code="unknown-label", remedy=did_you_mean(name, names)
            )
        self.decided = Decision(self.threshold, list(names).index(name))
        return self.decided

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        if self.scored_classes:
            summary["metric_classes"] = dict(self.scored_classes)
