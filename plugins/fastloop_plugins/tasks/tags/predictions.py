"""Sentences to predict, and the columns of their predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from fastloop_plugins._cache import flat
from fastloop_plugins.tasks.tags.batches import IGNORED, TaggedSentences
from fastloop_plugins.tasks.tags.entities import find_entities, misfit
from fastloop_plugins.tasks.tags.tokens import encode_rows

if TYPE_CHECKING:
    from fastloop import Output
    from fastloop_plugins.tasks.tags.data import TagTextData
    from fastloop_plugins.tasks.tags.entities import Scheme
    from fastloop_plugins.tasks.tags.tokens import TagModel


def encode_sentences(words: list[list[str]], model: TagModel, max_length: int) -> TaggedSentences:
    """Sentences without tags as a dataset. Its tags are 0."""
    rows = [(sentence, [0] * len(sentence)) for sentence in words]
    return TaggedSentences(*flat(encode_rows(model.tokenizer, rows, [], {})), *model.room(max_length), words=words)


def sentence_chunks(
    sentences: Iterable[list[str]], start: int, size: int, model: TagModel, max_length: int
) -> Iterator[TaggedSentences]:
    """The sentences from row ``start``, ``size`` at a time. At the end, logs how many were longer than a row of the
    model."""
    rest, total, last = islice(sentences, start, None), 0, None
    long = cut = 0
    while words := list(islice(rest, size)):
        last = encode_sentences(words, model, max_length)
        long, cut, total = long + last.long, cut + last.cut, total + len(words)
        yield last
    if last is not None:
        last.long, last.cut = long, cut
        last.warn("predict", total)


def split_sentences(data: TagTextData, split: str) -> Iterator[list[str]]:
    """The words of each sentence of a split."""
    yield from data.load()[split].columns["words"]


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
