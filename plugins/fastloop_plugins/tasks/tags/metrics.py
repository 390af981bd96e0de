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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from fastloop import Problem, RecipeError
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.tasks.shared.metrics import collect, make_metrics, with_probabilities

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop import Output
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

SCORES = ("precision", "recall", "f1")
CHECKED = 2000
"""Sentences of a split whose tags are compared with the scheme, in less than a second."""

Scheme = Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"]


class Entity(NamedTuple):
    """An entity of a sentence: its type, its first and its last word."""

    kind: str
    first: int
    last: int


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
    """The type of a tag that is not ``O``, such as ``PER`` of ``B-PER``; ``_`` for a tag without one."""
    if scheme is None:  # as in CoNLL's script: everything after the first hyphen
        kind = tag[1:].partition("-")[2]
    else:
        kind = tag[1:].strip("-")
    return kind or "_"


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
        first = None  # word of the open entity
        before = "O"  # letter and type of the tag before
        kind = "_"
        for place, tag in enumerate((*tags, "O")):
            if tag not in types:
                types[tag] = entity_type(tag, scheme)
            pair = (before, tag[0], kind == types[tag])
            if first is not None and pair not in rules.continues:
                if pair in rules.ends:
                    entities.append(Entity(kind, first, place - 1))
                first = None
            if first is None and pair in rules.starts:
                first = place
            before = tag[0]
            kind = types[tag]
        entities_of_sentences.append(entities)
    return entities_of_sentences


def misfit(names: Sequence[str], scheme: Scheme | None) -> str | None:
    """The first tag that does not describe a part of an entity under a scheme; None if all do."""
    tag_of_scheme = re.compile(rf"[{PREFIXES[scheme]}](-.+)?|O")
    for name in names:
        if not tag_of_scheme.fullmatch(name):
            return name
    return None


def describe_misfit(sentences: Sequence[Sequence[str]], scheme: Scheme, where: str) -> str | None:
    """Describe the tagged words that belong to no entity under a scheme, and name the scheme that the tags follow; None
    if there are none.

    Args:
        sentences: The tags of each sentence; each is one of the scheme.
        where: The key of the scheme, for the message.
    """
    outside = _outside(sentences, scheme)
    if not outside:
        return None
    tags, place = outside[0]
    before = f"{tags[place - 1]!r}" if place else "the beginning of a sentence"
    fitting = find_scheme(sentences)
    if fitting is not None:
        remedy = f"The tags follow {fitting}: {where}={fitting}"
    else:
        remedy = f"To count them, as conlleval does: {where}=null"
    tagged = 0
    for sentence in sentences:
        tagged += sum(tag != "O" for tag in sentence)
    return (
        f"{len(outside)} of {tagged} tagged words belong to no entity of {scheme}, and metrics leave them out, such as "
        f"{tags[place]!r} after {before}. {remedy}"
    )


def find_scheme(sentences: Sequence[Sequence[str]]) -> Scheme | None:
    """The first scheme under which every tagged word belongs to an entity; None: no scheme."""
    names: set[str] = set()
    for tags in sentences:
        names.update(tags)
    schemes: tuple[Scheme, ...] = get_args(Scheme)
    for scheme in schemes:
        if misfit(sorted(names), scheme) is None and not _outside(sentences, scheme):
            return scheme
    return None


def _outside(sentences: Iterable[Sequence[str]], scheme: Scheme) -> list[tuple[Sequence[str], int]]:
    """The tagged words that belong to no entity: the tags of the sentence, and the word's place."""
    words: list[tuple[Sequence[str], int]] = []
    for tags, entities in zip(sentences, find_entities(sentences, scheme), strict=True):
        inside: set[int] = set()
        for entity in entities:
            inside.update(range(entity.first, entity.last + 1))
        for place, tag in enumerate(tags):
            if tag != "O" and place not in inside:
                words.append((tags, place))
    return words


def check_scheme(classes: Sequence[str], name: str, split: Split, scheme: Scheme | None, key: str) -> None:
    """Warn about tags of a split that do not follow the scheme of the recipe, which ``key`` names.

    Args:
        classes: The tags in the order of their ids.
        name: The name of the split.
    """
    if scheme is None or misfit(classes, scheme) is not None:
        return
    sentences = []
    for tags in tags_of(split.ids, split.lengths[:CHECKED]):
        sentences.append([classes[tag] for tag in tags])
    message = describe_misfit(sentences, scheme, key)
    if message is not None:
        logger.warning(Problem(f"{message}.", code="wrong-scheme", place=f"data: {name}"))


def tags_of(numbers: NDArray[np.int32], lengths: NDArray[np.int64]) -> list[list[int]]:
    """The tag of each word of the first sentences.

    The numbers ``[101 -1, 7 2, 8 -1, 102 -1]`` of a sentence are four tokens, each with its target. It has one word, of
    tag 2: a token without a tag has a negative target.

    Args:
        numbers: Ids and targets of all sentences, in turn, end to end.
        lengths: Numbers of each of these sentences.
    """
    targets = numbers[: lengths.sum()].reshape(-1, 2)[:, 1]
    ends = np.cumsum(lengths // 2)
    tags = []
    for targets_of_sentence in np.split(targets, ends[:-1]):
        has_tag = targets_of_sentence >= 0
        tags.append(targets_of_sentence[has_tag].tolist())
    return tags


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
    read_by_compute = ("score", "classes")
    hits: Tensor
    predicted: Tensor
    actual: Tensor

    def __init__(self, score: str, names: Sequence[str], scheme: Scheme | None) -> None:
        super().__init__()
        self.score = score
        self.names = list(names)
        self.scheme = scheme
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
        sentences: list[list[str]] = [[]]
        for tag, target in zip(ids.tolist(), targets.tolist(), strict=True):
            if target == IGNORED:
                sentences.append([])
            else:
                sentences[-1].append(self.names[tag])
        return [tags for tags in sentences if tags]

    def compute(self) -> Tensor:
        counts = zip(self.types, self.hits.tolist(), self.predicted.tolist(), self.actual.tolist(), strict=True)
        self.classes = []
        for name, hits, predicted, actual in counts:
            self.classes.append({"name": name, **_scores(hits, predicted, actual), "samples": actual})
        all_actual = int(self.actual.sum())
        total = math.nan  # without entities, nothing can be found
        if all_actual:
            total = _scores(int(self.hits.sum()), int(self.predicted.sum()), all_actual)[self.score]
        return torch.tensor(total, dtype=torch.float32, device=self.hits.device)


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
    metric_classes: Mapping[str, type[Metric]],
    options: Mapping[str, Any],
    where: str,
) -> MetricCollection:
    """``accuracy`` of the words, ``precision``, ``recall`` and ``f1`` of the entities, and the recipe's metrics of the
    words.

    Tags without the prefixes of entities, such as parts of speech, have no entities: then only ``accuracy``.

    Args:
        metric_classes: The result of ``find_metrics``.
        options: The options of the recipe's metrics.
        where: The recipe and the task, for messages.

    Raises:
        RecipeError: A tag is not one of ``scheme``, or a metric is wrong.
    """
    made: dict[str, Metric] = {"accuracy": MulticlassAccuracy(len(names), average="micro", ignore_index=IGNORED)}
    tag = misfit(names, scheme)
    if tag is None:
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
    return collect(with_probabilities(make_metrics(metric_classes, options, where, known, made)), where)


def tag_columns(
    output: Output, words: Sequence[list[str]], names: Sequence[str], scheme: Scheme | None
) -> dict[str, list[Any]]:
    """``words``, ``tags`` and the ``probabilities`` of these tags: lists of equal lengths. And ``entities``, if the
    tags describe entities: the type, the first and last word (``start`` and ``end``, from 0, without ``end``) and the
    words of each.

    Args:
        output: ``word_logits_and_tags`` of the sentences.
        words: The words of each sentence.
        names: The tags, in the order of their ids.
    """
    assert output.predictions is not None
    assert output.targets is not None
    probabilities, best = output.predictions.float().softmax(1).max(1)
    ends = (output.targets == IGNORED).nonzero().flatten().tolist()
    columns: dict[str, list[Any]] = {"words": [list(sentence) for sentence in words], "tags": [], "probabilities": []}
    start = 0
    for end in ends:
        columns["tags"].append([names[index] for index in best[start:end].tolist()])
        columns["probabilities"].append(probabilities[start:end].tolist())
        start = end + 1  # after the ignored target between two sentences
    if misfit(names, scheme) is None:
        columns["entities"] = []
        for sentence, entities in zip(words, find_entities(columns["tags"], scheme), strict=True):
            columns["entities"].append([describe_entity(entity, sentence) for entity in entities])
    return columns


def describe_entity(entity: Entity, words: Sequence[str]) -> dict[str, Any]:
    """An entity as predictions have it: its type, its place among the words of the sentence, and its text."""
    end = entity.last + 1
    return {"type": entity.kind, "start": entity.first, "end": end, "text": " ".join(words[entity.first : end])}
