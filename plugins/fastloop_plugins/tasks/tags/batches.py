"""Sentences of tagged words: the model section of ``token-classification``, their token ids, samples and batches.

In a batch, a sentence that is too long becomes several rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Problem, RecipeError
from fastloop.errors import DataError
from fastloop.problem import agree, counted, counted_of
from fastloop_plugins._mapped import GrowingArray, cumsum, flat, row_spans, spans, zeros
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.tasks.tags.words import encode_rows
from fastloop_plugins.text.batches import Ragged
from fastloop_plugins.text.chunks import EmptyTexts
from fastloop_plugins.text.samples import show_tokens, split_rows
from fastloop_plugins.text.sequences import Sequences
from fastloop_plugins.text.streaming.rows import name_row_errors
from fastloop_plugins.text.task import AutoClassModel

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from fastloop.recipe import Recipe
    from fastloop_plugins.rows.index import Row, RowName
    from fastloop_plugins.rows.table import Bad
    from fastloop_plugins.tasks.shared.losses import ClassLoss
    from fastloop_plugins.tasks.tags.data import TagTextData
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

EXAMPLES = "bert, distilbert, roberta, deberta-v2, modernbert or xlm-roberta"
"""Architectures for messages."""


class TagModel(AutoClassModel):
    """The ``model`` section, with a tokenizer for words.

    Args:
        data: In inference, its ``classes`` become those of the model.
    """

    head = "ForTokenClassification"
    label_key = "data.tags"

    def __init__(self, recipe: Recipe, data: TagTextData) -> None:
        super().__init__(recipe, "AutoModelForTokenClassification", description="token classifier", examples=EXAMPLES)
        self.data = data
        self.problem_type = None

    def load_tokenizer(self, max_length: int) -> None:
        super().load_tokenizer(max_length)
        if self.recipe.inference is not None:
            self.data.classes = self.class_names()
        if self.tokenizer is not None:
            self._separate_words()

    def finish_tokenizer(self, texts: Iterable[Any], types: bool = False) -> None:
        if self.trained is not None:
            super().finish_tokenizer(" ".join(["", *words]) for words, _ in texts)
            self._separate_words()

    def _separate_words(self) -> None:
        """Make a byte-level tokenizer put a space before the first word, too. So transformers reads words one by one
        (``is_split_into_words``) as it reads their text.

        Raises:
            RecipeError: The tokenizer does not map tokens to words.
        """
        from tokenizers.pre_tokenizers import ByteLevel

        if not self.tokenizer.is_fast:
            raise RecipeError(
                f"{type(self.tokenizer).__name__} does not map tokens to words.",
                code="unsupported-tokenizer",
                place=f"{self.where}.tokenizer",
                remedy="Use a fast tokenizer.",
            )
        pre_tokenizer = self.tokenizer.backend_tokenizer.pre_tokenizer
        if not isinstance(pre_tokenizer, ByteLevel) or pre_tokenizer.add_prefix_space:
            return
        if self.trained is None:
            self.tokenizer = self._pretrained_tokenizer(add_prefix_space=True)
            self._ensure_pad_token()
            self._add_new_tokens()
        pre_tokenizer.add_prefix_space = True
        self.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer

    def room(self, max_length: int) -> tuple[int, int]:
        """Tokens of a row for words, and its special tokens.

        Raises:
            RecipeError: There is no room.
        """
        special = sum(map(len, self.special))
        if max_length <= special:
            raise RecipeError(
                code="out-of-range",
                place=f"{self.recipe.where}: data.max_length",
                found=f"{max_length}, and a row has {special} special tokens",
                expected="more",
            )
        return max_length - special, special

    @cached_property
    def special(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids of the tokens before and after a sentence. Read it when the tokenizer is complete."""
        encoded = self.tokenizer("a", return_special_tokens_mask=True)
        ids = encoded["input_ids"]
        is_special = encoded["special_tokens_mask"]
        words = len(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        before = is_special.index(0) if 0 in is_special else len(ids) - words
        return np.array(ids[:before], dtype=np.int32), np.array(ids[before + words :], dtype=np.int32)


class TaggedSentences(Sequences):
    """A map-style dataset of sentences. A sample has ``input_ids`` and ``targets``, both (tokens,) int32, and ``row``,
    its index. ``tasks.tags.words`` defines the targets.

    Args:
        numbers: Id and target of each token of all sentences, end to end: ``[id, target, id, target, ...]``.
        lengths: How many of these numbers each sentence has: twice its tokens.
        room: Tokens of a row at most, without special tokens. A longer word keeps its first tokens.
        special: Number of special tokens of a row.
        divides_long: Make each window of a long sentence a sample of its own.
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
        divides_long: bool = False,
        words: list[list[str]] | None = None,
    ) -> None:
        tokens, counts, self.cut = cut_words(numbers.reshape(-1, 2), lengths, room)
        ids = tokens[:, 0]
        targets = tokens[:, 1]
        self.long = sum(int((counts[span] > room).sum()) for span in spans(len(counts)))
        if divides_long and self.long:
            counts = divide_long(targets, counts, room)
        super().__init__(ids, counts, targets)
        self.counts = counts
        self.words = words
        self.lengths = np.add(counts, special, out=zeros(len(counts), np.int64))

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.labels is not None
        tokens = slice(self.ends[index] - self.counts[index], self.ends[index])
        return {"input_ids": self.ids[tokens], "targets": self.labels[tokens], "row": index}

    def tags(self, ids: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """The tags of the words of some samples, end to end.

        Args:
            ids: Numbers of the samples; None: all.
        """
        assert self.labels is not None
        is_chosen = np.ones(len(self.counts), dtype=bool)
        if ids is not None:
            is_chosen[:] = False
            is_chosen[ids] = True
        of_chosen = np.repeat(is_chosen, self.counts)  # for each token
        tags = GrowingArray(np.int64)
        for span in spans(len(self.labels)):
            labels = self.labels[span]
            tags.extend(labels[(labels >= 0) & of_chosen[span]])
        return tags.finish()

    def warn(self, name: str, total: int) -> None:
        """Log how many of ``total`` sentences are long, and how many words are cut."""
        if self.long:
            logger.warning(
                Problem(
                    f"{counted_of(self.long, total, 'sentences')} {agree(self.long, 'does', 'do')} not fit into "
                    "data.max_length. "
                    "They are divided between words, and the model reads each part by itself. Every word keeps its "
                    "tag.",
                    code="sentences-divided",
                    place=f"data: {name}",
                )
            )
        if self.cut:
            logger.warning(
                Problem(
                    f"only the first tokens are read of {counted(self.cut, 'word')} beyond data.max_length.",
                    code="words-cut",
                    place=f"data: {name}",
                )
            )


def renumber_tags(numbers: NDArray[np.int32], order: Sequence[int]) -> NDArray[np.int32]:
    """The ``numbers`` of ``TaggedSentences`` with other ids of the tags. The sentences keep their order.

    Args:
        order: Id of a tag -> its other id.
    """
    if list(order) == list(range(len(order))):
        return numbers
    table = np.array(order, dtype=np.int32)
    ordered = zeros(len(numbers), np.int32)
    pairs = numbers.reshape(-1, 2)  # id and target of each token
    ordered_pairs = ordered.reshape(-1, 2)
    for span in spans(len(pairs)):
        targets = pairs[span, 1]
        is_first = targets >= 0  # the first token of a word
        tags = table[np.where(is_first, targets, ~targets)]
        ordered_pairs[span, 0] = pairs[span, 0]
        ordered_pairs[span, 1] = np.where(is_first, tags, ~tags)
    return ordered


def cut_words(
    tokens: NDArray[np.int32], lengths: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
    """Keep at most ``room`` tokens of each word. Returns the tokens, their number in each sentence, and the number of
    shortened words.

    Args:
        tokens: (tokens, 2) id and target of each.
        lengths: Twice the number of tokens of each sentence.
    """
    counts = np.floor_divide(lengths, 2, out=zeros(len(lengths), np.int64))
    ends = cumsum(counts)
    cut = 0
    for rows, places in row_spans(ends):
        cut += int((_word_sizes(tokens[places, 1], counts[rows]) > room).sum())
    if not cut:
        return tokens, counts, 0
    kept_tokens = GrowingArray(np.int32, 2)
    kept_counts = GrowingArray(np.int64)
    for rows, places in row_spans(ends):
        sizes = _word_sizes(tokens[places, 1], counts[rows])
        # words of 1, 3 and 2 tokens begin at [0, 1, 1, 1, 4, 4], so the place of each token in its word is
        # [0, 0, 1, 2, 0, 1]
        begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
        is_kept = np.arange(len(begins)) - begins < room
        kept_tokens.extend(tokens[places][is_kept])
        first_tokens = np.cumsum(counts[rows]) - counts[rows]
        kept_counts.extend(np.add.reduceat(is_kept, first_tokens, dtype=np.int64))
    return kept_tokens.finish(), kept_counts.finish(), cut


def _word_sizes(targets: NDArray[np.int32], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """(words,) the number of tokens of each word of some sentences. The token of a space counts to the word before it,
    and at the beginning of a sentence as a word.

    For targets ``[2, ~2, 0, 1, ~1]`` and counts ``[3, 2]``, words begin at ``[0, 2, 3]``, and their sizes are
    ``[2, 1, 2]``. They are the same for ``[2, ~0, 0, 1, ~1]``, whose second token is the space before the second word.

    Args:
        targets: Those of all tokens.
        counts: Tokens of each sentence.
    """
    first_tokens = np.cumsum(counts) - counts  # a sentence may begin with a token that begins no word
    begins = np.union1d(first_tokens, np.flatnonzero(targets >= 0))
    return np.diff(begins, append=len(targets))


def divide_long(targets: NDArray[np.int32], counts: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """The number of tokens of each row, if sentences with more than ``room`` tokens become several rows.

    Args:
        targets: Those of all tokens.
        counts: Tokens of each sentence.
    """
    divided = GrowingArray(np.int64)
    for rows, places in row_spans(cumsum(counts)):
        part = targets[places]
        start = 0
        sizes = list[int]()
        for count in counts[rows].tolist():
            sizes += windows(part[start : start + count], room)
            start += count
        divided.extend(np.array(sizes, np.int64))
    return divided.finish()


def windows(targets: NDArray[np.int32], room: int) -> list[int]:
    """The number of tokens of each row of a sentence: as many whole words as fit into ``room`` tokens."""
    if len(targets) <= room:
        return [len(targets)]
    sizes = list[int]()
    begin = 0
    end = 0
    for boundary in [*np.flatnonzero(targets >= 0).tolist(), len(targets)]:
        if boundary - begin > room:
            sizes.append(end - begin)
            begin = end
        end = boundary
    return [*sizes, end - begin]


def batch_sentences(
    samples: list[dict[str, Any]], model: TagModel, max_length: int, loss: ClassLoss, every: bool
) -> Ragged:
    """The batch of some sentences, without padding and without a mask.

    It has three int64 tensors beside the model's inputs. ``labels`` (rows, tokens) holds the tag or -100.
    ``sentences`` (rows, tokens) holds the number of the sentence at the first token of each word, else -1. ``rows``
    (sentences,) holds each sentence's place in its dataset. The ``loss_weight`` is the number of labelled tokens, or
    their weight.

    Args:
        every: Whether all tokens of a word have its tag as their target, or only the first one.
    """
    import torch

    before, after = model.special
    room, _ = model.room(max_length)
    ids = list[Any]()
    labels = list[Any]()
    sentences = list[Any]()

    def framed(values: NDArray[Any], fill: int) -> NDArray[Any]:
        """Values of a row's words, and ``fill`` for its special tokens."""
        return np.pad(values, (len(before), len(after)), constant_values=fill)

    for number, sample in enumerate(samples):
        start = 0
        for size in windows(sample["targets"], room):
            targets = sample["targets"][start : start + size]
            ids.append(np.concatenate([before, sample["input_ids"][start : start + size], after]))
            # A word's first token has its tag as target, 2, and its other tokens have ~2 == -3: below 0 in any case.
            other_tokens = ~targets if every else IGNORED
            labels.append(framed(np.where(targets >= 0, targets, other_tokens), IGNORED))
            sentences.append(framed(np.where(targets >= 0, number, -1), -1))
            start += size
    every_label = np.concatenate(labels)
    if loss.weights is None:
        weight = float((every_label != IGNORED).sum())
    else:
        weight = loss.weight_of(torch.from_numpy(every_label))
    columns = {
        "input_ids": (ids, model.tokenizer.pad_token_id), "labels": (labels, IGNORED), "sentences": (sentences, -1)
    }  # fmt: skip
    rows = torch.tensor([sample["row"] for sample in samples])
    return Ragged(columns=columns, fixed={"rows": rows}, loss_weight=weight, tokens=sum(map(len, ids)))


def copy_logits(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook: replace the logits by a copy. A linear layer with a bias returns a view, and FSDP warns of outputs
    that are views."""
    output["logits"] = output["logits"].clone()
    return output


def word_logits_and_tags(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits and tags of the words of a batch, with a row of zeros and the tag -100 after each sentence.

    Args:
        logits: (rows, tokens, tags).

    Returns:
        Logits (words + sentences, tags), and tags (words + sentences,) int64.
    """
    is_word = batch["sentences"] >= 0
    # Sentences are in order, so each word moves by the number of sentences before it. Words of the sentences [0, 0, 1]
    # get the rows [0, 1, 3]; rows 2 and 4 end the sentences.
    sentences = batch["sentences"][is_word]
    words = sentences.new_ones(len(sentences)).cumsum(0) - 1  # [0, 1, 2]
    places = sentences + words
    size = len(sentences) + len(batch["rows"])
    word_logits = logits.new_zeros(size, logits.shape[-1]).index_copy(0, places, logits[is_word])
    tags = sentences.new_full((size,), IGNORED).index_copy(0, places, batch["labels"][is_word])
    return word_logits, tags


class TagRows:
    """Samples of ``token-classification``: one a sentence. The collator divides a long sentence into several rows of a
    batch.

    A sentence without words has no effect. If a micro-batch has only such sentences, ``spare`` replaces the first.

    Args:
        table: Tag in the files -> its id.
    """

    def __init__(self, data: TagTextData, model: TagModel, table: Mapping[Any, int], spare: Mapping[str, Any]) -> None:
        self.data = data
        self.tokenizer = model.tokenizer
        self.table = table
        self.room, self.special = model.room(data.options.max_length)
        self.spare = {**spare, "input_ids": spare["input_ids"].copy(), "targets": spare["targets"].copy()}

    def __call__(self, rows: list[Row], names: list[RowName]) -> list[dict[str, Any]]:
        sentences = self.data.parse_rows(rows, names)
        for (_, tags), name in zip(sentences, names, strict=True):
            new = next((tag for tag in tags if tag not in self.table), None)
            if new is not None:
                raise DataError(
                    f"found the tag {new!r} (data.tags), which was not there when the run started.",
                    code="data-changed",
                    place=str(name),
                    remedy="Start it again.",
                )
        texts = [(words, [self.table[tag] for tag in tags]) for words, tags in sentences]

        def bad(index: int, problem: str) -> None:
            raise DataError(problem, code="invalid-row", place=str(names[index]))

        encoded = name_row_errors(encode_rows(self.tokenizer, texts), bad)
        dataset = TaggedSentences(*flat(encoded), self.room, self.special)
        empty = np.empty(0, np.int32)
        samples = []
        for index, (words, _) in enumerate(sentences):
            if words:
                samples.append(dataset[index])
            else:
                samples.append({"input_ids": empty, "targets": empty, "row": index})
        if not any(words for words, _ in sentences):
            samples[0] = self.spare
        return samples


def tagged_samples(data: TagTextData, model: TagModel, split: Split, every: bool) -> Iterator[Sample]:
    """Sentences with a tag for each word.

    Args:
        every: Whether all tokens of a word have its tag as their target, and not only the first.
    """
    before, after = model.special
    for (words, _), numbers in zip(split.texts, split_rows(split), strict=True):
        ids, targets = numbers.reshape(-1, 2).T
        tags_of_words: list[str] = []
        shown_targets: list[str | None] = [None] * len(before)
        for target in targets.tolist():
            is_first = target >= 0  # the first token of a word
            tag = data.classes[target if is_first else ~target]
            if is_first:
                tags_of_words.append(tag)
            shown_targets.append(tag if is_first or every else None)
        shown_targets += [None] * len(after)
        tokens = show_tokens(model.tokenizer, [*before, *ids, *after], shown_targets)
        tagged_words = [f"{word}/{tag}" for word, tag in zip(words, tags_of_words, strict=True)]
        yield [("words", " ".join(tagged_words)), ("tokens", tokens)]


def encode_sentences(words: list[list[str]], model: TagModel, max_length: int, bad: Bad) -> TaggedSentences:
    """Sentences without tags as a dataset. Its tags are 0.

    Args:
        bad: Called with the number and the problem of a sentence that cannot be encoded.
    """
    rows = [(sentence, [0] * len(sentence)) for sentence in words]
    encoded = name_row_errors(encode_rows(model.tokenizer, rows), bad)
    return TaggedSentences(*flat(encoded), *model.room(max_length), words=words)


def sentence_chunks(
    chunks: Iterable[tuple[list[list[str]], Bad]], model: TagModel, max_length: int
) -> Iterator[TaggedSentences]:
    """Sentences to predict; see ``TagTextData.sentences``. At the end, logs how many had no words, and how many were
    longer than a row of the model.

    Raises:
        RecipeError: A sentence cannot be encoded.
    """
    last = None
    empty = EmptyTexts()
    long = 0
    cut = 0
    for words, bad in chunks:
        last = encode_sentences(words, model, max_length, bad)
        long += last.long
        cut += last.cut
        for sentence in words:
            empty.add(" ".join(sentence))
        yield last
    empty.warn("sentences")
    if last is not None:
        last.long = long
        last.cut = cut
        last.warn("predict", empty.total)
