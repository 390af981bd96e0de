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


def of_class(**options: Any) -> Loss:
    """The class of a text."""

    def terms(model: Any, index: int) -> Terms:
        row = rows()[index]
        scores = model(input_ids=tensor(ids_of(row["text"], "[CLS]", "[SEP]"))).logits[0]
        return entropy(scores, CLASSES.index(row["class"]), **options)

    return terms


def of_names(model: Any, index: int) -> Terms:
    """Any number of classes of a text: the mean over classes of -log of the probability of the right answer."""
    row = rows()[index]
    scores = model(input_ids=tensor(ids_of(row["text"], "[CLS]", "[SEP]"))).logits[0]
    loss = torch.zeros(())
    for number, name in enumerate(CLASSES):
        probability = 1 / (1 + (-scores[number]).exp())
        loss = loss - (probability if name in row["names"] else 1 - probability).log()
    return loss / len(CLASSES), 1.0


def of_number(model: Any, index: int) -> Terms:
    """The number of a text."""
    row = rows()[index]
    value = model(input_ids=tensor(ids_of(row["text"], "[CLS]", "[SEP]"))).logits[0, 0]
    return (value - row["number"]) ** 2, 1.0


def of_tags(every: bool = False, **options: Any) -> Loss:
    """The tags of words, at their first token or at every one."""

    def terms(model: Any, index: int) -> Terms:
        row = rows()[index]
        ids = [VOCABULARY["[CLS]"]]
        targets = [IGNORED]
        for word, tag in zip(row["words"], row["tags"], strict=True):
            of_word = ids_of(word)
            ids += of_word
            number = TAGS.index(tag)
            targets += [number] + [number if every else IGNORED] * (len(of_word) - 1)
        ids.append(VOCABULARY["[SEP]"])
        scores = model(input_ids=tensor(ids)).logits[0]
        sum_of = no_terms()
        for place, target in enumerate(targets):
            if target != IGNORED:
                sum_of = add(sum_of, entropy(scores[place], target, **options))
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


def of_target(begin: str, start: str, **options: Any) -> Loss:
    """The target of a text.

    Args:
        begin: The token at the beginning of texts and targets, or "".
        start: The token that the decoder reads first. "last": that of the target.
    """

    def terms(model: Any, index: int) -> Terms:
        row = rows()[index]
        target = ids_of(row["target"], begin, "</s>")
        first = target[-1] if start == "last" else VOCABULARY[start]
        read = tensor([first, *target[:-1]])
        scores = model(input_ids=tensor(ids_of(row["text"], begin, "</s>")), decoder_input_ids=read).logits[0]
        sum_of = no_terms()
        for place, token in enumerate(target):
            sum_of = add(sum_of, entropy(scores[place], token, **options))
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


def of_image(**options: Any) -> Loss:
    def terms(model: Any, index: int) -> Terms:
        pixels = torch.tensor(images()[index]).permute(2, 0, 1) / 255
        mean = torch.tensor([0.5, 0.4, 0.3])[:, None, None]
        deviation = torch.tensor([0.2, 0.3, 0.4])[:, None, None]
        scores = model(pixel_values=((pixels - mean) / deviation)[None]).logits[0]
        return entropy(scores, class_of_image(index), **options)

    return terms
