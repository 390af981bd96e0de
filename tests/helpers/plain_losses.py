"""The loss of each task by torch alone: of one sample, without batches and padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from plain_data import CLASSES, IGNORED, TAGS, VOCABULARY, class_of_image, ids_of, images, rows, targets_of_row
from torch import Tensor

BLOCK = 12
"""Tokens of a block of texts."""

Terms = tuple[Tensor, float]
"""The loss of a sample, not divided by anything, and its weight."""


def no_terms() -> Terms:
    return torch.zeros(()), 0.0


def add(one: Terms, other: Terms) -> Terms:
    return one[0] + other[0], one[1] + other[1]


def entropy(
    scores: Tensor, target: int, weights: Sequence[float] | None = None, smoothing: float = 0.0, gamma: float = 0.0
) -> Terms:
    """Cross entropy of scores (C,): smoothed as in Szegedy et al., 2016, or focal as in Lin et al., 2017."""
    log = scores - scores.exp().sum().log()
    of_classes = torch.ones(len(scores)) if weights is None else torch.tensor(weights)
    weight = float(of_classes[target])
    right = -weight * (1 - log[target].exp()) ** gamma * log[target]
    spread = -(of_classes * log).sum() / len(scores)
    return (1 - smoothing) * right + smoothing * spread, weight


def tensor(ids: Sequence[int]) -> Tensor:
    """A batch of one row."""
    return torch.tensor([ids])


Loss = Callable[[Any, int], Terms]
"""``(model, index of a sample) -> terms``."""


def scores_of_text(model: Any, index: int) -> Tensor:
    """The outputs for a text: (C,) or (1,)."""
    scores: Tensor = model(input_ids=tensor(ids_of(rows()[index]["text"], "[CLS]", "[SEP]"))).logits[0]
    return scores


def of_class(**options: Any) -> Loss:
    """The class of a text."""

    def terms(model: Any, index: int) -> Terms:
        scores = scores_of_text(model, index)
        return entropy(scores, CLASSES.index(rows()[index]["class"]), **options)

    return terms


def of_names(model: Any, index: int) -> Terms:
    """Any number of classes of a text: the mean over classes of -log of the probability of the right answer."""
    row = rows()[index]
    scores = scores_of_text(model, index)
    loss = torch.zeros(())
    for number, name in enumerate(CLASSES):
        probability = 1 / (1 + (-scores[number]).exp())
        loss = loss - (probability if name in row["names"] else 1 - probability).log()
    return loss / len(CLASSES), 1.0


def of_number(model: Any, index: int) -> Terms:
    """The number of a text."""
    value = scores_of_text(model, index)[0]
    return (value - rows()[index]["number"]) ** 2, 1.0


def ids_of_words(index: int) -> list[list[int]]:
    """The ids of each word of a sentence."""
    return [ids_of(word) for word in rows()[index]["words"]]


def scores_of_tags(model: Any, index: int) -> Tensor:
    """The scores of tags at each token, also at the special tokens at both ends: (tokens, C)."""
    ids = [VOCABULARY["[CLS]"]]
    for of_word in ids_of_words(index):
        ids += of_word
    ids.append(VOCABULARY["[SEP]"])
    scores: Tensor = model(input_ids=tensor(ids)).logits[0]
    return scores


def of_tags(every: bool = False, **options: Any) -> Loss:
    """The tags of words, at their first token or at every one."""

    def terms(model: Any, index: int) -> Terms:
        scores = scores_of_tags(model, index)
        sum_of = no_terms()
        place = 1
        for of_word, tag in zip(ids_of_words(index), rows()[index]["tags"], strict=True):
            targets = len(of_word) if every else 1
            for row in scores[place : place + targets]:
                sum_of = add(sum_of, entropy(row, TAGS.index(tag), **options))
            place += len(of_word)
        return sum_of

    return terms


def of_next_tokens(model: Any, ids: Sequence[int], first: int, **options: Any) -> Terms:
    """The tokens from ``first`` on, each predicted from those before it."""
    scores = model(input_ids=tensor(ids)).logits[0]
    sum_of = no_terms()
    for place in range(first, len(ids)):
        sum_of = add(sum_of, entropy(scores[place - 1], ids[place], **options))
    return sum_of


@cache
def blocks() -> list[list[int]]:
    """The texts end to end, each with its end token, in blocks."""
    stream: list[int] = []
    for row in rows():
        stream += ids_of(row["text"], end="</s>")
    return [stream[start : start + BLOCK] for start in range(0, len(stream), BLOCK)]


def of_block(model: Any, index: int) -> Terms:
    return of_next_tokens(model, blocks()[index], 1)


def of_answer(model: Any, index: int) -> Terms:
    row = rows()[index]
    prompt = ids_of(row["prompt"])
    return of_next_tokens(model, [*prompt, *ids_of(row["answer"], end="</s>")], len(prompt))


def of_text(**options: Any) -> Loss:
    return lambda model, index: of_next_tokens(model, ids_of(rows()[index]["text"], end="</s>"), 1, **options)


def scores_of_target(model: Any, index: int, begin: str, start: str) -> tuple[Tensor, list[int]]:
    """The scores of the tokens of a target, (tokens, V), and the target. The arguments are those of ``of_target``."""
    row = rows()[index]
    target = ids_of(row["target"], begin, "</s>")
    first = target[-1] if start == "last" else VOCABULARY[start]
    read = tensor([first, *target[:-1]])
    output = model(input_ids=tensor(ids_of(row["text"], begin, "</s>")), decoder_input_ids=read)
    return output.logits[0], target


def of_target(begin: str, start: str, **options: Any) -> Loss:
    """The target of a text.

    Args:
        begin: The token at the beginning of texts and targets, or "".
        start: The token that the decoder reads first. "last": that of the target.
    """

    def terms(model: Any, index: int) -> Terms:
        scores, target = scores_of_target(model, index, begin, start)
        sum_of = no_terms()
        for row, token in zip(scores, target, strict=True):
            sum_of = add(sum_of, entropy(row, token, **options))
        return sum_of

    return terms


def of_masked(model: Any, index: int) -> Terms:
    """The masked tokens of a text; a short one has none."""
    scores = model(input_ids=tensor(ids_of(rows()[index]["text"], "[CLS]", "[SEP]"))).logits[0]
    sum_of = no_terms()
    for place, target in enumerate(targets_of_row(index)):
        if target != IGNORED:
            sum_of = add(sum_of, entropy(scores[place], target))
    return sum_of


def scores_of_image(model: Any, index: int) -> Tensor:
    """The outputs for an image, (C,)."""
    pixels = torch.tensor(images()[index]).permute(2, 0, 1) / 255
    mean = torch.tensor([0.5, 0.4, 0.3])[:, None, None]
    deviation = torch.tensor([0.2, 0.3, 0.4])[:, None, None]
    scores: Tensor = model(pixel_values=((pixels - mean) / deviation)[None]).logits[0]
    return scores


def of_image(**options: Any) -> Loss:
    """The class of an image."""
    return lambda model, index: entropy(scores_of_image(model, index), class_of_image(index), **options)
