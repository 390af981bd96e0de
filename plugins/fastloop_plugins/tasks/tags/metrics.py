"""Metrics of tagged words: accuracy, and precision, recall and F1 of entities.

An entity counts if its type, its first and its last word are right. The states are counts for each type of entity, so
their sums over batches and processes give the metrics of the whole split.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fastloop import RecipeError
from fastloop_plugins.tasks.heads.metrics import collect, make_metrics
from fastloop_plugins.tasks.tags.batches import IGNORED
from fastloop_plugins.tasks.tags.entities import PREFIXES, Scheme, entity_type, find_entities, misfit

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("fastloop")

SCORES = ("precision", "recall", "f1")


class EntityScores(Metric):
    """Precision, recall or F1 over all entities (micro average).

    Args:
        score: One of ``SCORES``.
        names: The tags, in the order of their ids.
        scheme: As in ``find_entities``.

    Attributes:
        classes: After ``compute``: the scores of each type of entity, over all processes.
    """

    full_state_update = False
    hits: Tensor
    predicted: Tensor
    actual: Tensor

    def __init__(self, score: str, names: Sequence[str], scheme: Scheme | None) -> None:
        super().__init__()
        self.score, self.names, self.scheme = score, list(names), scheme
        self.types = sorted({entity_type(name, scheme) for name in names if name != "O"})
        self.classes: list[dict[str, Any]] = []
        for state in ("hits", "predicted", "actual"):
            self.add_state(state, torch.zeros(len(self.types), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, targets: Tensor) -> None:
        """Add (N, tags) scores and (N,) tags. A target of -100 ends a sentence."""
        best, actual = scores.argmax(1).cpu().numpy(), targets.cpu().numpy()
        found = [find_entities(self._sentences(ids, actual), self.scheme) for ids in (best, actual)]
        sets = [{(number, *entity) for number, entities in enumerate(part) for entity in entities} for part in found]
        for state, entities in (("predicted", sets[0]), ("actual", sets[1]), ("hits", sets[0] & sets[1])):
            counts = Counter(entity[1] for entity in entities)
            setattr(
                self,
                state,
                getattr(self, state) + getattr(self, state).new_tensor([counts[kind] for kind in self.types]),
            )

    def _sentences(self, ids: NDArray[Any], targets: NDArray[Any]) -> list[list[str]]:
        """The tags of each sentence."""
        found: list[list[str]] = [[]]
        for tag, target in zip(ids.tolist(), targets.tolist(), strict=True):
            if target == IGNORED:
                found.append([])
            else:
                found[-1].append(self.names[tag])
        return [tags for tags in found if tags]

    def compute(self) -> Tensor:
        counts = zip(self.types, self.hits.tolist(), self.predicted.tolist(), self.actual.tolist(), strict=True)
        self.classes = [{"name": name, **_scores(*numbers), "samples": numbers[-1]} for name, *numbers in counts]
        total = _scores(*(int(state.sum()) for state in (self.hits, self.predicted, self.actual)))
        return torch.tensor(total[self.score], dtype=torch.float32, device=self.hits.device)


def _scores(hits: int, predicted: int, actual: int) -> dict[str, float]:
    """Precision, recall and F1; 0 where a denominator is 0."""
    return {
        "precision": hits / predicted if predicted else 0.0,
        "recall": hits / actual if actual else 0.0,
        "f1": 2 * hits / (predicted + actual) if predicted + actual else 0.0,
    }


def tag_metrics(
    names: Sequence[str],
    scheme: Scheme | None,
    classes: Mapping[str, type[Metric]],
    options: Mapping[str, Any],
    where: str,
) -> MetricCollection:
    """``accuracy`` of the words, ``precision``, ``recall`` and ``f1`` of the entities, and the recipe's metrics of the
    words.

    Tags without the prefixes of entities, such as parts of speech, have no entities: then only ``accuracy``.

    Args:
        classes: The result of ``find_metrics``.
        options: The options of the recipe's metrics.
        where: The recipe and the task, for messages.

    Raises:
        RecipeError: A tag is not one of ``scheme``, or a metric is wrong.
    """
    made: dict[str, Metric] = {"accuracy": MulticlassAccuracy(len(names), average="micro", ignore_index=IGNORED)}
    if (tag := misfit(names, scheme)) is None:
        made |= {score: EntityScores(score, names, scheme) for score in SCORES}
    elif scheme is not None:
        letters = ", ".join(f"{letter}-" for letter in PREFIXES[scheme])
        raise RecipeError(
            f"{where}.scheme: the tag {tag!r} is none of {scheme}. Expected O, or one of the prefixes {letters} and "
            "a type."
        )
    else:
        logger.warning(
            "%s: the tag %r has no prefix B-, I-, E- or S-: entities are not scored. Other prefixes: set scheme",
            where,
            tag,
        )
    known = {"num_classes": len(names), "task": "multiclass", "ignore_index": IGNORED}
    for name, metric in make_metrics(classes, options, f"{where}.metrics", known).items():
        if name in made:
            raise RecipeError(f"{where}.metrics.{name}: the task has a metric {name!r}. Call this one something else.")
        made[name] = metric
    return collect(made, f"{where}.metrics")
