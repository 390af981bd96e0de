"""The base class of all tasks: columns, tokens, batches and means of rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from fastloop import Output, Problem, RecipeError, hookimpl, option
from fastloop_plugins.text import Ragged, TextTask, template_text
from fastloop_plugins.toolkit import switch_dropout_off

from fastloop_preference import rows
from fastloop_preference.data_section import PreferenceData
from fastloop_preference.rows import COMPLETIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from fastloop import Batch, MetricMode, Run
    from fastloop_plugins.text import Split
    from fastloop_plugins.toolkit import DropoutRates
    from torch import Tensor

logger = logging.getLogger("fastloop")


class PreferenceTask(TextTask):
    """A task on prompts with completions.

    Attributes:
        keep: The rows to train on, see ``Completions``.
    """

    unused_modules = ()
    runs_after = ("lora",)  # which adds dropout and may replace the head
    keep: ClassVar[str] = "begun"
    # the reward of one completion says nothing without that of the other
    adds_metrics: Mapping[str, MetricMode | None] = {
        "rewards/chosen": None,
        "rewards/rejected": None,
        "rewards/margins": "max",
        "rewards/accuracies": "max",
    }
    totals: Any = 0.0  # of rewards since the last log point
    repeated: Collection[int] = ()  # the ids of the step's batches that repeat rows
    dropout: DropoutRates | None = None  # of the model, before it was switched off

    disable_dropout: bool = option("Train without dropout, of adapters, too.", default=True)

    read_conversation = staticmethod(rows.read_value)
    encode = staticmethod(rows.encode)
    chats_of = staticmethod(rows.chats_of)

    @hookimpl
    def check_recipe(self, recipe: Any) -> None:
        if recipe.data.get("streaming"):
            raise RecipeError(
                f"{self.name} reads all rows before training.",
                code="no-streaming",
                place=f"{recipe.where}: data.streaming",
                remedy="Remove it.",
            )
        keys = {field.name for field in fields(self.sections["data"])}
        conversations = [key for key in COMPLETIONS if key in keys]
        if recipe.data.get("prompt", "prompt") is not None:
            conversations.insert(0, "prompt")
        self.conversations = tuple(conversations)
        self.columns = self.conversations
        if recipe.data.get("system") is not None:
            self.columns = ("system", *self.conversations)
        super().check_recipe(recipe)
        name = self.data_options.chat_template
        if name is not None and name != "tokenizer" and recipe.inference is None:  # an exported tokenizer has it
            self.chat_template = template_text(recipe, name)

    @property
    def data_options(self) -> PreferenceData:
        """The options of the section ``data``."""
        options = self.data.options
        assert isinstance(options, PreferenceData)
        return options

    def prediction_columns(self) -> tuple[str, ...]:
        return tuple(key for key in self.columns if key != "rejected")

    def encoding_arguments(self) -> dict[str, Any]:
        options = self.data_options
        render = options.chat_template is not None or options.system is not None
        return super().encoding_arguments() | {"template": self.chat_template, "render": render, "keep": self.keep}

    @staticmethod
    def build_dataset(split: Split, arguments: Mapping[str, Any]) -> rows.Completions:
        names = [name for name in arguments["columns"] if name in COMPLETIONS]
        is_file = split.labels is None and "rejected" not in names  # each of its rows has a prediction
        return rows.Completions(split, names, arguments["max_length"], "all" if is_file else arguments["keep"])

    def check_dataset(self, split: str, dataset: rows.Completions) -> None:
        size = self.data.options.max_length
        if not len(dataset):
            raise RecipeError(
                f"no row of the {split} split fits into {size} tokens.",
                code="empty-split",
                place=f"{self.data.where}.max_length",
            )
        for finding, row_numbers in dataset.findings.items():
            if len(row_numbers):
                text = f"{len(row_numbers)} rows {finding}. The first is row {row_numbers[0] + 1} of the split."
                logger.warning(Problem(text, code="rows-left-out", place=f"data: {split}"))

    @hookimpl
    def before_prepare(self, run: Run, model: Any) -> None:
        if not self.disable_dropout or run.recipe.inference is not None:
            return
        self.dropout = switch_dropout_off(model)
        if self.dropout.names:
            self.log.info("dropout is off (disable_dropout): %s", ", ".join(self.dropout.names))

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        if self.dropout is not None:
            self.dropout.restore_configurations()
        return super().export_model(run, folder)

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[list[tuple[str, Any]]]:
        split = self.read_splits(run, count)["train"]
        decode = self.text_model.tokenizer.decode
        dataset = self.build_dataset(split, self.encoding_arguments())
        for index in range(len(dataset)):
            parts = ((name, row.tolist()) for name, row in dataset[index].items() if name in COMPLETIONS)
            yield [(name, [(decode([max(id, ~id)]), None if id < 0 else "") for id in row]) for name, row in parts]

    def build_batch(self, samples: list[dict[str, Any]]) -> Ragged:
        """The first completions of all samples, then the second ones."""
        names = [name for name in COMPLETIONS if name in samples[0]]
        completions = []
        for name in names:
            completions += [sample[name] for sample in samples]
        return self.join(completions, len(samples))

    def join(self, signed: Sequence[Any], count: int) -> Ragged:
        """A batch of completions of ``count`` rows, whose ids are ``~id`` in the prompt."""
        import numpy as np

        ids = [np.where(row < 0, ~row, row) for row in signed]
        columns = {"input_ids": (ids, self.text_model.tokenizer.pad_token_id)}
        return Ragged(columns=columns, loss_weight=count, tokens=sum(map(len, ids)))

    @hookimpl
    def build_metrics(self) -> Any:
        from torchmetrics import MetricCollection

        from fastloop_preference.metrics import Rewards

        return MetricCollection({"rewards": Rewards()})

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        self.repeated = {id(batch.inputs) for batch in batches if not batch.samples}

    def output(self, model: Any, batch: Mapping[str, Any], losses: Tensor, rewards: Tensor) -> Output:
        """The result of ``compute_loss``. Adds the rewards of a training step, (rows, 2), to those that the next log
        point shows, unless the batch repeats rows of another process."""
        import torch

        from fastloop_preference.metrics import sums

        rewards = rewards.detach()
        if model.training and torch.is_grad_enabled():
            sums_of_batch = sums(rewards)
            if id(batch) in self.repeated:
                sums_of_batch = torch.zeros_like(sums_of_batch)
            self.totals = self.totals + sums_of_batch
        return Output(losses.mean(), rewards, rewards)

    def output_columns(self) -> Sequence[str]:
        return ("reward",)

    def name_rewards(self, run: Run, rewards: Tensor) -> Mapping[str, Tensor]:
        """The predictions of a batch: ``reward``, or of a split's pairs ``chosen`` and ``rejected``."""
        paired = "rejected" in run.datasets[run.loaders.first_split][0]
        if not paired:
            return {"reward": rewards}
        chosen, rejected = rewards.chunk(2)
        return {"chosen": chosen, "rejected": rejected}

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step % run.recipe.train.log_every == 0:
            from fastloop_preference.metrics import means

            for name, value in means(self.save_state(run)["totals"]).items():
                run.log(name, value, reduce="main")
            self.totals = 0.0

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        import torch

        return {"totals": run.loaders.processes.all_reduce_sum(torch.as_tensor(self.totals).cpu())}

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        self.totals = state["totals"].to(run.device) * run.is_main
