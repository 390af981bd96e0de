"""Trains a language model on pairs of completions, of which one is better: DPO, robust DPO, IPO and ORPO.

    data: {files: {train: pairs.jsonl}, max_length: 1024}
    plugins:
      - dpo: {loss: sigmoid, beta: 0.1}

``README.md`` describes its losses and options.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Output, RecipeError, hookimpl, option
from fastloop_plugins.text import ModelOptions, WithPlaces

from fastloop_preference.data_section import ComparisonData
from fastloop_preference.policy import PolicyTask, mean_of_step

if TYPE_CHECKING:
    from fastloop import Batch, Run
    from torch import Tensor


class DPO(PolicyTask):
    """Learns to prefer the chosen completion of each row (DPO, IPO, ORPO)."""

    name = "dpo"
    sections = {"model": ModelOptions, "data": ComparisonData}
    targets: Any = None  # mean number of targets of a chosen completion with its prompt, for orpo

    loss: Literal["sigmoid", "robust", "ipo", "orpo"] = option(
        "The loss; orpo trains without a reference.", default="sigmoid"
    )
    label_smoothing: float = option(
        "robust: share of rows whose chosen completion is the worse one.", default=0.0, ge=0, lt=0.5
    )

    @property
    def reads_prompts(self) -> bool:  # type: ignore[override]
        """Whether the loss needs the log-probabilities of prompts, too."""
        return self.loss == "orpo"

    @hookimpl(wrapper=True, specname="build_collator", tryfirst=True)  # around that of `packing`
    def add_places(self) -> Generator[None, Any, Callable[[list[Any]], Batch]]:
        return WithPlaces((yield))

    @hookimpl
    def check_recipe(self, recipe: Any) -> None:
        super().check_recipe(recipe)
        self.has_reference = self.loss != "orpo"
        if self.label_smoothing and self.loss != "robust":
            where = f"{recipe.where}: plugins.dpo.label_smoothing"
            raise RecipeError(
                f"it is for the loss robust, and the loss is {self.loss}.",
                code="unknown-option",
                place=where,
                remedy="Remove it.",
            )

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        super().before_step(run, batches)
        if self.loss == "orpo":  # it averages over the tokens of the whole step
            counts = [batch.inputs["sizes"].chunk(2)[0][: batch.samples, 0].sum() - batch.samples for batch in batches]
            self.targets = mean_of_step(run, sum(counts).float(), batches)

    @hookimpl
    def before_evaluate(self, run: Run, split: str) -> None:
        if self.loss == "orpo":
            data = run.datasets[split]  # a plugin such as `folds` may have replaced it
            self.targets = sum(len(data[index]["chosen"]) for index in range(len(data))) / len(data) - 1

    @hookimpl
    def compute_loss(self, run: Run, model: Any, batch: Mapping[str, Any]) -> Output:
        """``predictions`` are the rewards of both completions, (rows, 2)."""
        from fastloop_preference import losses

        log_probabilities = self.log_probabilities(model, batch)
        of_completions = log_probabilities[:, 0]
        with_prompts = log_probabilities[:, 1]
        sizes = batch["sizes"].view(2, -1, 2)  # (chosen and rejected, rows, all tokens and those of the completion)
        if self.loss == "orpo":
            rewards = of_completions.view(2, -1) / sizes[..., 1]
            targets = self.targets if self.targets is not None else sizes[0, :, 0].float().mean() - 1
            chosen, _ = with_prompts.view(2, -1)
            loss = losses.orpo(rewards, self.beta) - chosen / targets
        else:
            rewards = self.ratios(run, of_completions, batch).view(2, -1)
            loss = losses.dpo(rewards, sizes[..., 1], self.loss, self.beta, self.label_smoothing)
        return self.output(model, batch, loss, self.beta * rewards.T)

    def rewards(self, run: Run, batch: Mapping[str, Any]) -> Tensor:
        if self.has_reference:
            return super().rewards(run, batch)
        averages: Tensor = self.log_probabilities(run.model, batch)[:, 0] / batch["sizes"][:, 1]
        return self.beta * averages
