"""Sentences of tagged words as samples, and their collator.

A sentence that is too long becomes several rows of a batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.errors import DataError
from fastloop_plugins._cache import flat
from fastloop_plugins.tasks.heads.batches import Collator
from fastloop_plugins.tasks.tags.tokens import encode_rows
from fastloop_plugins.text.batches import Ragged, Sequences
from fastloop_plugins.text.samples import show_tokens, split_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fastloop_plugins.rows.index import Row
    from fastloop_plugins.tasks.heads.losses import ClassLoss
    from fastloop_plugins.tasks.tags.data import TagTextData
    from fastloop_plugins.tasks.tags.entities import Scheme
    from fastloop_plugins.tasks.tags.tokens import TagModel
    from fastloop_plugins.text.batches import Width
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

CHECKED = 2000
"""Sentences of a split whose tags are compared with the scheme, in less than a second."""

IGNORED = -100
"""Target that the loss and the metrics ignore."""
OWN = ("labels", "sentences", "rows")
"""Inputs of a batch that are not the model's."""


class TaggedSentences(Sequences):
    """A map-style dataset of sentences. A sample has ``input_ids`` and ``targets``, both (tokens,) int32, see
    ``tasks.tags.tokens``, and ``row``.

    Args:
        numbers: Ids and targets of all sentences, in turn, end to end.
        lengths: Numbers of every sentence.
        room: Tokens of a row at most, without special tokens. A longer word keeps its first tokens.
        special: Number of special tokens of a row.
        split: Make each window of a long sentence a sample of its own.
        order: The data's id of a tag -> the model's id. Empty: they are equal.
        words: The words of each sentence, for predictions.

    Attributes:
        cut: Words with more tokens than ``room``.
        long: Sentences with more tokens than ``room``.
    """

    def __init__(
        self,
        numbers: NDArray[np.int32],
        lengths: NDArray[np.int64],
        room: int,
        special: int,
        split: bool = False,
        order: Sequence[int] = (),
        words: list[list[str]] | None = None,
    ) -> None:
        found, counts, self.cut = cut_words(numbers.reshape(-1, 2), lengths // 2, room)
        self.long = int((counts > room).sum())
        if split and self.long:
            ends = np.cumsum(counts)
            parts = [windows(found[end - count : end, 1], room) for end, count in zip(ends, counts, strict=True)]
            counts = np.array([size for sizes in parts for size in sizes], dtype=np.int64)
        super().__init__(found[:, 0], counts, reordered(found[:, 1], order))
        self.counts, self.lengths, self.words = counts, counts + special, words

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.labels is not None
        tokens = slice(self.ends[index] - self.counts[index], self.ends[index])
        return {"input_ids": self.ids[tokens], "targets": self.labels[tokens], "row": index}

    def tags(self) -> NDArray[np.int64]:
        """The tags of all words, end to end."""
        assert self.labels is not None
        return self.labels[self.labels >= 0].astype(np.int64)

    def warn(self, name: str, total: int) -> None:
        """Log how many of ``total`` sentences are long, and how many words are cut."""
        if self.long:
            logger.warning(
                "data: %s: %d of %d sentences do not fit into data.max_length. They are divided between words, and the "
                "model reads each part by itself. Every word keeps its tag", name, self.long, total,
            )  # fmt: skip
        if self.cut:
            logger.warning(
                "data: %s: %d words do not fit into data.max_length: only their first tokens are read", name, self.cut
            )


def tags_of(numbers: NDArray[np.int32], lengths: NDArray[np.int64]) -> list[list[int]]:
    """The tag of each word of the first sentences.

    Args:
        numbers: Ids and targets of all sentences, in turn, end to end.
        lengths: Numbers of each of these sentences.
    """
    targets = numbers[1 : lengths.sum() : 2]
    return [part[part >= 0].tolist() for part in np.split(targets, np.cumsum(lengths // 2)[:-1])]


def reordered(targets: NDArray[np.int32], order: Sequence[int]) -> NDArray[np.int32]:
    """Targets with other ids of the tags."""
    if list(order) == list(range(len(order))):
        return targets
    table, first = np.array(order, dtype=np.int32), targets >= 0
    ids = table[np.where(first, targets, ~targets)]
    return np.where(first, ids, ~ids)


def cut_words(
    found: NDArray[np.int32], counts: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Keep at most ``room`` tokens of each word. Returns the tokens, their number in each sentence, and the number of
    shortened words."""
    firsts = np.cumsum(counts) - counts
    begins = np.union1d(firsts, np.flatnonzero(found[:, 1] >= 0))
    sizes = np.diff(begins, append=len(found))
    if not (sizes > room).any():
        return found, counts, 0
    kept = np.arange(len(found)) - np.repeat(begins, sizes) < room
    return found[kept], np.add.reduceat(kept, firsts, dtype=np.int64), int((sizes > room).sum())


def windows(targets: NDArray[np.int32], room: int) -> list[int]:
    """The number of tokens of each row of a sentence: as many whole words as fit into ``room`` tokens."""
    if len(targets) <= room:
        return [len(targets)]
    found, begin, end = list[int](), 0, 0
    for boundary in [*np.flatnonzero(targets >= 0).tolist(), len(targets)]:
        if boundary - begin > room:
            found.append(end - begin)
            begin = end
        end = boundary
    return [*found, end - begin]


class TagCollator(Collator):
    """Pads the rows of sentences.

    A batch has three int64 tensors beside the model's inputs. ``labels`` (rows, tokens) holds the tag or -100.
    ``sentences`` (rows, tokens) holds the number of the sentence at the first token of each word, else -1. ``rows``
    (sentences,) holds each sentence's place in its dataset.

    Args:
        special: Ids of the tokens before and after a sentence.
        all_tokens: Whether all tokens of a word have its tag as their target, or only the first one.
    """

    def __init__(
        self, pad_token_id: int, width: Width, loss: ClassLoss, special: tuple[list[int], list[int]], all_tokens: bool
    ) -> None:
        super().__init__(pad_token_id, width, loss)
        self.special = tuple(np.array(ids, dtype=np.int32) for ids in special)
        self.all_tokens, self.room = all_tokens, width.max_length - sum(map(len, special))

    def build_ragged(self, samples: list[dict[str, Any]]) -> Ragged:
        """The batch without padding and without a mask. Its ``loss_weight`` is the number of labelled tokens, or their
        weight."""
        import torch

        before, after = self.special
        ids, labels, sentences = list[Any](), list[Any](), list[Any]()
        for number, sample in enumerate(samples):
            start = 0
            for size in windows(sample["targets"], self.room):
                targets = sample["targets"][start : start + size]
                ids.append(np.concatenate([before, sample["input_ids"][start : start + size], after]))
                labels.append(
                    self._framed(np.where(targets >= 0, targets, ~targets if self.all_tokens else IGNORED), IGNORED)
                )
                sentences.append(self._framed(np.where(targets >= 0, number, -1), -1))
                start += size
        every = np.concatenate(labels)
        weight = (every != IGNORED).sum() if self.loss.weights is None else self.loss.weight_of(torch.from_numpy(every))
        columns = {"input_ids": (ids, self.pad_token_id), "labels": (labels, IGNORED), "sentences": (sentences, -1)}
        rows = torch.tensor([sample["row"] for sample in samples])
        return Ragged(columns=columns, fixed={"rows": rows}, loss_weight=float(weight), tokens=sum(map(len, ids)))

    def _framed(self, values: NDArray[Any], fill: int) -> NDArray[Any]:
        """Values of a row's words, and ``fill`` for its special tokens."""
        before, after = self.special
        return np.pad(values, (len(before), len(after)), constant_values=fill)


def copy_logits(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook: replace the logits by a copy. A linear layer with a bias returns a view, and FSDP warns of outputs
    that are views."""
    output["logits"] = output["logits"].clone()
    return output


def word_scores(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits and tags of the words of a batch, with a row of zeros and the tag -100 after each sentence.

    Args:
        logits: (rows, tokens, tags).

    Returns:
        Logits (words + sentences, tags), and tags (words + sentences,) int64.
    """
    found = batch["sentences"] >= 0
    # sentences are in order, so each word moves by the number of sentences before it
    number = batch["sentences"][found]
    places, size = number + number.new_ones(len(number)).cumsum(0) - 1, len(number) + len(batch["rows"])
    scores = logits.new_zeros(size, logits.shape[-1]).index_copy(0, places, logits[found])
    return scores, number.new_full((size,), IGNORED).index_copy(0, places, batch["labels"][found])


def check_scheme(data: Any, name: str, split: Any, scheme: Scheme | None, key: str) -> None:
    """Warn about tags of a split that do not follow the scheme of the recipe, which ``key`` names."""
    from fastloop_plugins.tasks.tags.entities import describe_misfit, misfit

    if scheme is None or misfit(data.classes, scheme) is not None:
        return
    sentences = [[data.classes[tag] for tag in tags] for tags in tags_of(split.ids, split.lengths[:CHECKED])]
    if message := describe_misfit(sentences, scheme, key):
        logger.warning("data: %s: %s", name, message)


class TagRows:
    """Samples of ``token-classification``: one a sentence. The collator divides a long sentence into several rows of a
    batch.

    A sentence without words has no effect. If a micro-batch has only such sentences, ``spare`` replaces the first.

    Args:
        table: Tag in the files -> the data's id of it.
        order: That id -> the model's id.
    """

    def __init__(
        self,
        data: TagTextData,
        model: TagModel,
        table: Mapping[Any, int],
        order: Sequence[int],
        spare: Mapping[str, Any],
    ) -> None:
        self.data, self.tokenizer, self.table, self.order = data, model.tokenizer, table, order
        self.room, self.special = model.room(data.options.max_length)
        self.spare = {**spare, "input_ids": spare["input_ids"].copy(), "targets": spare["targets"].copy()}

    def __call__(self, rows: list[Row], names: list[str]) -> list[dict[str, Any]]:
        sentences = self.data.parse_rows(rows, names)
        for (_, tags), name in zip(sentences, names, strict=True):
            if (new := next((tag for tag in tags if tag not in self.table), None)) is not None:
                raise DataError(
                    f"{name}: found the tag {new!r} (data.tags), which was not there when the run started. "
                    "Start it again."
                )
        texts = [(words, [self.table[tag] for tag in tags]) for words, tags in sentences]
        found = TaggedSentences(
            *flat(encode_rows(self.tokenizer, texts, [], {})), self.room, self.special, order=self.order
        )
        empty = np.empty(0, np.int32)
        samples = [
            found[index] if words else {"input_ids": empty, "targets": empty, "row": index}
            for index, (words, _) in enumerate(sentences)
        ]
        if not any(words for words, _ in sentences):
            samples[0] = self.spare
        return samples


def tagged_samples(data: TagTextData, model: TagModel, split: Split, every: bool) -> Iterator[Sample]:
    """Sentences with a tag for each word.

    Args:
        every: Whether all tokens of a word have its tag as their target, and not only the first.
    """
    before, after = model.special_tokens()
    for row, numbers in zip(split.texts, split_rows(split), strict=True):
        words, tags = row
        ids, found = numbers.reshape(-1, 2).T
        names = [data.classes[tag] if tag >= 0 else data.classes[~tag] if every else None for tag in found.tolist()]
        targets = [*(None for _ in before), *names, *(None for _ in after)]
        tokens = show_tokens(model.tokenizer, [*before, *ids, *after], targets)
        pairs = " ".join(f"{word}/{data.classes[tag]}" for word, tag in zip(words, tags, strict=True))
        yield [("words", pairs), ("tokens", tokens)]
