"""Trains a language model on completions that are good or not (KTO).

    data: {files: {train: answers.jsonl}, max_length: 1024}
    plugins:
      - kto: {beta: 0.1}

``README.md`` describes its options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import Output, RecipeError, hookimpl, option
from fastloop_plugins.text import ModelOptions, Ragged, WithPlaces, compute_all

from fastloop_preference.data_section import LabelledData
from fastloop_preference.policy import PolicyTask, mean_of_step

if TYPE_CHECKING:
    from fastloop import Batch, MetricMode, Run

LABELS = (["False", "True"], ["false", "true"], ["0", "1"])
"""The labels of other and of good completions."""


class KTO(PolicyTask):
    """Learns from completions that are good or not (KTO).

    The divergence of the model from its reference is estimated over all rows of an optimizer step, or of an evaluated
    split, from each prompt with the completion of another row.
    """

    name = "kto"
    labels = "required"
    completions = 1
    sections = {"model": ModelOptions, "data": LabelledData}
    conflicts = {"packing": "it computes each prompt with the completion of another row in a batch of its own."}
    divergence: Any = None
    adds_metrics: Mapping[str, MetricMode | None] = {  # without pairs, there are no accuracies
        "rewards/chosen": None,
        "rewards/rejected": None,
        "rewards/margins": "max",
    }

    desirable_weight: float = option("Weight of the loss of good completions.", default=1.0, gt=0)
    undesirable_weight: float = option("Weight of the loss of other completions.", default=1.0, gt=0)

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        datasets = super().build_datasets(run)
        if self.data.classes not in LABELS:
            where = f"{self.data.where}.label"
            listed = ", ".join(self.data.classes)
            raise RecipeError(
                code="wrong-label", place=where, found=f"the labels {listed}", expected="true and false, or 1 and 0"
            )
        return datasets

    @hookimpl
    def build_collator(self, run: Run) -> Any:
        return WithOther(WithPlaces(super().build_collator(run)))

    def build_batch(self, samples: list[dict[str, Any]]) -> Ragged:
        import torch

        batch = super().build_batch(samples)
        if "label" in samples[0]:
            batch.fixed["labels"] = torch.tensor([sample["label"] == 1 for sample in samples])
        return batch

    def distances(self, run: Run, model: Any, batch: Mapping[str, Any]) -> Any:
        """How much more probable other completions are than under the reference, (rows,), without gradients."""
        import torch

        with torch.no_grad():
            return self.ratios(run, self.log_probabilities(model, batch["other"])[:, 0], batch["other"])

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        super().before_step(run, batches)
        distances = [self.distances(run, run.model, batch.inputs)[: batch.samples].sum() for batch in batches]
        self.divergence = mean_of_step(run, sum(distances), batches).clamp(min=0)
        run.log("kl", self.divergence, reduce="main")

    @hookimpl
    def before_evaluate(self, run: Run, split: str) -> None:
        data = run.datasets[split]
        collate = run.loaders.collators[split]
        distances = compute_all(run, run.model, data, collate, partial(self.distances, run))
        self.divergence = distances.mean().clamp(min=0)

    @hookimpl
    def compute_loss(self, run: Run, model: Any, batch: Mapping[str, Any]) -> Output:
        """``predictions`` are the rewards of good and of other completions, (rows, 2), with NaN for one of them."""
        import torch

        from fastloop_preference import losses

        good = batch["labels"].bool()
        divergence = self.divergence
        ratios = self.ratios(run, self.log_probabilities(model, batch)[:, 0], batch)
        if divergence is None:  # a plugin tries the model before training
            divergence = self.distances(run, model, batch).mean().clamp(min=0)
        both = (self.beta * ratios)[:, None].where(torch.stack([good, ~good], 1), torch.nan)
        loss = losses.kto(ratios, good, divergence, self.beta, self.desirable_weight, self.undesirable_weight)
        return self.output(model, batch, loss, both)

    def keyed(self, model: Any, batch: Mapping[str, Any]) -> Any:
        import torch

        return torch.cat([super().keyed(model, batch), super().keyed(model, batch["other"])], 1)


class WithOther:
    """Collates samples, and their prompts with the completions of other rows, as ``other``."""

    deterministic = True

    def __init__(self, collate: Callable[[list[Any]], Batch]) -> None:
        self.collate = collate

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        batch = self.collate(samples)
        if "other" not in samples[0]:
            return batch
        mismatched = self.collate([{"completion": sample["other"]} for sample in samples])
        inputs = {**batch.inputs, "other": mismatched.inputs}
        return replace(batch, inputs=inputs, tokens=batch.tokens + mismatched.tokens)
