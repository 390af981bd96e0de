"""Trains text embeddings: vectors of texts whose angles measure similarity.

    data: {files: {train: questions.csv}, text: question, other: paraphrase, max_length: 64}
    plugins:
      - embedding: {loss: multiple_negatives}

``README.md`` describes its losses and options.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Output, RecipeError, UsageError, hookimpl
from fastloop_plugins.text import Model, TextTask, compute, pool

from fastloop_embeddings.cached_gradients import CachedGradients
from fastloop_embeddings.options import SCORED, SPANS_ROWS, EmbeddingOptions, SearchedData, read_columns

if TYPE_CHECKING:
    from pathlib import Path

    from fastloop import Batch, Run


class Embedding(TextTask):
    """Learns vectors of texts."""

    name = "embedding"
    sections = {"model": Model, "data": SearchedData}
    description = "learns vectors of texts"

    Config = EmbeddingOptions

    @hookimpl
    def check_recipe(self, recipe: Any) -> None:
        loss, data = self.config.loss, f"{recipe.where}: data"
        if loss == "triplet" and recipe.data.get("negative") is None:
            raise RecipeError(f"{data}.negative: missing, and the loss triplet reads it. Name a column of texts.")
        read_columns(self, recipe, loss in SCORED)
        if any(size < 1 for size in self.config.dims):
            raise RecipeError(f"{recipe.where}: plugins.embedding.dims: found {self.config.dims}, expected 1 or more.")
        self.folder = None if self.data.options.beir is None else recipe.find(self.data.options.beir)
        for name in ("corpus.jsonl", "queries.jsonl", "qrels") if self.folder is not None else ():
            if not (self.folder / name).exists():
                raise RecipeError(f"{data}.beir: {self.folder / name} is missing. Expected a folder as BEIR has it.")
        self.cached = CachedGradients(len(self.columns), self.vectors, self.loss)

    @hookimpl
    def check_run(self, run: Run) -> None:
        sharing = run.loaders.processes.world_size
        if self.config.loss in SPANS_ROWS and sharing not in (1, run.world_size):
            raise UsageError(
                f"embedding: found {sharing} shares of a step over {run.world_size} processes, and the loss "
                f"{self.config.loss} compares all rows. Use ddp or fsdp, or set loss to cosine or triplet."
            )

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

        from fastloop_embeddings.losses import cosine_similarities

        vectors, scores = self.vectors(model, batch), batch.get("labels")
        columns = vectors.chunk(len(self.columns))
        loss = self.cached.next_loss(vectors) if self.cached.waiting else self.loss(columns, scores)
        if scores is not None:
            return Output(loss, cosine_similarities(columns), scores)
        rows = len(columns[0])
        return Output(loss, torch.stack(columns, 1), batch["keys"].view(-1, rows).T)

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

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, run: Run, split: str) -> Generator[None, dict[str, float], dict[str, float]]:
        metrics = yield
        if self.folder is None:
            return metrics
        from fastloop_embeddings.search import search

        return metrics | search(run, self, self.folder, split, self.vectors)

    @hookimpl
    def predict(self, run: Run, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"vector": self.vectors(run.model, batch)}

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        from fastloop_embeddings.export import write_modules

        super().export_model(run, folder)
        if run.is_main:
            options = self.data.options
            write_modules(folder, self.vector_size(), self.config.pooling, self.config.normalize, options.max_length)
        return folder
