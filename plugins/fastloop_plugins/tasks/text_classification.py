"""Trains a text classifier on a transformer, pretrained or from scratch.

On by default if ``data`` names a ``label`` column. `docs/tasks/text-classification.md` explains the data, and
`docs/training-keys.md` losses and metrics.

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
          positive: spam          # of two classes, the one of f1, of metrics such as BinaryAUROC, and of threshold
          threshold: 0.3          # above it, predict the positive class

``class_weights`` are a list, a mapping of the classes' names, or ``balanced``: ``N / (C * count)`` of the training
labels. With several labels for each text, a class's weight is torch's ``pos_weight``, which multiplies the loss of the
texts that have the class. ``balanced`` is then ``(N - count) / count``.

``f1`` follows scikit-learn: of the positive class with two classes, else the mean over the classes. Without
``positive``, it is the second in sorted order. The table at the end of a run names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastloop import Output, SpeedupEstimate, hookimpl, option
from fastloop_plugins.models.checks import check_alone, check_classifies, check_trains, shortest
from fastloop_plugins.tasks.shared.losses import ClassLoss
from fastloop_plugins.tasks.shared.metrics import find_metrics, names_of_scored_metrics
from fastloop_plugins.tasks.shared.problems import SingleLabel, make_problem
from fastloop_plugins.tasks.shared.two_classes import TwoClassOptions
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.model import TextModel
from fastloop_plugins.text.model_options import ModelOptions
from fastloop_plugins.text.options import DataOptions
from fastloop_plugins.text.padding_check import ALIKE, PROBE
from fastloop_plugins.text.task import TextTask

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import Metric, MetricCollection

    from fastloop import Run, Trait
    from fastloop.recipe import Recipe
    from fastloop.speedup_estimates import StepProfile
    from fastloop_plugins.models.label_order import LabelOrder
    from fastloop_plugins.tasks.shared.problems import MultiLabel, Regression
    from fastloop_plugins.text.batches import Ragged
    from fastloop_plugins.text.sequences import Sequences
    from fastloop_plugins.text.tokens import Split


class TextClassification(TwoClassOptions, TextTask):
    """Trains a classifier of texts: one class, any number of classes, or a number for each."""

    name = "text-classification"
    on_resume = {"metrics": "free", "threshold": "free", "positive": "free"}
    labels = "required"
    sections = {"model": ModelOptions, "data": DataOptions}
    auto_class = "AutoModelForSequenceClassification"
    unused_modules = ()
    reads_all = False
    samples_are_rows = True
    data: TextData
    order: LabelOrder

    threshold: float | None = option(
        "Predict the positive class of two, or each of any number, if its probability is above this; null: the "
        "likelier, or 0.5.",
        default=None,
        gt=0,
        lt=1,
    )

    criterion: ClassLoss  # this and the next attributes: from check_recipe on
    problem: SingleLabel | MultiLabel | Regression
    metric_classes: dict[str, type[Metric]]

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        labelled = recipe.data.get("label") is not None and not recipe.model.get("module")
        return "data names a label column" if labelled else None

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> set[Trait]:
        return {"output-per-text", *super().declare_traits(recipe)}

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if recipe.data.get("padding") != "max_length" or not profile.longest:
            return None
        return SpeedupEstimate(
            seconds=(1 - profile.longest / profile.padded) * profile.in_operations,
            why=f"Samples are padded to data.max_length: {1 - profile.longest / profile.padded:.0%} of that exceeds "
            "each batch's longest.",
            overrides={"data.padding": "longest"},
        )

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data = TextData(recipe, labelled=True)
        self.text_model = TextModel(recipe, classify=True)
        where = f"{recipe.where}: plugins.{self.name}"
        self.criterion = ClassLoss(self.loss, f"{where}.loss")
        self.problem = make_problem(self.data.label_type, self.criterion, self, where)
        self.adds_metrics = self.problem.modes
        self.metric_classes = find_metrics(self.metrics, recipe, f"plugins.{self.name}.metrics")

    # -- texts: two columns are a pair of the tokenizer, and more are joined with its separator token ------------------

    def encoding_arguments(self) -> dict[str, Any]:
        return {"truncation": True, "max_length": self.data.options.max_length}

    def _encode_splits(self, run: Run, first: int | None) -> dict[str, Split]:
        from fastloop_plugins.text import tokens

        encoding = tokens.Encoding(self.encoding_arguments())
        return tokens.read(self.data, self.text_model, encoding, self._selection(run, first))

    @staticmethod
    def build_dataset(split: Split, arguments: Mapping[str, Any]) -> Sequences:
        from fastloop_plugins.text.sequences import Sequences

        return Sequences(split.ids, split.lengths, split.labels, split.typed)

    def _encode_chunks(self, source: Any, start: int, size: int) -> Iterator[Sequences]:
        from fastloop_plugins.text.chunks import token_chunks

        return token_chunks(self.data, self.text_model, source, start, size, self.encoding_arguments())

    def build_batch(self, samples: list[dict[str, Any]]) -> Ragged:
        import torch

        batch = super().build_batch(samples)
        if "labels" not in batch.fixed:  # texts to predict: any labels, because nothing reads the loss
            if self.data.label_type == "classes":
                batch.fixed["labels"] = torch.zeros(len(samples), len(self.order.names))
            else:
                batch.fixed["labels"] = torch.zeros(len(samples), dtype=torch.int64)
        elif self.criterion.weights is not None and self.data.label_type == "class":
            return replace(batch, loss_weight=self.criterion.weight_of(batch.fixed["labels"]))
        return batch

    # -- model, loss and metrics ---------------------------------------------------------------------------------------

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        datasets = super().build_datasets(run=run)
        train = datasets.get("train")
        self.criterion.set_weights(None if train is None else lambda: train.labels, self.order.names, train)
        if isinstance(self.problem, SingleLabel):
            self.decision(self.order.names)  # refuses an unknown class before the model is built
        return datasets

    def _probe_samples(self, run: Run) -> list[dict[str, Any]]:
        ids = self.text_model.tokenizer(list(PROBE), **self.encoding_arguments())["input_ids"]
        return [{"input_ids": ids_of_text} for ids_of_text in ids]

    def check_model(self, run: Run, model: nn.Module, make: Callable[..., dict[str, Tensor]]) -> None:
        check_classifies(run, model, make(), len(self.order.names), self.text_model.where)
        if run.recipe.inference is None:
            check_trains(run, model, make(), self.text_model.where)
            sample = shortest(run.datasets["train"])
            if sample is not None:
                check_alone(run, model, lambda: model(**make(sample)), f"Or {ALIKE}.")

    @hookimpl
    def build_metrics(self, run: Run) -> MetricCollection:
        where = f"{run.recipe.where}: plugins.{self.name}.metrics"
        names = self.order.names
        if isinstance(self.problem, SingleLabel):
            scored = names_of_scored_metrics(self.metric_classes, self.metrics, len(names))
            self.scored_classes = {metric: names[self.decision(names).positive] for metric in scored}
        return self.problem.metrics(names, self.metric_classes, self.metrics, where)

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Output:
        from fastloop_plugins.text.forward_passes import compute

        return self.problem.output(compute(model, batch).logits, batch["labels"])

    def output_columns(self) -> Sequence[str]:
        return self.problem.column_names(self.order.names)

    @hookimpl
    def predict(self, run: Run, batch: dict[str, Any]) -> Mapping[str, list[Any]]:
        output = run.hooks.compute_loss(run=run, model=run.model, batch=batch)
        return self.problem.columns(output, self.order.names)
