"""Trains a text classifier on a transformer, pretrained or from scratch.

On by default if ``data`` names a ``label`` column. `docs/tasks/text-classification.md` explains data and metrics.

    model: {name: distilbert-base-uncased}
    data:  {files: {train: train.csv, validation: validation.csv, test: test.csv},
            text: text, label: label, max_length: 512}
    plugins:
      - text-classification

Labels are text, or whole numbers from 0; the training split defines the classes. They may also be numbers (regression),
or any number of classes for each text:

    data:  {label: score, label_type: number}  # mean squared error, mse, mae, pearson, spearman
    data:  {label: [toxic, insult]}            # 0 and 1: binary cross entropy, f1_micro, f1_macro, subset_accuracy
    data:  {label: tags, label_type: classes}  # lists of names: those with a probability above threshold, default 0.5

Options of loss and metrics:

    plugins:
      - text-classification:
          loss: {name: cross_entropy, class_weights: balanced, label_smoothing: 0.1}     # or {name: focal, gamma: 2}
          metrics: {auroc: {type: BinaryAUROC}, recall: {type: MulticlassRecall}}         # beside accuracy and f1
          threshold: 0.3                                                                 # above it, predict class 1

``class_weights`` are a list, a mapping of the classes' names, or ``balanced``: ``N / (C * count)`` of the training
labels. ``f1`` follows scikit-learn: of class 1 with two classes, else the mean over the classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import Output, Plugin, SpeedupEstimate, hookimpl, option
from fastloop_plugins.models.checks import check_alone, check_classifies, check_trains, shortest
from fastloop_plugins.tasks.heads.batches import Collator
from fastloop_plugins.tasks.heads.losses import ClassifierOptions, ClassLoss
from fastloop_plugins.tasks.heads.metrics import classifier_metrics, find_metrics
from fastloop_plugins.tasks.heads.problems import make_problem
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.model import Model, TextModel
from fastloop_plugins.text.options import Data, padded_traits
from fastloop_plugins.text.padding_check import ALIKE, PROBE, check_padding

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torchmetrics import MetricCollection

    from fastloop import Run, Trait
    from fastloop.estimates import StepProfile
    from fastloop.recipe import Recipe
    from fastloop_plugins.text.batches import Sequences
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.tokens import Split


class TextClassification(Plugin):
    """One class, any number of classes, or a number for each text."""

    name = "text-classification"
    slot = "task"
    fallback_hooks = ("compute_loss",)
    sections = {"model": Model, "data": Data}
    description = "model, data, loss and metrics of text classification"

    @dataclass(kw_only=True)
    class Config(ClassifierOptions):
        """Options."""

        threshold: Annotated[
            float | None,
            option(
                "Predict class 1 of two, or each of any number, if its probability is above this; null: the "
                "likelier, or 0.5.",
                gt=0,
                lt=1,
            ),
        ] = None

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        labelled = recipe.data.get("label") is not None and not recipe.model.get("module")
        return "data names a label column" if labelled else None

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> set[Trait]:
        return {"output-per-text", *padded_traits(recipe)}

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if recipe.data.get("padding") != "max_length" or not profile.longest:
            return None
        return SpeedupEstimate(
            seconds=(1 - profile.longest / profile.padded) * profile.computing,
            why=f"Samples are padded to data.max_length: {1 - profile.longest / profile.padded:.0%} of that exceeds "
            "each batch's longest.",
            overrides={"data.padding": "longest"},
        )

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data, self.text_model = TextData(recipe, labelled=True), TextModel(recipe, classify=True)
        where = f"{recipe.where}: plugins.{self.name}"
        self.loss = ClassLoss(self.config.loss, f"{where}.loss")
        if (problem := make_problem(self.data.label_type, self.config.loss, self.config.threshold, where)) is not None:
            self.text_model.problem_type = problem.problem_type
        self.problem = problem
        self.metric_classes = find_metrics(self.config.metrics, recipe, f"plugins.{self.name}.metrics")

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Sequences]:
        import numpy as np

        from fastloop_plugins.text.batches import Sequences

        splits = self._read(run)
        run.state.unreadable += self.data.unreadable
        ids = np.array(self.labels.ids)
        labels = {name: ids[split.labels] if self.problem is None else split.labels for name, split in splits.items()}
        if self.data.label_type == "classes":
            labels = {
                name: split.labels[:, ids.argsort()] for name, split in splits.items() if split.labels is not None
            }
        datasets = {
            name: Sequences(split.ids, split.lengths, labels[name], split.typed) for name, split in splits.items()
        }
        self.loss.set_weights((lambda: datasets["train"].labels) if "train" in datasets else None, self.labels.names)
        return self.data.streamed(run, datasets, self.text_model)

    def _read(self, run: Run, first: int | None = None) -> dict[str, Split]:
        from fastloop_plugins.text import tokens as _text_tokens

        self.data.skip_unreadable = run.settings.skip_unreadable
        arguments: dict[str, Any] = {"truncation": True, "max_length": self.data.options.max_length}
        splits = _text_tokens.read(self.data, self.text_model, first=first, **arguments)
        names = self.text_model.class_names()
        only = self.data.label_type == "number" and len(names) == 1  # the output of a regression may have any name
        self.labels = self.text_model.order_labels(names if only else self.data.classes)
        return splits

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[Sample]:
        from fastloop_plugins.text.samples import labelled_samples

        return labelled_samples(self.data, self.text_model, self._read(run, count)["train"])

    @hookimpl
    def build_prediction_data(self, source: Any, start: int, size: int) -> Iterator[Sequences] | None:
        if source is None:  # a split
            return None
        from fastloop_plugins.text.chunks import token_chunks

        self.text_model.load_tokenizer(self.data.options.max_length)
        self.labels = self.text_model.order_labels(self.text_model.class_names())
        arguments = {"truncation": True, "max_length": self.data.options.max_length}
        label = [0.0] * len(self.labels.names) if self.data.label_type == "classes" else []
        return token_chunks(self.data, self.text_model, source, start, size, arguments, label)

    @hookimpl
    def build_collator(self, run: Run) -> Collator:
        return Collator(
            self.text_model.tokenizer.pad_token_id, self.text_model.width(run, self.data.options), self.loss
        )

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        model: nn.Module = self.text_model.build(AutoModelForSequenceClassification, self.labels)
        arguments = {"truncation": True, "max_length": self.data.options.max_length}
        samples = [
            {"input_ids": ids, "label": 0} for ids in self.text_model.tokenizer(list(PROBE), **arguments)["input_ids"]
        ]
        collate = self.build_collator(run)

        def make(*given: Any) -> dict[str, Tensor]:
            return {name: value for name, value in collate([*(given or samples)]).inputs.items() if name != "labels"}

        check_classifies(run, model, make(), len(self.labels.names), self.text_model.where)
        check_padding(run, model, self.text_model, collate.width, make)
        if run.recipe.inference is None:
            check_trains(run, model, make(), self.text_model.where)
            if (sample := shortest(run.datasets["train"])) is not None:
                check_alone(run, model, lambda: model(**make(sample)), f", or {ALIKE}")
        return model

    @hookimpl
    def build_metrics(self, run: Run) -> MetricCollection:
        where = f"{run.recipe.where}: plugins.{self.name}.metrics"
        if self.problem is not None:
            return self.problem.metrics(self.labels.names, self.metric_classes, self.config.metrics, where)
        return classifier_metrics(
            self.metric_classes, self.config.metrics, where, len(self.labels.names), self.config.threshold
        )

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Output:
        from fastloop_plugins.text.masks import forward

        inputs = {name: value for name, value in batch.items() if name != "labels"}
        # inputs with positions are packed rows, which need no mask
        logits = forward(model, inputs, never="position_ids" in batch).logits
        if self.problem is not None:
            return self.problem.output(logits, batch["labels"])
        return Output(self.loss(logits.float(), batch["labels"]), logits, batch["labels"])

    @hookimpl
    def predict(self, run: Run, batch: dict[str, Any]) -> Mapping[str, list[Any]]:
        from fastloop_plugins.tasks.heads.predictions import prediction_columns

        output = run.hooks.compute_loss(run=run, model=run.model, batch=batch)
        if self.problem is not None:
            return self.problem.columns(output, self.labels.names)
        return prediction_columns(output, self.labels.names, self.config.threshold)

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        return self.text_model.export(run, folder)
