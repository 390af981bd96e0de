"""Trains text embeddings: vectors of texts whose angles measure similarity.

    data: {files: {train: questions.csv}, text: question, other: paraphrase, max_length: 64}
    plugins:
      - embedding: {loss: multiple_negatives}

``README.md`` describes its losses and options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastloop import Output, RecipeError, hookimpl
from fastloop_plugins.text import Model, TextTask, compute, pool

from fastloop_embeddings.cached_gradients import CachedGradients
from fastloop_embeddings.options import RANKINGS, SCORED, SPANS_ROWS, EmbeddingOptions, PairData, PairTask

if TYPE_CHECKING:
    from pathlib import Path

    from fastloop import Batch, Run


class Embedding(PairTask):
    """Learns vectors of texts."""

    name = "embedding"
    sections = {"model": Model, "data": PairData}
    description = "learns vectors of texts"

    Config = EmbeddingOptions

    @hookimpl
    def check_recipe(self, recipe: Any) -> None:
        loss = self.config.loss
        if loss == "triplet" and recipe.data.get("negative") is None:
            raise RecipeError(f"{recipe.where}: data.negative: missing, and the loss triplet reads it. Name a column.")
        # of scores: torchmetrics does not declare which values of pearson are better
        self.adds_metrics = dict.fromkeys(("pearson",) if loss in SCORED else ("recall@10", *RANKINGS), "max")
        self.read_columns(recipe, loss in SCORED)
        self.cached = CachedGradients(len(self.columns), self.vectors, self.loss)

    def prediction_columns(self) -> tuple[str, ...]:
        return (self.config.predict,)

    def encoding_arguments(self) -> dict[str, Any]:
        query, document = self.config.query_prompt, self.config.document_prompt
        return super().encoding_arguments() | {"prompts": {"text": query, "other": document, "negative": document}}

    @staticmethod
    def encode(tokenizer: Any, rows: Sequence[Any], arguments: Mapping[str, Any]) -> Iterator[list[int]]:
        prompts = [arguments["prompts"][name] for name in arguments["columns"]]
        texts = ((row,) if isinstance(row, str) else row for row in rows)
        prompted: Any = (tuple(map(str.__add__, prompts, row)) for row in texts)
        return TextTask.encode(tokenizer, prompted, arguments)

    @hookimpl
    def train_step(self, run: Run, batches: list[Batch]) -> Any:
        return self.cached.step(run, batches) if self.config.loss in SPANS_ROWS else None

    def build_batch(self, samples: list[dict[str, Any]]) -> Any:
        """As in ``TextTask``, and ``keys``: a number for each text, (texts,) int64. Metrics find equal texts by it."""
        from hashlib import blake2b

        import torch

        batch = super().build_batch(samples)
        hashes = [blake2b(ids.tobytes(), digest_size=8).digest() for ids in batch.columns["input_ids"][0]]
        batch.fixed["keys"] = torch.tensor([int.from_bytes(each, "little", signed=True) for each in hashes])
        return batch

    @hookimpl
    def build_model(self, run: Run) -> Any:
        size = self.vector_size()
        if self.config.dims and max(self.config.dims) > size:
            found = f"found {max(self.config.dims)}, and vectors of the model have {size} numbers"
            raise RecipeError(f"{run.recipe.where}: plugins.embedding.dims: {found}. Expected at most {size}.")
        return super().build_model(run)

    def vector_size(self) -> int:
        """Numbers of a vector."""
        return int(self.text_model.config.get_text_config().hidden_size)

    def vectors(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """The vector of each text, (texts, D) float32."""
        from torch.nn.functional import normalize

        inputs = {name: value for name, value in batch.items() if name != "keys"}
        pooled = pool(compute(model, inputs).last_hidden_state, inputs, self.config.pooling)
        return normalize(pooled) if self.config.normalize else pooled

    @hookimpl
    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Output:
        import torch

        vectors, scores = self.vectors(model, batch), batch.get("labels")
        columns = vectors.chunk(len(self.columns))
        loss = self.cached.next_loss(vectors) if self.cached.waiting else self.loss(columns, scores)
        if scores is not None:
            return Output(loss, torch.cosine_similarity(*columns), scores)
        return Output(loss, torch.stack(columns, 1), batch["keys"].view(len(columns), -1).T)

    def loss(self, columns: Any, scores: Any) -> Any:
        """The loss of the vectors of each column, (N, D) each, summed over ``dims``."""
        import torch

        from fastloop_embeddings import losses

        with torch.autocast(columns[0].device.type, enabled=False):  # similarities in 16 bits would round too much
            parts = [losses.truncate(columns, size) for size in self.config.dims] or [columns]
            return torch.stack([losses.compute(part, scores, self.config) for part in parts]).sum()

    @hookimpl
    def build_metrics(self) -> Any:
        from fastloop_embeddings.metrics import Retrieval, collect

        return collect(None if self.config.loss in SCORED else Retrieval())

    def rank(self, run: Run, collection: Any) -> Any:
        return collection.search(run, self, self.vectors)

    @hookimpl
    def predict(self, run: Run, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"vector": self.vectors(run.model, batch)}

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        from fastloop_embeddings.export import write_modules

        super().export_model(run, folder)
        if run.is_main:
            write_modules(folder, self.vector_size(), self.data.options.max_length, self.config)
        return folder
