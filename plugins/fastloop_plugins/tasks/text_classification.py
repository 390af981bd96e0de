"""Trains a text classifier on a transformer, pretrained or from scratch. On by default if ``data`` names a ``label`` column.

    model: {name: distilbert-base-uncased}
    data:  {files: {train: train.csv, validation: validation.csv, test: test.csv}, text: text, label: label, max_length: 512}
    plugins:
      - text-classification

Labels are text, or whole numbers from 0; the training split defines the classes. If a checkpoint has classes with the same names, the run
keeps its ids and its head. Otherwise the head is reinitialized, with a warning.

``f1`` follows scikit-learn: with two classes it is the F1 score of class 1 (``average="binary"``), else the mean over the classes
(``average="macro"``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Batch, Output, Plugin, SpeedupEstimate, hookimpl
from fastloop_plugins.tasks._model_checks import PROBE, check_classifies
from fastloop_plugins.tasks._text_data import Data, TextData
from fastloop_plugins.tasks._text_model import Model, TextModel

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torchmetrics import Metric, MetricCollection

    from fastloop import Run
    from fastloop.estimates import StepProfile
    from fastloop.recipe import Recipe
    from fastloop_plugins.tasks._text_batches import Ragged, Sequences, Width


class TextClassification(Plugin):
    """One label for each text: cross entropy, ``accuracy`` and ``f1`` (of class 1 for two classes, else macro)."""

    name = "text-classification"
    slot = "task"
    fallback_hooks = ("compute_loss",)
    sections = {"model": Model, "data": Data}
    description = "model, data, loss and metrics of text classification"

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        labelled = recipe.data.get("label") is not None and not recipe.model.get("module")
        return "data names a label column" if labelled else None

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if recipe.data.get("padding") != "max_length" or not profile.longest:
            return None
        return SpeedupEstimate(
            seconds=(1 - profile.longest / profile.padded) * profile.computing,
            why=f"Samples are padded to data.max_length: {1 - profile.longest / profile.padded:.0%} of that exceeds each batch's longest.",
            overrides={"data.padding": "longest"},
        )

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data, self.text_model = TextData(recipe, labelled=True), TextModel(recipe, classify=True)

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Sequences]:
        import numpy as np

        from fastloop_plugins.tasks import _text_tokens
        from fastloop_plugins.tasks._text_batches import Sequences

        self.data.skip_unreadable = run.loader_settings.skip_unreadable
        splits = _text_tokens.read(self.data, self.text_model, truncation=True, max_length=self.data.options.max_length)
        run.state.unreadable += self.data.unreadable
        self.labels = self.text_model.order_labels(self.data.classes)
        ids = np.array(self.labels.ids)
        return {name: Sequences(split.ids, split.lengths, ids[split.labels]) for name, split in splits.items()}

    @hookimpl
    def build_collator(self, run: Run) -> Collator:
        from fastloop_plugins.tasks._text_batches import Width

        options = self.data.options
        width = Width(options.max_length, run.loader_settings.pad_to_multiple_of, options.padding == "max_length")
        return Collator(self.text_model.tokenizer.pad_token_id, width)

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        model: nn.Module = self.text_model.build(AutoModelForSequenceClassification, self.labels)
        probe = self.text_model.tokenizer(list(PROBE), truncation=True, max_length=self.data.options.max_length)["input_ids"]
        inputs = self.build_collator(run)([{"input_ids": ids, "label": 0} for ids in probe]).inputs
        del inputs["labels"]
        check_classifies(run, model, inputs, len(self.labels.names), self.text_model.where)
        return model

    @hookimpl
    def build_metrics(self) -> MetricCollection:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassF1Score
        from torchmetrics.wrappers import LambdaInputTransformer

        count = len(self.labels.names)
        f1: Metric = MulticlassF1Score(count, average="macro")
        if count == 2:
            f1 = LambdaInputTransformer(BinaryF1Score(validate_args=False), transform_pred=lambda logits: logits.argmax(1))
        return MetricCollection({"accuracy": MulticlassAccuracy(count, average="micro"), "f1": f1})

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Output:
        from torch.nn.functional import cross_entropy

        from fastloop_plugins.tasks._text_masks import forward

        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = forward(model, inputs, never="position_ids" in batch).logits  # inputs with positions are packed rows, which need no mask
        return Output(cross_entropy(logits.float(), batch["labels"]), logits, batch["labels"])

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        return self.text_model.export(run, folder)


class Collator:
    """Pads a list of samples. The mask is 1 for real tokens; a batch without padding has no mask."""

    def __init__(self, pad_token_id: int, width: Width) -> None:
        self.pad_token_id, self.width = pad_token_id, width

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        import torch

        from fastloop_plugins.tasks._text_batches import padded

        batch = self.ragged(samples)
        rows, fill = batch.columns["input_ids"]
        width, lengths = self.width(rows), torch.tensor([len(row) for row in rows])
        inputs = {"input_ids": padded(rows, width, fill)} | batch.fixed
        if min(map(len, rows)) < width:
            inputs["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return Batch(inputs, loss_weight=batch.loss_weight, tokens=batch.tokens)

    def ragged(self, samples: list[dict[str, Any]]) -> Ragged:
        """The batch without padding and without a mask."""
        import torch

        from fastloop_plugins.tasks._text_batches import Ragged

        rows = [sample["input_ids"] for sample in samples]
        labels = torch.tensor([sample["label"] for sample in samples])
        return Ragged(
            columns={"input_ids": (rows, self.pad_token_id)}, fixed={"labels": labels}, loss_weight=len(rows), tokens=sum(map(len, rows))
        )
