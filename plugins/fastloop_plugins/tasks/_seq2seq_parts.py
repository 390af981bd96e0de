"""Data, model and metrics of ``seq2seq``: an input text and a target text in each row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Problem, RecipeError, option
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.rows.table import Bad
from fastloop_plugins.text.column_data import ColumnData
from fastloop_plugins.text.encoding import encode_marked
from fastloop_plugins.text.encoding_processes import portions
from fastloop_plugins.text.generation import generation_config
from fastloop_plugins.text.options import DataOptions
from fastloop_plugins.text.samples import show_tokens
from fastloop_plugins.text.sequences import ColumnSequences, join_ids
from fastloop_plugins.text.special_tokens import end_of
from fastloop_plugins.text.task import AutoClassModel
from fastloop_plugins.text.written_targets import DIFFERENCES, Finding, TargetWriter, TextDifference, unpack_text

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

EXAMPLES = "t5, mt5, bart, mbart, pegasus or marian"
"""Architectures for messages."""
GENERATED = ("exact_match", "bleu", "chrf")
"""Names of the metrics."""


@dataclass(kw_only=True)
class Seq2SeqData(DataOptions):
    """The ``data`` section of ``seq2seq``."""

    target: str | None = option("The column of targets: the texts to generate.", default=None)
    prefix: str = option('Text to put before each input, such as "summarize: ".', default="")
    max_target_length: int = option("Tokens of a target at most, with its end token.", default=128, ge=2)
    source_language: str | None = option(
        "Of inputs, for a tokenizer of several languages: its code there, such as eng_Latn; null: as saved.",
        default=None,
    )
    target_language: str | None = option(
        "Of targets, for a tokenizer of several languages: its code there, such as ron_Latn; null: as saved.",
        default=None,
    )

    def languages(self) -> dict[str, str]:
        """The languages that are given, by their names in tokenizers of transformers."""
        languages = {"src_lang": self.source_language, "tgt_lang": self.target_language}
        return {name: language for name, language in languages.items() if language is not None}


class Seq2SeqTextData(ColumnData):
    """The ``data`` section of ``seq2seq``. ``load`` returns inputs, with ``data.prefix``, and targets."""

    options: Seq2SeqData

    def parse(self, columns: Sequence[Sequence[Any]], bad: Bad) -> dict[str, list[Any]]:
        texts = super().parse(columns, bad)
        texts[self.columns[0]] = self.add_prefix(texts[self.columns[0]])
        return texts

    def add_prefix(self, texts: Iterable[Any]) -> list[str]:
        """Inputs with ``data.prefix``."""
        return [f"{self.options.prefix}{text}" for text in texts]


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[str, str]], arguments: Mapping[str, Any]
) -> Iterator[list[int]]:
    """Yield the numbers of each row: the ids of input and target, see ``join_ids``, and the text of a target that its
    tokens do not decode to, see ``pack_text``. Every target ends with the tokenizer's end token.

    Args:
        rows: Inputs and targets.
        arguments: ``max_length`` and ``max_target_length``, as in the ``data`` section.
    """
    most = arguments["max_target_length"]
    end = end_of(tokenizer)
    writer = TargetWriter(tokenizer)

    def encode_targets(targets: Sequence[str], length: int) -> list[list[int]]:
        encoded = tokenizer(text_target=list(targets), truncation=True, max_length=length, return_attention_mask=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    for portion in portions(rows):
        texts, targets = zip(*portion, strict=True)
        inputs = encode_marked(tokenizer, texts, {"truncation": True, "max_length": arguments["max_length"]})
        labels = list[list[int]]()
        cuts = list[bool]()
        for target, ids in zip(targets, encode_targets(targets, most + 1), strict=True):
            missing = [token for token in end if token not in ids]
            is_cut = len(ids) + len(missing) > most
            if is_cut:
                (ids,) = encode_targets([target], most - len(missing))
            labels.append([*ids, *missing])
            cuts.append(is_cut)
        packed = writer.pack(targets, labels, cuts)
        for source, ids, is_cut, text in zip(inputs, labels, cuts, packed, strict=True):
            yield join_ids([source, (ids, is_cut)]) + text


class PairSequences(ColumnSequences):
    """The rows of ``encode_rows``. A sample has ``input_ids``, ``labels`` and ``reference``: the packed text of a
    target that its tokens do not decode to, else empty. All are int32.

    Args:
        ids: The rows, end to end.
        lengths: Length of every row.
    """

    def __init__(self, ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        super().__init__(("input_ids", "labels"), ids, lengths)
        np.subtract(self.borders[:, -1], self.borders[:, 0], out=self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        reference = self.ids[self.borders[index, -1] : self.ends[index]]
        return {**super().__getitem__(index), "reference": reference}

    def find_unwritten(self, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
        """The targets that their tokens do not decode to, by reason."""
        rows = np.flatnonzero(self.borders[:, -1] < self.ends)
        reasons = self.ids[self.borders[rows, -1]] % DIFFERENCES
        findings = []
        for reason, first, count in zip(*np.unique(reasons, return_index=True, return_counts=True), strict=True):
            sample = self[int(rows[first])]
            text = unpack_text(sample["reference"])
            assert text is not None
            written = str(tokenizer.decode(sample["labels"], skip_special_tokens=True))
            findings.append(Finding(TextDifference(int(reason)), int(count), text, written))
        return findings


def warn_about_languages(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    """Log a warning if a tokenizer of several languages, such as NLLB's, does not know that of inputs or targets.
    transformers then takes a language of its own for inputs, and the one of inputs for targets.

    Args:
        place: The recipe and its section ``data``.
    """
    languages = tokenizer.init_kwargs
    if "tgt_lang" not in languages:  # a tokenizer of one language has no such argument
        return
    unnamed = []
    if languages.get("src_lang") is None:
        unnamed.append("inputs")
    if languages["tgt_lang"] is None:
        unnamed.append("targets")
    if unnamed:
        logger.warning(
            Problem(
                f"the tokenizer has several languages, and that of {' and '.join(unnamed)} is not given: the token is "
                f"{tokenizer.src_lang!r}.",
                code="no-language",
                place=place,
                remedy="Set data.source_language and data.target_language.",
            )
        )


def warn_about_targets(
    datasets: Mapping[str, PairSequences], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> None:
    """Log one warning for the targets of all splits that the tokenizer does not write.

    Args:
        datasets: Split, or its part in memory, for messages -> its rows.
        max_length: ``data.max_target_length``.
    """
    parts = []
    for split, dataset in datasets.items():
        for finding in dataset.find_unwritten(tokenizer):
            parts.append(finding.describe(split, len(dataset), max_length))
    if parts:
        logger.warning(
            Problem(
                f"{'; '.join(parts)}. No generated text can equal such a target: exact_match counts it as wrong.",
                code="unwritable-targets",
                place="data",
            )
        )


def pair_samples(model: Seq2SeqModel, split: Split, dataset: ColumnSequences) -> Iterator[Sample]:
    """Rows of an input and a target, for `fastloop plan --samples`. All tokens of a target have a loss."""
    for index, (text, target) in enumerate(split.texts):
        ids = dataset[index]
        yield [
            ("input", text),
            ("target", target),
            ("tokens of the input", show_tokens(model.tokenizer, ids["input_ids"])),
            ("tokens of the target", show_tokens(model.tokenizer, ids["labels"], [""] * len(ids["labels"]))),
        ]


class Seq2SeqModel(AutoClassModel):
    """The ``model`` section, for encoder-decoder models.

    A model from scratch starts each target with the padding token, as T5 does, or with its last token, as mBART does,
    and ends it with the tokenizer's end token. A tokenizer that is trained here adds the end token to inputs and
    targets.

    Args:
        max_target_length: ``data.max_target_length``.
        languages: ``Seq2SeqData.languages``.
        generation: Settings for the model's ``generation_config``, see ``generation_config``.
    """

    def __init__(
        self, recipe: Recipe, max_target_length: int, languages: Mapping[str, str], generation: Mapping[str, Any]
    ) -> None:
        self.max_target_length = max_target_length
        self.languages = languages if recipe.inference is None else {}  # an exported tokenizer has them
        self.generation = generation
        super().__init__(recipe, "AutoModelForSeq2SeqLM", False, "encoder-decoder", EXAMPLES)

    def load_tokenizer(self, max_length: int) -> None:
        super().load_tokenizer(max_length)
        self.check_room("data.max_target_length", self.max_target_length)

        if self.trained is not None and self.languages:
            raise self._language_error("a tokenizer that is trained here has no languages")

    def _pretrained_tokenizer(self, **arguments: Any) -> Any:
        """The tokenizer, with the languages of the recipe.

        Raises:
            RecipeError: It does not have them.
        """
        tokenizer = super()._pretrained_tokenizer(**arguments)
        if self.languages and not hasattr(type(tokenizer), "src_lang"):
            raise self._language_error(f"{type(tokenizer).__name__} is no tokenizer of several languages")
        vocabulary = tokenizer.get_vocab() if self.languages else {}
        for name, language in self.languages.items():
            if language not in vocabulary and f"__{language}__" not in vocabulary:  # the latter for M2M100
                raise self._language_error(f"the tokenizer has no language {language!r}")
            setattr(tokenizer, name, language)
            tokenizer.init_kwargs[name] = language  # else save_pretrained would not write it
        return tokenizer

    def _language_error(self, problem: str) -> RecipeError:
        return RecipeError(
            f"{problem}.",
            code="unknown-language",
            place=f"{self.recipe.where}: data.source_language, data.target_language",
            remedy="Use a code of the tokenizer, such as eng_Latn for NLLB and en_XX for mBART, or leave both out.",
        )

    def check_room(self, key: str, length: int) -> None:
        """Raise an error if the decoder cannot take this many tokens. Call it after ``load_tokenizer``."""
        room = length
        for name in ("max_position_embeddings", "max_decoder_position_embeddings"):
            positions = getattr(self.config, name, None)
            if isinstance(positions, int):
                room = min(room, positions)
        if length > room:
            raise RecipeError(
                f"found {length}, and the model takes {room} tokens at most.",
                code="out-of-range",
                place=f"{self.recipe.where}: {key}",
            )

    def finish_tokenizer(self, texts: Iterable[Any], types: bool = False) -> None:
        if self.trained is None:
            return
        from tokenizers.processors import TemplateProcessing

        super().finish_tokenizer(texts)
        end = self.tokenizer.eos_token
        template = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, self.tokenizer.eos_token_id)])
        self.tokenizer.backend_tokenizer.post_processor = template

    def end(self) -> int:
        """The id of the token that ends a text."""
        (token,) = end_of(self.tokenizer)
        return token

    def _build(self, auto: Any, labels: Any) -> Any:
        from_scratch = self.options.config
        config = self.config
        pad = self.tokenizer.pad_token_id
        is_given = getattr(config, "decoder_start_token_id", None) is not None
        if from_scratch is not None:
            config.pad_token_id = pad
            if "forced_eos_token_id" not in from_scratch and hasattr(config, "forced_eos_token_id"):
                config.forced_eos_token_id = self.end()
            is_given = "decoder_start_token_id" in from_scratch
        if not is_given:
            config.decoder_start_token_id = pad
        model = super()._build(auto, labels)
        start = self._start_of_targets(model)
        if start is not None and start != config.decoder_start_token_id:
            if not is_given:
                config.decoder_start_token_id = start
                model.config.decoder_start_token_id = start
                model.generation_config.decoder_start_token_id = start
            elif self.recipe.inference is None:
                self._warn_of_other_start(start)
        model.generation_config = generation_config(model, self.generation)
        return model

    def _start_of_targets(self, model: Any) -> int | None:
        """The token before each target in training; None: the model has no method that says it.

        For the labels ``[a, end]``, T5 gets ``[start, a]``, and mBART, which has no start token, ``[end, a]``.

        Raises:
            RecipeError: It differs between targets, so that generated texts have no token to start with.
        """
        import torch

        prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is None:
            return None
        starts = []
        for text in ("a", "b"):
            ids = self.tokenizer(text_target=text)["input_ids"]
            ids += [token for token in end_of(self.tokenizer) if token not in ids]
            inputs = prepare(torch.tensor([ids], device="cpu"))
            starts.append(int(inputs[0, 0]))
        if starts[0] != starts[1]:
            raise RecipeError(
                f"{self.config.model_type} starts each target with its last token that is not padding, and the "
                "tokenizer pads with its end token. The start would be another token for each target.",
                code="invalid-value",
                place=self.where,
                remedy="Use t5 or bart, or a tokenizer that has a padding token: model.tokenizer.",
            )
        return starts[0]

    def _warn_of_other_start(self, start: int) -> None:
        """Log that targets start with another token in training than generated texts."""
        names = self.tokenizer.convert_ids_to_tokens([self.config.decoder_start_token_id, start])
        logger.warning(
            Problem(
                f"decoder_start_token_id is that of {names[0]!r}, and {self.config.model_type} starts each target with "
                f"{names[1]!r} in training. Generated texts start with a token that it has not trained.",
                code="other-start-token",
                place=f"{self.where}: decoder_start_token_id",
                remedy=f"Set it to {start} in the model's configuration, or in plugins.seq2seq.generation.",
            )
        )


def reference_texts(batch: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The target texts of a batch, as the data has them."""
    labels = batch["labels"]
    decoded = tokenizer.batch_decode(
        labels.masked_fill(labels == IGNORED, tokenizer.pad_token_id), skip_special_tokens=True
    )
    texts = []
    for packed, decoded_text in zip(batch["references"].cpu().numpy(), decoded, strict=True):
        text = unpack_text(packed)
        texts.append(decoded_text if text is None else text)
    return texts


def generated_metrics(
    run: Run, split: str, tokenizer: PreTrainedTokenizerBase, generate: Callable[[dict[str, Tensor]], list[str]]
) -> dict[str, float]:
    """Compare generated texts with the target texts of a split. Every process must call it, and gets the metrics of
    all samples.

    Args:
        generate: A batch -> a text for each sample.

    Returns:
        ``exact_match``, the share of equal texts; ``bleu`` (4-grams of words separated by spaces, Papineni et al.,
        2002) and ``chrf`` (6-grams of characters, Popovic, 2015), both of the whole split. All are between 0 and 1.
    """
    import torch
    from torchmetrics.functional.text import bleu_score, chrf_score

    from fastloop import loop
    from fastloop.evaluation_results import evaluating

    pairs: list[tuple[str, str]] = []
    with evaluating(run.model), torch.no_grad():
        for batch in loop.evaluation_batches(run, run.eval_loaders[split]):
            texts = generate(batch.inputs)
            if batch.samples:
                pairs += zip(texts, reference_texts(batch.inputs, tokenizer), strict=True)
    pairs = list(chain.from_iterable(run.processes.all_gather_object(pairs)))
    generated = [text for text, _ in pairs]
    targets = [[target] for _, target in pairs]
    return {
        "exact_match": sum(text == target for text, target in pairs) / len(pairs),
        "bleu": bleu_score(generated, targets).item(),
        # a tensor: no scores of sentences
        "chrf": float(chrf_score(generated, targets, n_word_order=0)),  # type: ignore[arg-type]
    }
