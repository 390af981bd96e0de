"""Trains a token classifier: a tag for each word, as in named entity recognition.

On by default if ``data`` names ``tags`` or CoNLL files. `docs/tasks/token-classification.md` explains the formats.

    model: {name: distilbert-base-cased}
    data:  {files: {train: train.conll, validation: validation.conll, test: test.conll}, max_length: 256}
    plugins:
      - token-classification

The training split defines the tags, in sorted order, unless ``data.tag_names`` lists them. If a checkpoint has the same
tags, the run keeps its ids and its head.

    plugins:
      - token-classification:
          scheme: IOB2                                           # count only entities that follow it
          label_tokens: all                                      # each token of a word is a target; default: the first
          loss: {name: cross_entropy, class_weights: balanced}   # or {name: focal, gamma: 2}
          metrics: {f1_tags: {type: MulticlassF1Score}}          # beside accuracy, precision, recall and f1

``precision``, ``recall`` and ``f1`` count entities as seqeval does; ``accuracy`` is over words. A sentence that does
not fit into ``max_length`` is divided between words.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastloop import Output, Plugin, hookimpl, option
from fastloop_plugins.models.checks import check_alone, check_classifies, shortest
from fastloop_plugins.tasks.heads.losses import ClassifierOptions, ClassLoss
from fastloop_plugins.tasks.heads.metrics import find_metrics
from fastloop_plugins.tasks.tags.data import TagData, TagTextData, has_tags
from fastloop_plugins.tasks.tags.tokens import TagModel
from fastloop_plugins.text.model import Model
from fastloop_plugins.text.options import padded_traits
from fastloop_plugins.text.padding_check import ALIKE, PROBE, check_padding

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torchmetrics import MetricCollection

    from fastloop import Run, Trait
    from fastloop.recipe import Recipe
    from fastloop_plugins.tasks.tags.batches import TagCollator, TaggedSentences
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.tokens import Split


logger = logging.getLogger("fastloop")


class TokenClassification(Plugin):
    """One tag for each word of a sentence."""

    name = "token-classification"
    slot = "task"
    fallback_hooks = ("compute_loss",)
    sections = {"model": Model, "data": TagData}
    description = "model, data, loss and metrics of token classification"

    @dataclass(kw_only=True)
    class Config(ClassifierOptions):
        """Options."""

        scheme: Annotated[
            Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"] | None,
            option(
                "How tags describe entities, as in seqeval's strict mode; IOB2 is also called BIO, IOBES BIOES. null: "
                "as in its default mode and in CoNLL's evaluation script."
            ),
        ] = None
        label_tokens: Annotated[
            Literal["first", "all"], option("The tokens of a word that have its tag as their target.")
        ] = "first"

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        return "data has tags of words" if has_tags(recipe) else None

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> set[Trait]:
        return padded_traits(recipe)

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data = TagTextData(recipe)
        self.text_model = TagModel(recipe, self.data)
        self.place = f"{recipe.where}: plugins.{self.name}"
        self.loss = ClassLoss(self.config.loss, f"{self.place}.loss")
        self.metric_classes = find_metrics(self.config.metrics, recipe, f"plugins.{self.name}.metrics")

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        from fastloop_plugins.tasks.tags.batches import check_scheme

        splits = self._read(run)
        run.state.unreadable += self.data.unreadable
        for name, split in splits.items():
            check_scheme(self.data, name, split, self.config.scheme, f"plugins.{self.name}.scheme")
        datasets = {name: self._dataset(name, split) for name, split in splits.items()}
        self.loss.set_weights((lambda: datasets["train"].tags()) if "train" in datasets else None, self.labels.names)
        return self.data.streamed(run, datasets, self.text_model, self.labels.ids)

    def _read(self, run: Run, first: int | None = None) -> dict[str, Split]:
        from fastloop_plugins.tasks.tags.tokens import encode_rows
        from fastloop_plugins.text import tokens as _text_tokens

        self.data.skip_unreadable = run.settings.skip_unreadable
        splits = _text_tokens.read(self.data, self.text_model, encoder=encode_rows, first=first, words=True)
        self.labels = self.text_model.order_labels(self.data.classes)
        return splits

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[Sample]:
        from fastloop_plugins.tasks.tags.batches import tagged_samples

        split = self._read(run, count)["train"]
        return tagged_samples(self.data, self.text_model, split, self.config.label_tokens == "all")

    def _dataset(self, name: str, split: Split) -> TaggedSentences:
        from fastloop_plugins.tasks.tags.batches import TaggedSentences

        room, special = self.text_model.room(self.data.options.max_length)
        dataset = TaggedSentences(split.ids, split.lengths, room, special, split=name == "train", order=self.labels.ids)
        dataset.warn(name, len(split.lengths))
        return dataset

    @hookimpl
    def build_prediction_data(self, run: Run, source: Any, start: int, size: int) -> Iterator[TaggedSentences]:
        from fastloop_plugins.tasks.tags.predictions import sentence_chunks, split_sentences

        self.text_model.load_tokenizer(self.data.options.max_length)
        self.labels = self.text_model.order_labels(self.text_model.class_names())
        sentences = split_sentences(self.data, run.loaders.first) if source is None else self.data.sentences(source)
        return sentence_chunks(sentences, start, size, self.text_model, self.data.options.max_length)

    @hookimpl
    def build_collator(self, run: Run, split: str) -> TagCollator:
        from fastloop_plugins.tasks.tags.batches import TagCollator

        width, pad_token_id = self.text_model.width(run, self.data.options), self.text_model.tokenizer.pad_token_id
        return TagCollator(
            pad_token_id, width, self.loss, self.text_model.special_tokens(), self.config.label_tokens == "all"
        )

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        from transformers import AutoModelForTokenClassification

        from fastloop_plugins.tasks.tags.batches import OWN, copy_logits
        from fastloop_plugins.tasks.tags.predictions import encode_sentences

        model: nn.Module = self.text_model.build(AutoModelForTokenClassification, self.labels)
        probe = encode_sentences([text.split() for text in PROBE], self.text_model, self.data.options.max_length)
        collate = self.build_collator(run, "train")

        def make(*given: Any) -> dict[str, Tensor]:
            return {
                name: value
                for name, value in collate([*(given or (probe[0], probe[1]))]).inputs.items()
                if name not in OWN
            }

        check_classifies(run, model, make(), len(self.labels.names), self.text_model.where, tokens=True)
        check_padding(run, model, self.text_model, collate.width, make)
        if run.recipe.inference is None and (sample := shortest(run.datasets["train"])) is not None:
            check_alone(run, model, lambda: model(**make(sample)), f", or {ALIKE}")
        if run.plugins.in_slot("strategy") == "fsdp":
            model.register_forward_hook(copy_logits)
        return model

    @hookimpl
    def build_metrics(self) -> MetricCollection:
        from fastloop_plugins.tasks.tags.metrics import tag_metrics

        return tag_metrics(self.labels.names, self.config.scheme, self.metric_classes, self.config.metrics, self.place)

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Output:
        import torch

        from fastloop_plugins.tasks.tags.batches import OWN, word_scores
        from fastloop_plugins.text.masks import forward

        inputs = {name: value for name, value in batch.items() if name not in OWN}
        # inputs with positions are packed rows, which need no mask
        logits = forward(model, inputs, never="position_ids" in batch).logits
        loss = self.loss(logits.flatten(0, 1).float(), batch["labels"].flatten())
        # selecting the words waits for the device, and only metrics and predictions need them
        if torch.is_grad_enabled():
            return Output(loss)
        return Output(loss, *word_scores(logits, batch))

    @hookimpl
    def predict(self, run: Run, batch: dict[str, Any]) -> Mapping[str, list[Any]]:
        from fastloop_plugins.tasks.tags.predictions import tag_columns

        output = run.hooks.compute_loss(run=run, model=run.model, batch=batch)
        sentences: Any = run.datasets[run.loaders.first].words
        words = [sentences[row] for row in batch["rows"].tolist()]
        return tag_columns(output, words, self.labels.names, self.config.scheme)

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        return self.text_model.export(run, folder)
