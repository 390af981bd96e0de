"""Trains a reward model: a classifier of texts with one score, by pairs of completions.

    data: {files: {train: pairs.jsonl}, max_length: 1024}
    plugins:
      - reward-model

``README.md`` describes its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Output, hookimpl, option
from fastloop_plugins.text import ModelOptions, compute

from fastloop_preference.data_section import ComparisonData
from fastloop_preference.task import PreferenceTask

if TYPE_CHECKING:
    from fastloop import Run


class RewardModel(PreferenceTask):
    """Learns scores of completions from pairs."""

    name = "reward-model"
    auto_class = "AutoModelForSequenceClassification"
    keep = "whole"
    sections = {"model": ModelOptions, "data": ComparisonData}
    conflicts = {"packing": "transformers reads the score of a text at its last token, which only padded rows have."}

    center: float = option("Weight of the squared sum of both rewards, which keeps them near 0.", default=0.0, ge=0)

    @hookimpl
    def build_model(self, run: Run) -> Any:
        self.text_model.config.num_labels = 1
        return super().build_model(run)

    def scores(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """The score of each completion, (completions,) float32."""
        return compute(model, batch).logits.float()[:, 0]

    @hookimpl
    def compute_loss(self, model: Any, batch: Mapping[str, Any]) -> Output:
        """``predictions`` are the scores of both completions, (rows, 2)."""
        from fastloop_preference import losses

        scores = self.scores(model, batch).view(2, -1)
        return self.output(model, batch, losses.reward(scores, self.center), scores.T)

    @hookimpl
    def predict(self, run: Run, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.name_rewards(run, self.scores(run.model, batch))
