"""Trains text embeddings: vectors of texts whose angles measure similarity.

    data: {files: {train: questions.csv}, text: question, other: paraphrase, max_length: 64}
    plugins:
      - embedding: {loss: multiple_negatives}

``README.md`` describes its losses and options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Output, RecipeError, hookimpl, option
from fastloop_plugins.text import ModelOptions, TextTask, compute
from pydantic import PositiveInt

from fastloop_embeddings.cached_gradients import CachedGradients
from fastloop_embeddings.data_section import EmbeddingData
from fastloop_embeddings.modules import (
    SentenceModules,
    check_options,
    find_folder,
    make_modules,
    read_modules,
)
from fastloop_embeddings.task import RANKINGS, PairTask, key_of

if TYPE_CHECKING:
    from pathlib import Path

    from fastloop import Batch, Run
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from fastloop_embeddings.head import Head

SPANS_ROWS = ("multiple_negatives", "cosent")
"""Losses that compare the rows of a batch with each other. Those of parts of a batch do not add up to its loss."""
SCORED = ("cosent", "cosine")
"""Losses that read a score for each row. The others read pairs of similar texts."""


class Embedding(PairTask):
    """Learns vectors of texts."""

    name = "embedding"
    samples_are_rows = True
    sections = {"model": ModelOptions, "data": EmbeddingData}

    loss: Literal["multiple_negatives", "cosent", "cosine", "triplet"] = option(
        "The loss: the first and the last need similar texts, the others a score for each row.",
        default="multiple_negatives",
    )
    pooling: Literal["mean", "first", "last"] | None = option(
        "Which tokens give the vector of a text; null: those of a Sentence Transformers model, or mean.", default=None
    )
    normalize: bool | None = option(
        "Scale the vectors to length 1; null: as a Sentence Transformers model does, or true.", default=None
    )
    temperature: float = option("multiple_negatives, cosent: divides similarities.", default=0.05, gt=0)
    margin: float = option("triplet: how much nearer the similar text must be.", default=1.0, gt=0)
    query_prompt: str | None = option(
        "Text before each text of data.text; null: the model's prompt for queries, or none.", default=None
    )
    document_prompt: str | None = option(
        "Text before each text of data.other and data.negative; null: the model's, or none.", default=None
    )
    predicted_column: Literal["text", "other"] = option(
        "The column that a file to predict has: data.text or data.other.", default="text", key="predict"
    )
    dims: list[PositiveInt] = option(
        "Sum the loss over the first so many numbers of vectors; empty: use all.", default_factory=list
    )

    head: Head  # of the built model
    _modules: SentenceModules | None = None

    cached: CachedGradients  # this and the next attribute: from check_recipe on
    recipe: Any

    @hookimpl
    def check_recipe(self, recipe: Any) -> None:
        loss = self.loss
        if loss == "triplet" and recipe.data.get("negative") is None:
            raise RecipeError(
                "missing, and the loss triplet reads it.",
                code="missing-value",
                place=f"{recipe.where}: data.negative",
                remedy="Name a column.",
            )
        # of scores: torchmetrics does not declare which values of pearson are better
        self.adds_metrics = dict.fromkeys(("pearson",) if loss in SCORED else ("recall@10", *RANKINGS), "max")
        self.read_columns(recipe, loss, scored=loss in SCORED)
        self.cached = CachedGradients(len(self.columns), self.vectors, self.batch_loss)
        self.recipe = recipe
        self._modules = self.read_base(download=False)

    def read_base(self, download: bool) -> SentenceModules | None:
        """The modules of the model that ``model.name`` names, or those of the options for another one. None for a model
        of the hub, unless ``download`` is set."""
        folder = find_folder(self.recipe, self.text_model.options, download)
        base = None if folder is None else read_modules(folder, f"{self.recipe.where}: model.name")
        if base is not None:
            check_options(self, base, f"{self.recipe.where}: plugins.embedding")
            return base
        is_on_hub = folder is None and self.text_model.options.name is not None
        return None if is_on_hub and not download else make_modules(self)

    def sentence_modules(self) -> SentenceModules:
        """The modules that compute a vector."""
        if self._modules is None:
            self._modules = self.read_base(download=True)
            assert self._modules is not None
        return self._modules

    def prompts(self) -> dict[str, str]:
        """The prompts of the recipe, or those of the base."""
        query, document = self.sentence_modules().find_prompts()
        if self.query_prompt is not None:
            query = self.query_prompt
        if self.document_prompt is not None:
            document = self.document_prompt
        return {"query": query, "document": document}

    def prediction_columns(self) -> tuple[str, ...]:
        return (self.predicted_column,)

    def encoding_arguments(self) -> dict[str, Any]:
        prompts = self.prompts()
        of_columns = {"text": prompts["query"], "other": prompts["document"], "negative": prompts["document"]}
        arguments = super().encoding_arguments() | {"prompts": of_columns}
        return arguments | {"lowercase": True} if self.sentence_modules().lowercase else arguments

    @staticmethod
    def encode(
        tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Iterator[list[int]]:
        prompts = [arguments["prompts"][name] for name in arguments["columns"]]
        texts = ((row,) if isinstance(row, str) else row for row in rows)
        prompted: Any = (tuple(map(str.__add__, prompts, row)) for row in texts)
        if arguments.get("lowercase"):
            prompted = (tuple(text.lower() for text in row) for row in prompted)
        return TextTask.encode(tokenizer, prompted, arguments)

    def check_dataset(self, split: str, dataset: Any) -> None:
        super().check_dataset(split, dataset)
        if self.loss == "multiple_negatives":
            self.check_negatives(split, dataset)

    @hookimpl
    def train_step(self, run: Run, batches: list[Batch]) -> Any:
        return self.cached.step(run, batches) if self.loss in SPANS_ROWS else None

    def build_batch(self, samples: list[dict[str, Any]]) -> Any:
        """As in ``TextTask``, and ``keys``: a number for each text, (texts,) int64, by which the loss and metrics find
        equal texts."""
        import torch

        batch = super().build_batch(samples)
        batch.fixed["keys"] = torch.tensor([key_of(ids) for ids in batch.columns["input_ids"][0]])
        return batch

    @hookimpl
    def build_model(self, run: Run) -> Any:
        from fastloop_embeddings.head import NAME, build_head

        size = self.vector_size()
        if self.dims and max(self.dims) > size:
            problem = f"found {max(self.dims)}, and vectors of the model have {size} numbers"
            raise RecipeError(
                f"{problem}.",
                code="out-of-range",
                place=f"{run.recipe.where}: plugins.embedding.dims",
                expected=f"at most {size}",
            )
        model = super().build_model(run)
        pooled = self.hidden_size() * len(self.sentence_modules().pooling_modes())
        self.head = build_head(self.sentence_modules(), pooled, f"{run.recipe.where}: model.name")
        if [*self.head.parameters()]:
            model.add_module(NAME, self.head)
        return model

    @hookimpl
    def check_run(self, run: Run) -> None:
        from fastloop_embeddings.head import is_sharded

        if is_sharded(self.head_of(run.model)):
            folder = self.sentence_modules().folder
            problem = f"{folder} has a module Dense, whose weights cannot be sharded. Use ddp."
            raise RecipeError(problem, code="unsupported-model", place=f"{run.recipe.where}: model.name")

    def hidden_size(self) -> int:
        """Numbers of a token's vector."""
        return int(self.text_model.config.get_text_config().hidden_size)

    def vector_size(self) -> int:
        """Numbers of a text's vector."""
        size = self.hidden_size() * len(self.sentence_modules().pooling_modes())
        for stage in self.sentence_modules().stages:
            size = int(stage.config.get("out_features", size))
        return size

    def head_of(self, model: nn.Module) -> Head:
        """The modules after the pooling. Those with weights are part of the model, maybe of a copy."""
        from fastloop_embeddings.head import Head

        for module in model.modules():
            if isinstance(module, Head):
                return module
        return self.head

    def vectors(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """The vector of each text, (texts, D) float32."""
        from fastloop_embeddings.head import pool_modes

        inputs = {name: value for name, value in batch.items() if name != "keys"}
        states = compute(model, inputs).last_hidden_state
        return self.head_of(model)(pool_modes(states, inputs, self.sentence_modules().pooling_modes()))

    @hookimpl
    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Output:
        import torch

        vectors = self.vectors(model, batch)
        scores = batch.get("labels")
        columns = vectors.chunk(len(self.columns))
        keys = self.cached.row_keys(batch)
        loss = self.cached.next_loss(vectors) if self.cached.waiting else self.batch_loss(columns, scores, keys)
        if scores is not None:
            return Output(loss, torch.cosine_similarity(*columns), scores)
        return Output(loss, torch.stack(columns, 1), keys)

    def batch_loss(self, columns: Any, scores: Any, keys: Any) -> Any:
        """The loss of the vectors of each column, (N, D) each, summed over ``dims``. ``keys``: (N, columns)."""
        import torch

        from fastloop_embeddings import losses

        with torch.autocast(columns[0].device.type, enabled=False):  # similarities in 16 bits would round too much
            parts = [losses.truncate(columns, size) for size in self.dims] or [columns]
            return torch.stack([losses.compute(part, scores, self, keys) for part in parts]).sum()

    @hookimpl
    def build_metrics(self) -> Any:
        from fastloop_embeddings.metrics import Retrieval, collect

        return collect(None if self.loss in SCORED else Retrieval())

    def rank(self, run: Run, collection: Any) -> Any:
        return collection.search(run, self, self.vectors)

    def output_columns(self) -> Sequence[str]:
        return ("vector",)

    @hookimpl
    def predict(self, run: Run, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"vector": self.vectors(run.model, batch)}

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        from fastloop_embeddings.export import write_modules
        from fastloop_embeddings.head import without_head

        model = run.unwrap_model()
        head = self.head_of(model)
        with without_head(model):  # its weights have files of their own
            super().export_model(run, folder)
        if run.is_main:
            length = self.data.options.max_length
            write_modules(folder, self.sentence_modules(), head, self.prompts(), self.hidden_size(), length)
        return folder
