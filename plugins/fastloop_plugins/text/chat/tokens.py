"""Rows of a language model as token ids, and its samples: in memory, streamed, and shown to users.

Ids of conversations and completions are kept as signed numbers, so that the cache of token ids holds both: ``id`` for a
token with a loss, ``~id`` (negative) for another.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Problem
from fastloop.problem import agree, counted_of
from fastloop_plugins._mapped import GrowingArray, flat, spans
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.text.batches import Ragged
from fastloop_plugins.text.chat.rows import Chat, text_of
from fastloop_plugins.text.chat.template import ChatRenderer, answer_end
from fastloop_plugins.text.encoding import encode
from fastloop_plugins.text.forbidden_targets import Target
from fastloop_plugins.text.samples import show_tokens, split_rows
from fastloop_plugins.text.sequences import Sequences
from fastloop_plugins.text.special_tokens import SpecialTokens, end_of, name_tokens, special_tokens
from fastloop_plugins.text.streaming.rows import StreamedRows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.rows.index import Row, RowName
    from fastloop_plugins.text.chat.data import LanguageTextData
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

PLAIN: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
"""The tokenizer's arguments for a text that gets its special tokens from ``text.special_tokens``."""
AT_ONCE = 2**20
"""Token ids to look at in a pass: the places of all tokens with a loss would take more memory than the ids."""
LONGEST_PROMPT = 64
"""Tokens of a prompt from a block of texts: some lines to read."""
STANDS_IN = "stands_in"
"""Key of a sample that stands in for one without a target: its loss has no weight."""
PROBED = 256
"""Rows to tokenize in full, to estimate how many are longer than a sample."""


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Any],
    arguments: Mapping[str, Any],
    renderer: ChatRenderer | None = None,
) -> Iterator[list[int]]:
    """Yield the ids of each row; signed unless it is a text. Texts, prompts and completions get the special tokens of
    ``text.special_tokens``, and conversations those of the chat template.

    Args:
        rows: Texts, the JSON of a ``Chat`` each, or prompts with their completions.
        arguments: ``form``, the option of ``data`` that names the column: text, messages or prompt; ``train_on``, as in
            the ``data`` section; for texts that are truncated, ``max_length``.
        renderer: Keeps what it finds out about a template, over several calls; None: a new one.

    Raises:
        RowError: See ``ChatRenderer.encode``.
    """
    special = special_tokens(tokenizer)
    if arguments["form"] == "text":
        size = arguments.get("max_length")
        options = PLAIN if size is None else PLAIN | {"truncation": True, "max_length": size}
        yield from map(special.complete, encode(tokenizer, rows, options))
        return
    is_streamed = renderer is not None  # only a stream gives the renderer with which it has encoded its first rows
    renderer = renderer or ChatRenderer(tokenizer, arguments["train_on"], counts_contents=True)
    merged = 0  # rows whose prompt ends inside a token
    first_merged = None
    for row in rows:
        if arguments["form"] == "messages":
            ids, mask = renderer.encode(Chat.loads(row))
            yield [token if trained else ~token for token, trained in zip(ids, mask, strict=True)]
        else:
            prompt, completion, are_joined = _encode_completion(tokenizer, special, *row)
            if not are_joined:
                merged += 1
                first_merged = first_merged or row
            yield [~token for token in prompt] + completion
    if first_merged is not None and not is_streamed:
        _warn_about_merged(merged, len(rows), *first_merged)


def _encode_completion(
    tokenizer: PreTrainedTokenizerBase, special: SpecialTokens, prompt: str, completion: str
) -> tuple[list[int], list[int], bool]:
    """The ids of a prompt and of its completion, and whether they are those of one text, as in TRL.

    They are unless the last token of the prompt is another one then: `predict` and users of the exported model continue
    the tokens of the prompt alone. A tokenizer of words, for example, has one token for "eat" and "s" together, and the
    ids of "eat" do not begin with it.
    """
    text = prompt + completion
    end = tokenizer.eos_token
    if end is not None and not completion.endswith(end):
        text += end
    prompt_ids, text_ids = tokenizer([prompt, text], **PLAIN)["input_ids"]
    alone = special.begin(prompt_ids)
    whole = special.complete(text_ids)
    if whole[: len(alone)] == alone:
        return alone, whole[len(alone) :], True
    return alone, special.finish(tokenizer(completion, **PLAIN)["input_ids"]), False


def _warn_about_merged(count: int, total: int, prompt: str, completion: str) -> None:
    """Log how many prompts are tokenized apart from their completions, and the first of them."""
    logger.warning(
        Problem(
            f"{counted_of(count, total, 'prompts')} {agree(count, 'ends', 'end')} inside a token of prompt and "
            f"completion together, such as {prompt[-20:]!r} before {completion[:20]!r}. They are tokenized apart, so "
            "that predictions continue the tokens of training.",
            code="token-across-parts",
            place="data",
            remedy=(
                "If the prompts end with a space, begin the completions with it instead: its tokens are "
                "then those of usual text."
            ),
        )
    )


def describe_special_tokens(tokenizer: PreTrainedTokenizerBase, form: str) -> str:
    """The special tokens of rows, for the log.

    Args:
        form: The option of ``data`` that names the column: text, messages or prompt.
    """
    special = special_tokens(tokenizer)
    begins = f"begins with {name_tokens(tokenizer, special.beginning)}"
    ends = f"ends with {name_tokens(tokenizer, special.end)}"
    if form == "text":
        return f"each text {begins} and {ends}" if special.beginning else f"each text {ends}"
    if form == "prompt":
        return f"each prompt {begins}, each completion {ends}" if special.beginning else f"each completion {ends}"
    end = answer_end(tokenizer)
    if end.next_turn:
        token = name_tokens(tokenizer, end.next_turn[0])
        return f"an answer ends with {token} of the next turn, which has a loss and is added after the last answer"
    if end.tokens:
        return f"the chat template writes all special tokens; an answer ends with {name_tokens(tokenizer, end.tokens)}"
    return "the chat template writes all special tokens"


class SequencesWithTargets(Sequences):
    """Rows of which some tokens have a loss. A sample has ``input_ids`` and ``targets``, both (tokens,) int32; a target
    is the next token, or -100 where that has no loss.

    Rows are cut at ``max_length`` and after their last token with a loss: no loss depends on later tokens.

    Args:
        ids: Signed ids of all rows, end to end: ``id``, or ``~id`` for a token without a loss.
        lengths: Tokens of every row.
        max_length: Tokens of a sample at most.
        drop: Drop rows in which no token has a loss; else their samples are empty.

    Attributes:
        cut: Rows longer than ``max_length``.
        dropped: Rows without a loss.
    """

    def __init__(self, ids: NDArray[np.int32], lengths: NDArray[np.int64], max_length: int, drop: bool = True) -> None:
        super().__init__(ids, lengths)
        ends = GrowingArray(np.int64)
        kept_lengths = GrowingArray(np.int64)
        self.cut = 0
        self.dropped = 0
        for span in spans(len(lengths)):
            starts = self.ends[span] - lengths[span]
            limits = starts + np.minimum(lengths[span], max_length)
            # rows [~5 ~6 7 ~8] and [~9 ~4] with starts [0, 4] and ends [3, 4]: samples of 3 tokens, and of none
            cut_ends = ends_of_losses(ids, starts, limits)
            has_loss = cut_ends > starts
            is_kept = has_loss | (not drop)
            ends.extend(cut_ends[is_kept])
            kept_lengths.extend((cut_ends - starts)[is_kept])
            self.cut += int((lengths[span] > max_length).sum())
            self.dropped += int((~has_loss).sum())
        self.ends = ends.finish()
        self.lengths = kept_lengths.finish()

    def __getitem__(self, index: int) -> dict[str, Any]:
        end = self.ends[index]
        row = self.ids[end - self.lengths[index] : end]
        targets = np.full_like(row, IGNORED)
        np.copyto(targets[:-1], row[1:], where=row[1:] >= 0)
        return {"input_ids": np.where(row < 0, ~row, row), "targets": targets}

    def warn(self, split: str, max_length: int) -> None:
        """Log how many rows are cut and dropped."""
        total = len(self) + self.dropped
        if self.cut:
            logger.warning(
                Problem(
                    f"{counted_of(self.cut, total, 'rows')} {agree(self.cut, 'is', 'are')} cut at {max_length} tokens "
                    "(data.max_length).",
                    code="texts-cut",
                    place=f"data: {split}",
                )
            )
        if self.dropped:
            logger.warning(
                Problem(
                    f"{counted_of(self.dropped, total, 'rows')} {agree(self.dropped, 'has', 'have')} no token with a "
                    f"loss, and {agree(self.dropped, 'is', 'are')} dropped.",
                    code="rows-left-out",
                    place=f"data: {split}",
                )
            )

    def rows_with(self, token: int) -> NDArray[np.int64]:
        """The samples that have this token with a loss."""
        starts = self.ends - self.lengths
        places = find_ids(self.ids, lambda part: part == token)  # without a loss, it would be negative
        rows = np.searchsorted(starts, places, side="right") - 1
        is_target = (rows >= 0) & (places > starts[rows]) & (places < self.ends[rows])
        return np.unique(rows[is_target])


def ends_of_losses(ids: NDArray[np.int32], starts: NDArray[np.int64], limits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where rows end after their last token with a loss: the place that follows it. A row without one ends where it
    starts. The first token of a row is no target, so it has no loss.

    For ids ``[~5, 6, ~7, ~8, 9]``, starts ``[0, 3, 4]`` and limits ``[3, 4, 5]``, it is ``[2, 3, 4]``: of three rows,
    the first one has a loss, at place 1.

    Args:
        ids: See ``SequencesWithTargets``.
        starts: Where each row begins. Rows are in order.
        limits: Where each row ends at the latest.
    """
    ends = np.empty(len(starts), np.int64)
    first = 0
    while first < len(starts):  # the next rows of AT_ONCE tokens together, or one longer row
        begin = starts[first]
        stop = int(np.searchsorted(limits, begin + AT_ONCE, side="right"))
        rows = slice(first, max(stop, first + 1))
        places = begin + np.flatnonzero(ids[begin : limits[rows.stop - 1]] >= 0)
        # the last place before each limit: with places [-1, 1, 3] and limits [3, 4], searchsorted finds [2, 3]
        places = np.concatenate([[-1], places])  # -1: no token before a limit has a loss
        last = places[np.searchsorted(places, limits[rows]) - 1]
        ends[rows] = np.where(last > starts[rows], last + 1, starts[rows])
        first = rows.stop
    return ends


def find_ids(ids: NDArray[np.int32], matches: Callable[[NDArray[np.int32]], NDArray[np.bool_]]) -> NDArray[np.int64]:
    """The places of the ids that match."""
    parts = [np.empty(0, np.int64)]
    for start in range(0, len(ids), AT_ONCE):
        parts.append(start + np.flatnonzero(matches(ids[start : start + AT_ONCE])))
    return np.concatenate(parts)


def find_answers(dataset: SequencesWithTargets, most: int) -> list[Target]:
    """The last answer of ``most`` rows at most, evenly spaced, with the tokens before it."""
    step = max(-(-len(dataset) // most), 1)
    return [last_answer(dataset[index]) for index in range(0, len(dataset), step)]


def last_answer(sample: Mapping[str, Any]) -> Target:
    """The last answer of a sample of ``SequencesWithTargets``, with the tokens before it.

    For ids ``[5, 6, 7, 8]`` and targets ``[-100, 7, 8, -100]``, the answer ``[7, 8]`` follows the prompt ``[5, 6]``.
    """
    ids = sample["input_ids"].tolist()
    targets = sample["targets"]
    start = len(ids)
    while start > 1 and targets[start - 2] != IGNORED:
        start -= 1
    return Target(prompt=ids[:start], tokens=ids[start:])


def first_half(sample: Mapping[str, Any]) -> Target:
    """The first tokens of a block of texts as a prompt, half of them and ``LONGEST_PROMPT`` at most, with as many that
    follow."""
    ids = sample["input_ids"].tolist()
    size = min(max(len(ids) // 2, 1), LONGEST_PROMPT)
    return Target(prompt=ids[:size], tokens=ids[size : 2 * size])


def warn_about_unknown_tokens(datasets: Mapping[str, SequencesWithTargets], tokenizer: PreTrainedTokenizerBase) -> None:
    """Log one warning for the answers of all splits that have unknown tokens."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in end_of(tokenizer):  # as GPT-2's, which ends each text
        return
    parts: list[str] = []
    example = ""
    for split, dataset in datasets.items():
        rows = dataset.rows_with(unknown)
        if len(rows):
            total = len(dataset) + dataset.dropped
            parts.append(f"{split}: {counted_of(len(rows), total, 'rows')} ({len(rows) / total:.1%})")
            if not example:
                targets = dataset[int(rows[0])]["targets"]
                example = str(tokenizer.decode(targets[targets >= 0]))
    if parts:
        logger.warning(
            Problem(
                f"{'; '.join(parts)} have unknown tokens with a loss, such as {example!r}. The tokenizer "
                "cannot write these answers, so the model learns the unknown token.",
                code="unknown-tokens",
                place="data",
            )
        )


def block_sequences(ids: NDArray[np.int32], size: int) -> Sequences:
    """Blocks of ``size`` tokens of texts, which are end to end. The last one may be shorter; a single token is none."""
    blocks, rest = divmod(len(ids), size)
    lengths = np.full(blocks, size, np.int64)
    if rest > 1:
        lengths = np.append(lengths, rest)
    return Sequences(ids, lengths)


def next_token_batch(samples: list[dict[str, Any]], pad_token_id: int, mask: bool) -> Ragged:
    """A batch before padding. ``targets`` are the tokens shifted by one: shifting here avoids a copy of the logits.
    ``loss_weight`` is the number of targets; 0 if no row has one, see ``LanguageRows``.

    Args:
        mask: Add ``attention_mask``, 1 for real tokens. Causal attention needs none, but the loss of a router does.
    """
    rows = [sample["input_ids"] for sample in samples]
    targets = [sample["targets"] if "targets" in sample else sample["input_ids"][1:] for sample in samples]
    columns = {"input_ids": (rows, pad_token_id), "targets": (targets, IGNORED)}
    if mask:
        columns["attention_mask"] = ([np.ones_like(row) for row in rows], 0)
    weight = 0
    if STANDS_IN not in samples[0]:
        weight = sum(int((row != IGNORED).sum()) for row in targets)
    return Ragged(columns=columns, loss_weight=weight, tokens=sum(map(len, rows)))


# -- streamed ----------------------------------------------------------------------------------------------------------


class LanguageRows(StreamedRows):
    """Samples of streamed rows: one a row, cut at ``data.max_length``.

    A row without a token to predict has no effect. If a micro-batch has only such rows, ``spare`` stands in for the
    first, with a ``loss_weight`` of 0: the mean over no token is not defined.
    """

    def __init__(self, data: LanguageTextData, tokenizer: PreTrainedTokenizerBase, spare: Mapping[str, Any]) -> None:
        arguments = data.encoding_arguments() | {"max_length": data.options.max_length}
        renderer = ChatRenderer(tokenizer, data.options.train_on, counts_contents=True)
        encode = partial(encode_rows, renderer=renderer)
        super().__init__(data, tokenizer, encode, row_sequences, arguments)
        self.spare: dict[str, Any] = {name: value.copy() for name, value in spare.items()}
        self.spare[STANDS_IN] = True

    def __call__(self, rows: list[Row], names: list[RowName]) -> list[dict[str, Any]]:
        samples = super().__call__(rows, names)
        if not any((sample["targets"] >= 0).any() for sample in samples):
            samples[0] = self.spare
        return samples


def row_sequences(split: Split, arguments: Mapping[str, Any]) -> SequencesWithTargets:
    """A sample for each row."""
    return SequencesWithTargets(split.ids, split.lengths, arguments["max_length"], drop=False)


def warn_about_long_rows(data: LanguageTextData, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Any]) -> None:
    """Log the share of streamed texts that are cut."""
    size = data.options.max_length
    probed = ["" if text is None else text for text in texts[:PROBED]]
    lengths = [len(ids) for ids in encode_rows(tokenizer, probed, data.encoding_arguments())]
    long = sum(length > size for length in lengths)
    if long:
        logger.warning(
            Problem(
                f"{counted_of(long, len(lengths), 'rows')} {agree(long, 'has', 'have')} more than {size} tokens "
                f"(data.max_length), and {agree(long, 'is', 'are')} cut there: a streamed row is one sample.",
                code="texts-cut",
                place="data",
                remedy="To train on all of a text, divide it into several rows.",
            )
        )


class DocumentEncoder:
    """Encodes some streamed rows: their tokens, end to end. Empty texts are skipped."""

    def __init__(self, data: LanguageTextData, tokenizer: PreTrainedTokenizerBase) -> None:
        self.data = data
        self.tokenizer = tokenizer

    def __call__(self, rows: list[Row], names: list[RowName]) -> NDArray[np.int32]:
        texts = [text for text in self.data.parse_rows(rows, names) if text.strip()]
        return flat(encode_rows(self.tokenizer, texts, self.data.encoding_arguments()))[0]


def block_samples(rows: list[Row], names: list[RowName]) -> list[dict[str, Any]]:
    """The samples of streamed blocks of tokens, which ``text.streaming.blocks`` cuts."""
    return [{"input_ids": ids} for (ids,) in rows]


# -- for `fastloop plan --samples` -------------------------------------------------------------------------------------


def language_samples(data: LanguageTextData, tokenizer: PreTrainedTokenizerBase, split: Split) -> Iterator[Sample]:
    """Rows with their tokens. A block's first token has no loss, nor has a conversation's."""
    size = data.options.max_length
    before = 0  # tokens of the texts before, which are end to end
    for row, ids in zip(split.texts, split_rows(split), strict=True):
        if data.masked:
            has_loss = ids >= 0
            has_loss[:1] = False
            sample = _chat_parts(row)
        else:
            # for blocks of 4 tokens, and a text of 5 tokens after 2 others: [True, True, False, True, True]
            has_loss = (before + np.arange(len(ids))) % size > 0
            before += len(ids)
            sample = [("text", str(row))]
        shown = np.where(ids < 0, ~ids, ids)[:size]
        targets = ["" if token_has_loss else None for token_has_loss in has_loss[:size]]
        sample.append(("tokens", show_tokens(tokenizer, shown, targets)))
        left = len(ids) - size
        if left > 0 and data.masked:
            sample.append(("left out", f"the tokens after data.max_length={size}: {left}"))
        elif left > 0:
            sample.append(("not shown", f"the row's other tokens: {left}"))
        if data.masked and not has_loss[:size].any():
            sample.append(("left out", "the row: none of its tokens has a loss"))
        yield sample


def _chat_parts(row: Any) -> Sample:
    """The messages of a conversation, each by its role; or prompt and completion."""
    if isinstance(row, tuple):
        return [*zip(("prompt", "completion"), row, strict=True)]
    chat = Chat.loads(row)
    parts: Sample = [("tools", json.dumps(chat.tools, ensure_ascii=False))] if chat.tools else []
    for message in chat.messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        text = text_of(message) + (json.dumps(more, ensure_ascii=False) if more else "")
        parts.append((message["role"], text))
    return parts
