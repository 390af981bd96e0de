"""Trains vectors of texts: the vectors of two texts of a row become similar, and those of other rows dissimilar.

    model: {name: distilbert-base-uncased}
    data:  {files: {train: questions.csv}, text: question, other: paraphrase, max_length: 64}
    plugins:
      - sentence-similarity: {temperature: 0.05}

The loss is cross entropy over the cosine similarities of a micro-batch (multiple negatives ranking: Henderson et al.,
2017, https://arxiv.org/abs/1705.00652). With a label, rows instead have a similarity between -1 and 1, and the loss is
its squared error:

    data:  {files: {train: scores.csv}, text: first, other: second, label: score, label_type: number}

`fastloop predict runs/similarity texts.csv` writes the vector of each text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastloop import Output, hookimpl, option
from fastloop_plugins.text import DataOptions, ModelOptions, TextTask, compute, pool


@dataclass(kw_only=True)
class PairData(DataOptions):
    """The ``data`` section."""

    other: str = option("The column of the texts that those of data.text are compared with.", default="other")


class SentenceSimilarity(TextTask):
    """Learns vectors of texts from pairs, similar ones or ones with a similarity."""

    name = "sentence-similarity"
    columns = ("text", "other")
    labels = "optional"
    sections = {"model": ModelOptions, "data": PairData}

    temperature: float = option(
        "Divides the similarities; smaller values weigh the most similar wrong text more.", default=0.05, gt=0
    )

    @hookimpl
    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Output:
        import torch
        from torch.nn.functional import cross_entropy, mse_loss

        first, second = self.vectors(model, batch).chunk(2)
        if "labels" in batch:
            found = (first * second).sum(1)
            return Output(mse_loss(found, batch["labels"]), found, batch["labels"])
        similar = first @ second.T / self.temperature
        rows = torch.arange(len(first), device=first.device)
        return Output(cross_entropy(similar, rows), similar.argmax(1) == rows, torch.ones_like(rows))

    @hookimpl
    def build_metrics(self) -> Any:
        from torchmetrics import MeanMetric, MetricCollection, PearsonCorrCoef

        if self.data.labels:
            return MetricCollection({"pearson": PearsonCorrCoef()})

        class Ranking(MeanMetric):
            """Share of texts whose other text is the most similar one of the micro-batch."""

            def update(self, predictions: Any, targets: Any) -> None:
                super().update(predictions.float())

        return MetricCollection({"accuracy": Ranking()})

    def output_columns(self) -> tuple[str, ...]:
        return ("vector",)

    @hookimpl
    def predict(self, run: Any, batch: Mapping[str, Any]) -> Mapping[str, list[Any]]:
        return {"vector": self.vectors(run.model, batch).tolist()}

    def vectors(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """The mean hidden state of each text, of length 1: (texts, D)."""
        from torch.nn.functional import normalize

        return normalize(pool(compute(model, batch).last_hidden_state, batch, "mean"))
