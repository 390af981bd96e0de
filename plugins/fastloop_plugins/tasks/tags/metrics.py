"""Entities that the tags of a sentence describe, and metrics of tagged words: accuracy, and precision, recall and F1 of
entities.

A scheme has rules for two neighbouring tags: whether an entity starts at the second, continues from the first to the
second, or ends after the first. An entity that starts but does not end by a rule is none. Without a scheme, entities
are those of CoNLL's evaluation script (conlleval), which also reads tags in an order that no scheme allows.

Source of the schemes and their names: Sang and Veenstra, "Representing Text Chunks", 1999 (IOB, IOE); Ratinov and Roth,
"Design Challenges and Misconceptions in Named Entity Recognition", 2009 (BILOU). Where these leave a case open, the
rules are those of seqeval 1.2.2 in its strict and default modes, so that scores can be compared.

In metrics, an entity counts if its type, its first and its last word are right. The states are counts for each type of
entity, so their sums over batches and processes give the metrics of the whole split.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fastloop import Problem, RecipeError
from fastloop_plugins.tasks.heads.metrics import collect, make_metrics
from fastloop_plugins.tasks.tags.batches import IGNORED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop import Output
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

SCORES = ("precision", "recall", "f1")
CHECKED = 2000
"""Sentences of a split whose tags are compared with the scheme, in less than a second."""

Scheme = Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"]
Entity = tuple[str, int, int]
"""Type, first word and last word."""

PREFIXES = {"IOB1": "IB", "IOB2": "IB", "IOE1": "IE", "IOE2": "IE", "IOBES": "IBES", "BILOU": "BILU", None: "IBES"}
"""Scheme -> first letters of its tags, beside ``O``. None: those of CoNLL's evaluation script."""
RULES = {
    "IOB1": ("OI I!I BI I=B B=B", "B=I I=I", "I!I IO IB BO B!I B=B"),
    "IOB2": ("*B", "B=I I=I", "**"),
    "IOE1": ("OI I!I EI E=E", "I=I I=E", "I!I IO I!E E=I E=E"),
    "IOE2": ("OI OE EI EE I!I I!E", "I=I I=E", "E*"),
    "IOBES": ("*B *S", "B=I B=E I=I I=E", "E* S*"),
    "BILOU": ("*B *U", "B=I B=L I=I I=L", "L* U*"),
    None: ("*B *S OI OE EI EE SI SE B!I B!E I!I I!E", "B=I B=E I=I I=E", "**"),
}
"""Scheme -> when an entity starts, continues and ends: letters of two neighbouring tags (``*``: any). Between them is
``=`` for tags of the same type, ``!`` for different types, and nothing for both. The end of a sentence is an ``O``."""

SAME_TYPES = {"=": (True,), "!": (False,), "": (True, False)}
"""The sign between two letters of a rule -> whether the types of the tags are equal."""


@dataclass(frozen=True)
class Rules:
    """When an entity starts, continues and ends: the letters of two neighbouring tags, and whether their types are
    equal."""

    starts: frozenset[tuple[str, str, bool]]
    continues: frozenset[tuple[str, str, bool]]
    ends: frozenset[tuple[str, str, bool]]


@cache
def _rules(scheme: Scheme | None) -> Rules:
    letters = "O" + PREFIXES[scheme]
    tables = []
    for rules in RULES[scheme]:
        table: set[tuple[str, str, bool]] = set()
        for rule in rules.split():
            firsts = letters if rule[0] == "*" else rule[0]
            seconds = letters if rule[-1] == "*" else rule[-1]
            table.update(product(firsts, seconds, SAME_TYPES[rule[1:-1]]))
        tables.append(frozenset(table))
    return Rules(*tables)


def entity_type(tag: str, scheme: Scheme | None) -> str:
    """The type of a tag that is not ``O``; ``_`` for a tag without one."""
    return (tag[1:].partition("-")[2] if scheme is None else tag[1:].strip("-")) or "_"


def find_entities(sentences: Iterable[Sequence[str]], scheme: Scheme | None) -> list[list[Entity]]:
    """The entities of each sentence.

    Args:
        sentences: The tags of each sentence. ``misfit`` finds none that is not of the scheme.
        scheme: The rules; None: those of CoNLL's evaluation script.
    """
    rules = _rules(scheme)
    types: dict[str, str] = {}
    entities_of_sentences = []
    for tags in sentences:
        entities: list[Entity] = []
        first, before, kind = None, "O", "_"
        for place, tag in enumerate((*tags, "O")):
            if tag not in types:
                types[tag] = entity_type(tag, scheme)
            pair = (before, tag[0], kind == types[tag])
            if first is not None and pair not in rules.continues:
                if pair in rules.ends:
                    entities.append((kind, first, place - 1))
                first = None
            if first is None and pair in rules.starts:
                first = place
            before, kind = tag[0], types[tag]
        entities_of_sentences.append(entities)
    return entities_of_sentences


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
    schemes: tuple[Scheme, ...] = get_args(Scheme)
    fits = next((other for other in schemes if misfit(names, other) is None and not _outside(sentences, other)), None)
    remedy = f"The tags follow {fits}: {where}={fits}" if fits else f"To count them, as conlleval does: {where}=null"
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


def check_scheme(classes: Sequence[str], name: str, split: Split, scheme: Scheme | None, key: str) -> None:
    """Warn about tags of a split that do not follow the scheme of the recipe, which ``key`` names.

    Args:
        classes: The tags in the order of their ids.
        name: The name of the split.
    """
    if scheme is None or misfit(classes, scheme) is not None:
        return
    sentences = [[classes[tag] for tag in tags] for tags in tags_of(split.ids, split.lengths[:CHECKED])]
    if message := describe_misfit(sentences, scheme, key):
        logger.warning(Problem(f"{message}.", code="wrong-scheme", place=f"data: {name}"))


def tags_of(numbers: NDArray[np.int32], lengths: NDArray[np.int64]) -> list[list[int]]:
    """The tag of each word of the first sentences.

    Args:
        numbers: Ids and targets of all sentences, in turn, end to end.
        lengths: Numbers of each of these sentences.
    """
    targets = numbers[1 : lengths.sum() : 2]
    return [part[part >= 0].tolist() for part in np.split(targets, np.cumsum(lengths // 2)[:-1])]


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
    higher_is_better = True
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
        actual_tags = targets.cpu().numpy()
        predicted = self._entities(scores.argmax(1).cpu().numpy(), actual_tags)
        actual = self._entities(actual_tags, actual_tags)
        self.predicted = self.predicted + self._counts(predicted)
        self.actual = self.actual + self._counts(actual)
        self.hits = self.hits + self._counts(predicted & actual)

    def _entities(self, ids: NDArray[Any], targets: NDArray[Any]) -> set[tuple[int, str, int, int]]:
        """The entities that tags describe: the number of the sentence, and the fields of ``Entity``."""
        entities: set[tuple[int, str, int, int]] = set()
        for number, in_sentence in enumerate(find_entities(self._sentences(ids, targets), self.scheme)):
            entities.update((number, *entity) for entity in in_sentence)
        return entities

    def _counts(self, entities: Iterable[tuple[int, str, int, int]]) -> Tensor:
        """The number of entities of each type, (types,) int64."""
        counts = Counter(kind for _, kind, _, _ in entities)
        return self.hits.new_tensor([counts[kind] for kind in self.types])

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
        if not int(self.actual.sum()):  # without entities, nothing can be found
            total = dict.fromkeys(total, math.nan)
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
            f"the tag {tag!r} is none of {scheme}.",
            code="unknown-label",
            place=f"{where}.scheme",
            expected=f"O, or one of the prefixes {letters} and a type",
        )
    else:
        logger.warning(
            Problem(
                f"the tag {tag!r} has no prefix B-, I-, E- or S-: entities are not scored. Other prefixes: set scheme.",
                code="no-entities",
                place=where,
            )
        )
    known = {"num_classes": len(names), "task": "multiclass", "ignore_index": IGNORED}
    where = f"{where}.metrics"
    return collect(make_metrics(classes, options, where, known, made), where)


def tag_columns(
    output: Output, words: Sequence[list[str]], names: Sequence[str], scheme: Scheme | None
) -> dict[str, list[Any]]:
    """``words``, ``tags`` and the ``probabilities`` of these tags: lists of equal lengths. And ``entities``, if the
    tags describe entities: the type, the first and last word (``start`` and ``end``, from 0, without ``end``) and the
    words of each.

    Args:
        output: ``word_scores`` of the sentences.
        words: The words of each sentence.
        names: The tags, in the order of their ids.
    """
    assert output.predictions is not None
    assert output.targets is not None
    probabilities, best = output.predictions.float().softmax(1).max(1)
    ends = (output.targets == IGNORED).nonzero().flatten().tolist()
    columns: dict[str, list[Any]] = {"words": [list(sentence) for sentence in words], "tags": [], "probabilities": []}
    for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        columns["tags"].append([names[index] for index in best[start:end].tolist()])
        columns["probabilities"].append(probabilities[start:end].tolist())
    if misfit(names, scheme) is None:
        columns["entities"] = [
            [
                {"type": kind, "start": first, "end": last + 1, "text": " ".join(sentence[first : last + 1])}
                for kind, first, last in entities
            ]
            for sentence, entities in zip(words, find_entities(columns["tags"], scheme), strict=True)
        ]
    return columns
