"""Metrics of tagged words: accuracy, and seqeval's precision, recall and F1 of entities.

An entity counts if its type, its first and its last word are right. seqeval finds the entities of a sentence. The
states are counts for each type of entity, so their sums over batches and processes give the metrics of the whole split.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fastloop import RecipeError
from fastloop_plugins.tasks.heads.metrics import collect, make_metrics
from fastloop_plugins.tasks.tags.batches import IGNORED

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("fastloop")

Scheme = Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"]
Entity = tuple[str, int, int]
"""Type, first word and last word."""

PREFIXES = {"IOB1": "IB", "IOB2": "IB", "IOE1": "IE", "IOE2": "IE", "IOBES": "IBES", "BILOU": "BILU", None: "IBES"}
"""Scheme -> first letters of its tags, beside ``O``. None: seqeval's default, as in CoNLL's evaluation script."""
SCORES = ("precision", "recall", "f1")


def find_entities(sentences: Iterable[Sequence[str]], scheme: Scheme | None) -> list[list[Entity]]:
    """The entities of each sentence, by seqeval.

    Args:
        sentences: The tags of each sentence.
        scheme: As in seqeval's ``mode="strict"``; None: its default mode, which also reads tags that no scheme allows
            in that order.
    """
    if scheme is None:
        from seqeval.metrics.sequence_labeling import get_entities

        return [get_entities(list(tags)) if tags else [] for tags in sentences]
    from seqeval import scheme as schemes

    found = schemes.Entities([list(tags) for tags in sentences], getattr(schemes, scheme))
    return [[(entity.tag, entity.start, entity.end - 1) for entity in entities] for entities in found.entities]


def misfit(names: Sequence[str], scheme: Scheme | None) -> str | None:
    """The first tag that does not describe a part of an entity under a scheme; None if all do."""
    fits = re.compile(rf"[{PREFIXES[scheme]}](-.+)?|O")
    return next((name for name in names if not fits.fullmatch(name)), None)


def describe_misfit(sentences: Sequence[Sequence[str]], scheme: Scheme, where: str) -> str | None:
    """Describe the tagged words that belong to no entity under a scheme, and name the scheme that the tags follow; None
    if there are none.

    Args:
        sentences: The tags of each sentence; each is one of the scheme.
        where: The key of the scheme, for the message.
    """
    lost = _outside(sentences, scheme)
    if not lost:
        return None
    tagged, (tags, place) = sum(tag != "O" for tags in sentences for tag in tags), lost[0]
    before = f"{tags[place - 1]!r}" if place else "the beginning of a sentence"
    names = sorted({tag for tags in sentences for tag in tags})
    schemes: tuple[Scheme, ...] = ("IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU")
    fits = next((other for other in schemes if misfit(names, other) is None and not _outside(sentences, other)), None)
    remedy = f"The tags follow {fits}: {where}={fits}" if fits else f"For seqeval's default mode: {where}=null"
    return (
        f"{len(lost)} of {tagged} tagged words belong to no entity of {scheme}, and metrics leave them out, such as "
        f"{tags[place]!r} after {before}. {remedy}"
    )


def _outside(sentences: Iterable[Sequence[str]], scheme: Scheme) -> list[tuple[Sequence[str], int]]:
    """The tagged words that belong to no entity: the tags of the sentence, and the word's place."""
    found: list[tuple[Sequence[str], int]] = []
    for tags, entities in zip(sentences, find_entities(sentences, scheme), strict=True):
        inside = {place for _, first, last in entities for place in range(first, last + 1)}
        found += [(tags, place) for place, tag in enumerate(tags) if tag != "O" and place not in inside]
    return found


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
        kinds = (name[1:].partition("-")[2] if scheme is None else name[1:].strip("-") for name in names if name != "O")
        self.types = sorted({kind or "_" for kind in kinds})
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
    """Precision, recall and F1; 0 where a denominator is 0, as in seqeval."""
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
