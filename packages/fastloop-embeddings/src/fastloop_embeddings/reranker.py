"""Trains a cross-encoder: a model that reads a query and a document together, and scores how well they fit.

    data: {files: {train: answers.csv}, text: question, other: answer, max_length: 256}
    plugins:
      - reranker: {loss: multiple_negatives}

``README.md`` describes its losses and options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Output, RecipeError, hookimpl, option
from fastloop_plugins.text import ModelOptions, Ragged, compute, padded_traits

from fastloop_embeddings.data_section import RerankerData
from fastloop_embeddings.modules import find_folder, read_score_activation
from fastloop_embeddings.pairs import Joiner, draw, group
from fastloop_embeddings.task import RANKINGS, PairTask

if TYPE_CHECKING:
    from pathlib import Path

    from fastloop import Run
    from torch import nn


SIGMOID = "torch.nn.modules.activation.Sigmoid"
"""The activation function of scores, unless the base has another one."""
NO_VALIDATION = (
    "data.files.validation: missing, and rows that are held out of train would divide the lists of list_net. Give a "
    "validation split, or set data.validation_fraction: 0."
)


class Reranker(PairTask):
    """Learns scores of pairs of texts."""

    name = "reranker"
    inputs = ("text", "other")
    auto_class = "AutoModelForSequenceClassification"
    unused_modules = ()
    reads_all = False  # the model reads the first token of a pair
    sections = {"model": ModelOptions, "data": RerankerData}

    loss: Literal["multiple_negatives", "binary", "list_net"] = option(
        "The loss: the first needs pairs that fit, the others a score for each pair.", default="multiple_negatives"
    )
    negatives: int = option("multiple_negatives: documents of other rows for each query.", default=4, ge=0)
    temperature: float = option("multiple_negatives: divides scores between 0 and 1.", default=0.1, gt=0)

    activation: nn.Module  # of scores, set with the model
    activation_name: str  # as Sentence Transformers writes it

    candidates: Path | None  # documents to rank for each query of an evaluation
    holds_out: bool  # whether queries of train are held out to validate
    join: Joiner  # builds the batches of training

    @classmethod
    def declare_traits(cls, recipe: Any) -> set[Any]:
        return {"output-per-text", *padded_traits(recipe)}

    @hookimpl
    def check_recipe(self, recipe: Any) -> None:
        loss = self.loss
        if loss != "binary" and recipe.data.get("streaming"):
            problem = f"the loss {loss} reads several rows at once. Use the loss binary."
            raise RecipeError(problem, code="no-streaming", place=f"{recipe.where}: data.streaming")
        # of scores: torchmetrics does not declare which values of pearson are better
        self.adds_metrics = dict.fromkeys(("pearson",) if loss == "binary" else RANKINGS, "max")
        self.samples_are_rows = loss == "binary"  # the others make lists of rows
        self.read_columns(recipe, loss, scored=loss != "multiple_negatives")
        base = find_folder(recipe, self.text_model.options, download=False)
        if base is not None:
            read_score_activation(base, f"{recipe.where}: model.name")
        options = self.data.options
        assert isinstance(options, RerankerData)
        where = f"{recipe.where}: data.candidates"
        self.candidates = None if options.candidates is None else recipe.find(options.candidates)
        if self.candidates is not None and (self.folder is None or not self.candidates.is_file()):
            raise RecipeError(
                f"found {self.candidates}, and data.beir is {options.beir}.",
                code="exclusive-options",
                place=where,
                expected="a file, and the folder of its documents",
            )
        self.holds_out = loss == "list_net" and options.validation_fraction > 0 and self.data.inference is None
        if self.holds_out and self.data.files and self.data.splits.validation not in self.data.files:
            raise RecipeError(NO_VALIDATION, code="unknown-split", place=recipe.where)
        if loss == "list_net":
            options.validation_fraction = 0.0  # rows that are held out would be drawn one by one

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        datasets: Mapping[str, Any] = super().build_datasets(run)
        if self.holds_out and "validation" not in datasets:
            raise RecipeError(NO_VALIDATION, code="unknown-split", place=run.recipe.where)
        lists = dict[str, Any]()
        for split, rows in datasets.items():
            if self.loss == "list_net":
                lists[split] = group(rows)
            elif self.loss == "multiple_negatives":
                self.check_negatives(split, rows)
                seed = run.recipe.train.seed if split == "train" else 0  # other runs are evaluated on the same texts
                lists[split] = draw(rows, self.columns[1:], self.negatives, seed)
            else:
                check_scores(getattr(rows, "labels", None), f"{run.recipe.where}: data.label: {split}")
        return lists or datasets

    @hookimpl
    def build_collator(self, run: Run) -> Any:
        tokenizer = self.text_model.tokenizer
        options = self.data.options
        self.join = Joiner(tokenizer, options.max_length, f"{run.recipe.where}: model")
        return super().build_collator(run)

    def build_batch(self, samples: list[dict[str, Any]]) -> Ragged:
        """The pairs of all samples: those of the first one, then those of the next ones."""
        import numpy as np
        import torch

        pairs = []
        for row in samples:
            for key in row:
                if key not in ("text", "label"):
                    pairs.append(self.join(row["text"], row[key]))
        batch = super().build_batch(pairs)
        batch.loss_weight = len(samples)
        if "label" in samples[0]:
            labels = np.array([sample["label"] for sample in samples], np.float32)
            batch.fixed["labels"] = torch.from_numpy(labels.reshape(len(samples), -1))
        return batch

    @hookimpl
    def build_model(self, run: Run) -> Any:
        self.set_activation(run.recipe)
        # Pairs without scores have no order of classes. An order sets the number itself, after it compared the classes
        # with those of the base.
        if self.order is None:
            self.text_model.config.num_labels = 1
        return super().build_model(run)

    def set_activation(self, recipe: Any) -> None:
        """Keep the activation function of a base whose head gives one score, such as Identity, or that of an adapter;
        otherwise Sigmoid. The export names it, so CrossEncoder computes the same scores as ``predict``."""
        from fastloop_embeddings.head import find_activation

        config = self.text_model.config
        where = f"{recipe.where}: model.name"
        adapter = self.text_model.adapter
        name = None
        if adapter is not None:  # its head replaces that of the base, so its own files come first
            name = read_score_activation(adapter.folder, where)
        if name is None and config.num_labels == 1:
            folder = find_folder(recipe, self.text_model.options, download=True)
            name = None if folder is None else read_score_activation(folder, where)
        self.activation_name = name or SIGMOID
        self.activation = find_activation(self.activation_name, where)
        config.sentence_transformers = {"activation_fn": self.activation_name}

    @hookimpl
    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Output:
        """``predictions`` and ``targets`` are scores and labels of the documents, (queries, most documents) each."""
        from fastloop_embeddings.losses import compute_of_lists

        scores = self.scores(model, batch)
        labels = batch.get("labels")
        if labels is None:  # pairs to predict, with which `packing` tries the model
            return Output(scores.mean(), scores)
        lists = scores.new_zeros(labels.shape).masked_scatter(~labels.isnan(), scores)
        pair = (scores, labels[:, 0]) if self.loss == "binary" else (lists, labels)
        return Output(compute_of_lists(lists, labels, self), *pair)

    @hookimpl
    def build_metrics(self) -> Any:
        from fastloop_embeddings.metrics import Ranking, collect

        return collect(None if self.loss == "binary" else Ranking())

    def output_columns(self) -> Sequence[str]:
        return ("score",)

    @hookimpl
    def predict(self, run: Run, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        scores = self.activation(self.scores(run.model, batch))
        if "labels" not in batch or self.loss == "binary":
            return {"score": scores}
        sizes = (~batch["labels"].isnan()).sum(1).tolist()  # a sample of a split has the scores of its documents
        return {"score": [part.tolist() for part in scores.split(sizes)]}

    def rank(self, run: Run, collection: Any) -> Any:
        return collection.rerank(run, self, self.candidates, self.scores)

    def scores(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """The score of each pair before the activation function, (pairs,) float32."""
        return compute(model, batch).logits.float()[:, 0]

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        from fastloop_embeddings.export import write_scores

        tokenizer = self.text_model.tokenizer  # CrossEncoder reads the length of pairs there
        max_length = self.data.options.max_length
        tokenizer.model_max_length = max_length
        tokenizer.init_kwargs["model_max_length"] = max_length
        super().export_model(run, folder)
        if run.is_main:
            write_scores(folder, self.activation_name, max_length)
        return folder


def check_scores(labels: Any, where: str) -> None:
    """Raise an error for scores that are not from 0 to 1.

    Args:
        labels: The scores of a split, (rows,); None: it has none.
    """
    if labels is None:
        return
    lowest = labels.min()
    highest = labels.max()
    if not 0 <= lowest <= highest <= 1:
        raise RecipeError(
            f"found numbers from {lowest:g} to {highest:g}, and the loss binary needs 0 to 1.",
            code="wrong-label",
            place=where,
        )
