"""The base class of both tasks: the checks of their columns, and the collection that evaluations search."""

from __future__ import annotations

from collections.abc import Generator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError, hookimpl
from fastloop_plugins.text import TextTask

from fastloop_embeddings.data_section import EmbeddingData

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from fastloop import Run
    from numpy.typing import NDArray

RANKINGS = ("recall@1", "mrr@10", "ndcg@10")
"""Metrics of all rankings."""


def key_of(ids: NDArray[np.int32]) -> int:
    """A number for the ids of a text: 64 bits with a sign. Equal texts have equal ones."""
    return int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest(), "little", signed=True)


class PairTask(TextTask):
    """A task on pairs of texts. Its ``rank(run, judged)`` ranks the documents of a ``search.Judged`` collection."""

    folder: Path | None  # of the collection

    def read_columns(self, recipe: Any, loss: str, scored: bool) -> None:
        """Check the recipe. ``scored``: rows have a score each; otherwise texts that fit, and maybe one that does
        not."""
        data = f"{recipe.where}: data"
        negative = recipe.data.get("negative") is not None
        if scored and negative:
            raise RecipeError(
                f"the loss {loss} reads a score for each pair.",
                code="unknown-option",
                place=f"{data}.negative",
                remedy="Remove it.",
            )
        self.columns = ("text", "other", "negative") if negative else ("text", "other")
        self.labels = "required" if scored else "none"
        TextTask.check_recipe(self, recipe)
        if scored and self.data.label_type != "number":
            problem = f"found {self.data.label_type}, expected number: scores are numbers"
            raise RecipeError(f"{problem}.", code="wrong-label", place=f"{data}.label_type")
        beir_folder = self.data_options.beir
        self.folder = None if beir_folder is None else recipe.find(beir_folder)
        if self.folder is None:
            return
        beir = [f"beir_{name}" for name in ("recall@10", "recall@100", *RANKINGS)]
        self.adds_metrics = {**self.adds_metrics, **dict.fromkeys(beir, "max")}
        for name in ("corpus.jsonl", "queries.jsonl", "qrels"):
            if not (self.folder / name).exists():
                raise RecipeError(
                    f"{self.folder / name} is missing.",
                    code="file-missing",
                    place=f"{data}.beir",
                    expected="a folder as BEIR has it",
                )

    @property
    def data_options(self) -> EmbeddingData:
        """The options of the section ``data``."""
        options = self.data.options
        assert isinstance(options, EmbeddingData)
        return options

    def check_negatives(self, split: str, rows: Any) -> None:
        """Raise an error if all rows of train have the same second text, so that no row has a negative."""
        if split != "train" or len(rows) < 2 or self.data.stream is not None or "negative" in self.columns:
            return
        first = key_of(rows[0]["other"])
        if all(key_of(rows[index]["other"]) == first for index in range(1, len(rows))):
            raise RecipeError(
                f"all {len(rows)} rows of {split} have the same text here, and the loss multiple_negatives compares "
                "each row with other texts.",
                code="repeated-value",
                place=f"{self.data.where}.other",
                remedy="Name another column, or add data.negative.",
            )

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, run: Run, split: str) -> Generator[None, dict[str, float], dict[str, float]]:
        metrics = yield
        if self.folder is None:
            return metrics
        from fastloop_embeddings.search import evaluate

        return metrics | evaluate(run, self, split)
