"""Trains a language model by reward functions: GRPO, Dr. GRPO, DAPO's loss and GSPO.

    data: {files: {train: questions.jsonl}, prompt: question, columns: [answer], max_length: 512}
    train: {batch_size: 8, lr: 1.0e-6}         # prompts of a step
    plugins:
      - grpo: {rewards: [rewards.py:is_correct], num_generations: 8, max_new_tokens: 256}

``README.md`` describes its options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Batch, Output, Problem, RecipeError, hookimpl, option
from fastloop_plugins.text import (
    Completion,
    ModelOptions,
    Ragged,
    ReferenceModel,
    TextTask,
    WithPlaces,
    add_loss,
    chunk_log_probabilities,
    end_tokens,
    log_probabilities,
    split,
    template_text,
)
from fastloop_plugins.toolkit import DropoutRates, counted, switch_dropout_off

from fastloop_grpo import prompts
from fastloop_grpo.completions import CompletionHooks, Sampling, check_completions, generate_by_model, seed_of
from fastloop_grpo.data_section import GRPOData, grpo_options
from fastloop_grpo.rewards import RewardFunction, RewardInputs, load_rewards, sum_rewards, try_functions

if TYPE_CHECKING:
    from pathlib import Path

    from fastloop import MetricMode, Run
    from fastloop_plugins.text import Split
    from torch import Tensor, nn

    from fastloop_grpo.losses import LossSettings
    from fastloop_grpo.rollout import CompletionSample, Rollout

LOSS_INPUTS = ("targets", "places", "completions", "sizes", "advantages", "old", "reference", "sampled", "rows")
"""Inputs of a batch that the model does not get."""
DIVIDED = "the model that generates needs whole layers. Use ddp or fsdp."


class GRPO(TextTask):
    """Learns completions that reward functions prefer to others of the same prompt (GRPO)."""

    name = "grpo"
    numerics = "changes-training"
    columns = ("prompt", "columns")
    inputs = ("prompt",)
    conversations = ("prompt",)
    values = ("columns",)
    auto_class = "AutoModelForCausalLM"
    sections = {"model": ModelOptions, "data": GRPOData}
    unused_modules = ()
    fallback_hooks = ("compute_loss", "generate_completions")
    hookspecs = CompletionHooks
    runs_after = ("lora",)  # which may replace the head
    runs_before = ("packing", "activation-checkpointing", "slot:strategy")  # which need the head as it will be
    conflicts = {
        "tensor-parallel": DIVIDED,
        "context-parallel": DIVIDED,
        "neftune": "noise would change the ratio of probabilities between two updates.",
    }
    adds_metrics: Mapping[str, MetricMode | None] = {"reward": "max", "completion_tokens": None, "truncated": "min"}

    rewards: list[str] = option("Reward functions: file.py:name, or package.module:name.")
    reward_weights: list[float] | None = option("The factor of each reward; null: 1.", default=None)
    num_generations: int = option("Completions of each prompt: a group.", default=8, ge=2)
    eval_generations: int | None = option(
        "Completions of each prompt in an evaluation; null: num_generations.", default=None, ge=1
    )
    max_new_tokens: int = option("Tokens of a completion at most.", default=256, ge=1)
    temperature: float = option("Divides the logits, in generation and in the loss.", default=1.0, gt=0)
    loss: Literal["grpo", "dapo", "dr_grpo", "gspo"] = option(
        "The mean over tokens (dapo), over completions of their means (grpo, gspo), or over max_new_tokens (dr_grpo).",
        default="dapo",
    )
    scale_rewards: bool | None = option(
        "Divide advantages by the group's standard deviation; null: except for dr_grpo.", default=None
    )
    beta: float = option("Weight of the divergence from the model before training.", default=0.0, ge=0)
    epsilon: float = option("Clips the ratio of probabilities below 1 - epsilon.", default=0.2, gt=0, lt=1)
    epsilon_high: float | None = option("Clips it above 1 + epsilon_high; null: epsilon.", default=None, gt=0)
    updates_per_generation: int = option("Optimizer steps on the same completions.", default=1, ge=1)
    mask_truncated: bool = option("Leave completions without an end out of the loss.", default=False)
    loss_batch_size: int | None = option(
        "Completions of a forward and backward pass; null: those of a micro-batch.", default=None, ge=1
    )
    generation_batch_size: int | None = option(
        "Completions that are generated at once; null: all of a step.", default=None, ge=1
    )
    sampler_cap: float = option(
        "Largest weight of a token that an engine has drawn with a smaller probability than the model's.",
        default=2.0,
        ge=1,
    )
    log_completions: int = option("Completions to log at each log point.", default=16, ge=0)

    read_conversation = staticmethod(prompts.read_prompt)
    encode = staticmethod(prompts.encode)
    chats_of = staticmethod(prompts.chats_of)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.functions: list[RewardFunction] = []
        self.splits: list[prompts.Prompts] = []
        self.ends: tuple[int, ...] = ()
        self.reference: ReferenceModel | None = None
        self.dropout = DropoutRates()  # of the model, before it was switched off
        self.rows: list[dict[str, Any]] = []  # to log after the step
        self.token_sums: Any = None  # over the tokens of a step: their number, clipped ones, divergences, weights

    # -- prompts -------------------------------------------------------------------------------------------------------

    @hookimpl
    def check_recipe(self, recipe: Any) -> None:
        if recipe.data.get("streaming"):
            raise RecipeError(
                "grpo reads all prompts before training.",
                code="no-streaming",
                place=f"{recipe.where}: data.streaming",
                remedy="Remove it.",
            )
        super().check_recipe(recipe)
        name = grpo_options(self.data.options).chat_template
        if name is not None and name != "tokenizer" and recipe.inference is None:  # an exported tokenizer has it
            self.chat_template = template_text(recipe, name)
        if recipe.inference is not None and recipe.inference.chunk:
            return  # predictions have no rewards
        self.functions = load_rewards(recipe, self.rewards, self.reward_weights, self.data.names_of("columns"))
        parts: dict[str, MetricMode | None] = {f"rewards/{function.name}": "max" for function in self.functions}
        self.adds_metrics = {**type(self).adds_metrics, **parts}

    def encoding_arguments(self) -> dict[str, Any]:
        inference = self.data.recipe.inference
        leaves_out = inference is None or not inference.chunk  # a prediction has a row for each prompt
        render = grpo_options(self.data.options).chat_template is not None
        arguments = {"template": self.chat_template, "render": render, "leaves_out": leaves_out}
        return super().encoding_arguments() | arguments

    @staticmethod
    def build_dataset(split: Split, arguments: Mapping[str, Any]) -> prompts.Prompts:
        return prompts.Prompts(split, arguments["max_length"])

    def check_dataset(self, split: str, dataset: prompts.Prompts) -> None:
        size = self.data.options.max_length
        if not len(dataset):
            raise RecipeError(
                f"no prompt of the {split} split has 1 to {size} tokens.",
                code="empty-split",
                place=f"{self.data.where}.max_length",
            )
        count = len(dataset.left_out)
        if count:
            first = dataset.left_out[0] + 1
            self.log.warning(
                Problem(
                    f"left out {counted(count, 'prompt')} with no token or more than {size} (data.max_length). The "
                    f"first is row {first}.",
                    code="rows-left-out",
                    place=f"data: {split}",
                )
            )

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        datasets: Mapping[str, Any] = super().build_datasets(run)
        self.splits = list(datasets.values())
        first = 0
        for dataset in self.splits:
            dataset.first = first
            first += len(dataset)
        self.check_positions(datasets)
        if self.functions:
            self.try_rewards()
        return datasets

    def check_positions(self, datasets: Mapping[str, prompts.Prompts]) -> None:
        """Raise an error if a model has too few positions for its longest prompt with a completion."""
        positions = getattr(self.text_model.config, "max_position_embeddings", None)
        longest = max(int(dataset.lengths.max()) for dataset in datasets.values())
        if isinstance(positions, int) and 0 < positions < longest + self.max_new_tokens:
            raise RecipeError(
                f"found {self.max_new_tokens}, and the longest prompt has {longest} tokens: more than the model's "
                f"{positions} positions.",
                code="out-of-range",
                place=f"{self.where}.max_new_tokens",
                remedy="Set one smaller, or data.max_length.",
            )

    def try_rewards(self) -> None:
        """Call the reward functions once, before a model is loaded: with an empty completion of the first prompt, and
        with one that repeats the prompt."""
        prompt, *others = self.splits[0].values(0)
        text = prompts.last_text(prompt)
        ids = self.splits[0][0]["input_ids"].tolist()
        end = end_tokens(self.text_model.tokenizer)[:1]
        completions = [Completion(end, ended=True), Completion(ids, ended=False)]
        inputs = self.reward_inputs([0], completions, ["", text], step=0, last_step=1)
        try_functions(self.functions, inputs)

    def row_values(self, row: int) -> list[Any]:
        """The prompt with this number among all splits, and the values of its further columns."""
        dataset, index = prompts.find_prompt(self.splits, row)
        return dataset.values(index)

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[list[tuple[str, Any]]]:
        read = self.read_splits(run, count)["train"]
        dataset = self.build_dataset(read, self.encoding_arguments())
        for index in range(len(dataset)):
            ids = dataset[index]["input_ids"].tolist()
            yield [("prompt", [(self.text_model.tokenizer.decode([token]), None) for token in ids])]

    # -- batches: of prompts, as the loader reads them, and of completions ---------------------------------------------

    @hookimpl
    def build_collator(self, run: Run) -> Callable[[list[Any]], Batch]:
        longest = self.data.options.max_length + self.max_new_tokens  # prompts with completions
        self.text_model.width(run, replace(self.data.options, max_length=longest))  # the first call defines the width
        return super().build_collator(run)

    @hookimpl(wrapper=True, specname="build_collator", tryfirst=True)  # around that of `packing`
    def add_places(self) -> Generator[None, Any, Callable[[list[Any]], Batch]]:
        return WithPlaces((yield))

    def build_batch(self, samples: list[Any]) -> Ragged:
        import torch

        if not isinstance(samples[0], dict):
            from fastloop_grpo.rollout import ragged_completions

            return ragged_completions(samples, self.text_model.tokenizer.pad_token_id, self.loss)
        batch = super().build_batch(samples)
        if "row" in samples[0]:
            batch.fixed["rows"] = torch.tensor([sample.get("row", 0) for sample in samples])
        return batch

    def completion_batches(self, run: Run, samples: Sequence[CompletionSample], count: int) -> list[Batch]:
        """``count`` micro-batches of samples, on the device; those without a sample have no weight."""
        from accelerate.utils import send_to_device

        from fastloop_grpo.rollout import empty_sample

        size = self.completions_at_once(run)
        collate = run.loaders.collators[run.loaders.first_split]
        batches = []
        for place in range(count):
            part = list(samples[place * size : (place + 1) * size])
            batch = collate(part or [empty_sample(self.text_model.tokenizer.pad_token_id)])
            if not part:
                batch = replace(batch, loss_weight=0)
            batch.inputs = send_to_device(batch.inputs, run.device)
            batches.append(batch)
        return batches

    def completions_at_once(self, run: Run) -> int:
        """Completions of a forward and backward pass."""
        return self.loss_batch_size or run.loaders.micro_batch_size * self.num_generations

    # -- the model -----------------------------------------------------------------------------------------------------

    @hookimpl
    def build_model(self, run: Run) -> Any:
        model = super().build_model(run)
        add_loss(model)
        self.ends = Sampling.ends_of(model)
        return model

    @hookimpl
    def before_prepare(self, run: Run, model: Any) -> None:
        if run.recipe.inference is not None:
            return
        self.dropout = switch_dropout_off(model)  # the ratio of an update compares two forward passes
        if self.dropout.names:
            self.log.info("dropout is off, so that ratios compare weights alone: %s", ", ".join(self.dropout.names))
        chunk_log_probabilities(run, model)
        if self.beta:
            self.reference = ReferenceModel(run, model)

    def second_models(self, run: Run) -> list[nn.Module]:
        return [] if self.reference is None else self.reference.models

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        self.dropout.restore_configurations()
        return super().export_model(run, folder)

    def log_probabilities(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Those of the tokens of completions, end to end: (tokens,) float32."""
        inputs = {name: value for name, value in batch.items() if name not in LOSS_INPUTS}
        return log_probabilities(model, inputs, batch["targets"], batch["places"], self.temperature)

    def add_reference(self, run: Run, batches: Sequence[Batch]) -> None:
        """Add the log-probabilities of the model before training to batches of completions."""
        if self.reference is None:
            return
        with self.reference.computing(run) as model:
            for batch in batches:
                batch.inputs["reference"] = self.log_probabilities(model, batch.inputs)

    # -- completions and their rewards ---------------------------------------------------------------------------------

    @hookimpl
    def generate_completions(
        self, run: Run, prompts: list[list[int]], count: int, options: Sampling, seed: int, seeds: list[int] | None
    ) -> list[Completion]:
        pad = self.text_model.tokenizer.pad_token_id
        return generate_by_model(run, prompts, count, options, pad, seeds or seed, self.generation_batch_size)

    def roll_out(
        self, run: Run, batches: Sequence[Mapping[str, Any]], count: int, draw: str, by_prompt: bool = False
    ) -> Rollout:
        """Complete the prompts of batches, and call the reward functions.

        Args:
            count: Completions of each prompt.
            draw: Names this drawing of tokens, which no other one of the run on any process may repeat.
            by_prompt: Draw the tokens of each prompt by seeds of its own, whatever other prompts the batch has.
        """
        import torch

        from fastloop_grpo.rollout import Rollout

        asked = []
        rows = []
        for batch in batches:
            asked += [ids.tolist() for ids in split(batch["input_ids"], batch)]
            rows += batch["rows"].tolist()
        name = f"{run.recipe.train.seed} {draw}"
        seeds = None
        if by_prompt:
            seeds = [seed_of(f"{name} {prompts.find_prompt(self.splits, row)[1]}") for row in rows]
        sampling = Sampling(self.max_new_tokens, self.temperature, self.ends)
        completions = run.hooks.generate_completions(
            run=run, prompts=asked, count=count, options=sampling, seed=seed_of(name), seeds=seeds
        )
        tokenizer = self.text_model.tokenizer
        config = self.text_model.config.get_text_config()
        vocabulary = max(len(tokenizer), config.vocab_size)  # a model may have more rows than its tokenizer tokens
        check_completions(completions, len(asked) * count, vocabulary)
        texts = tokenizer.batch_decode([completion.ids for completion in completions], skip_special_tokens=True)
        last_step = run.total_steps or run.state.step
        inputs = self.reward_inputs(rows, completions, texts, run.state.step, last_step)
        rewards = {}
        for function in self.functions:
            rewards[function.name] = function(inputs) if completions else []
        sums = torch.tensor(sum_rewards(self.functions, rewards), dtype=torch.float64)
        return Rollout(asked, completions, sums.view(len(asked), count), rewards, inputs)

    def reward_inputs(
        self, rows: Sequence[int], completions: Sequence[Completion], texts: list[str], step: int, last_step: int
    ) -> RewardInputs:
        """The arguments of reward functions, for the completions of prompts with these numbers.

        Args:
            last_step: The number of steps of the run.
        """
        count = len(completions) // max(len(rows), 1)
        values: list[list[Any]] = []
        for row in rows:
            values += [self.row_values(row)] * count
        is_chat = [not isinstance(value[0], str) for value in values]
        answers: list[Any] = []
        for text, chat in zip(texts, is_chat, strict=True):
            answers.append([{"role": "assistant", "content": text}] if chat else text)
        arguments: dict[str, Any] = {
            "prompts": [value[0] for value in values],
            "completions": answers,
            "completion_ids": [list(completion.ids) for completion in completions],
        }
        for place, name in enumerate(self.data.names_of("columns"), start=1):
            arguments[name] = [value[place] for value in values]
        return RewardInputs(arguments, step, last_step)

    # -- the step ------------------------------------------------------------------------------------------------------

    @hookimpl
    def train_step(self, run: Run, batches: list[Batch]) -> Tensor:
        import torch

        started = perf_counter()
        own_inputs = [batch.inputs for batch in batches if batch.samples]  # others repeat rows of another process
        rollout = self.roll_out(run, own_inputs, self.num_generations, f"train {run.state.step} {run.rank}")
        generated = perf_counter()
        scale = self.loss != "dr_grpo" if self.scale_rewards is None else self.scale_rewards
        advantages = rollout.advantages(scale)
        if (run.state.step + 1) % run.recipe.train.log_every == 0:
            self.rows = rollout.rows(advantages, self.log_completions)
        samples = rollout.samples(advantages, self.mask_truncated)
        count = math.ceil(len(samples) / self.completions_at_once(run))
        shared = run.processes.all_gather_object((count, rollout.means(), sum(rollout.sizes())))
        most = max(count for count, _, _ in shared)  # each process needs as many micro-batches
        micro_batches = self.completion_batches(run, samples, most)
        self.add_reference(run, micro_batches)
        self.token_sums = torch.zeros(4, device=run.device)
        for _ in range(self.updates_per_generation):
            loss = run.accumulate_gradients(micro_batches)
            run.apply_gradients(loss)
        run.state.tokens += int(sum(tokens for _, _, tokens in shared))
        has_engine = any("sampled" in batch.inputs for batch in micro_batches)
        self.log_step(run, [means for _, means, _ in shared], has_engine)
        run.log("seconds/generation", generated - started, reduce="main")
        run.log("seconds/training", perf_counter() - generated, reduce="main")
        return loss

    @hookimpl
    def after_step(self, run: Run) -> None:
        if self.rows:
            run.log_rows("completions", self.rows)
            self.rows = []

    def log_step(self, run: Run, means: Sequence[Mapping[str, Any]], has_engine: bool) -> None:
        """Log the means of a step over all processes. ``has_engine``: an engine reports log-probabilities."""
        from fastloop_grpo.metrics import join_means

        for name, mean in join_means(means).items():
            if mean.count:
                run.log(name, mean.value(), reduce="main")
        tokens, clipped, divergence, weights = run.processes.all_reduce_sum(self.token_sums.cpu()).tolist()
        self.token_sums = None
        run.log("clipped", clipped / max(tokens, 1), reduce="main")
        if self.reference is not None:
            run.log("kl", divergence / max(tokens, 1), reduce="main")
        if has_engine:
            run.log("sampler_weight", weights / max(tokens, 1), reduce="main")

    def loss_settings(self) -> LossSettings:
        from fastloop_grpo.losses import LossSettings

        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return LossSettings(self.loss, self.beta, self.epsilon, high, self.max_new_tokens, self.sampler_cap)

    @hookimpl
    def compute_loss(self, run: Run, model: Any, batch: dict[str, Any]) -> Output:
        """The loss of completions; of prompts, minus their mean reward, whose ``predictions`` are the values of
        ``GroupMeans``. With gradients, the model is only tried: see ``rollout.trial_batch``."""
        import torch

        from fastloop_grpo.losses import policy_loss
        from fastloop_grpo.rollout import trial_batch

        if "targets" not in batch and not torch.is_grad_enabled():
            return self.evaluate_prompts(run, batch)
        if "targets" not in batch:
            positions = getattr(self.text_model.config, "max_position_embeddings", None)
            batch = trial_batch(batch, LOSS_INPUTS, self.completions_at_once(run), self.max_new_tokens, positions)
            self.add_reference(run, [Batch(batch)])
        own = self.log_probabilities(model, batch)
        if "old" not in batch:  # the first update
            batch["old"] = own.detach()
        result = policy_loss(own, batch, self.loss_settings())
        if self.token_sums is not None:
            tokens = torch.full_like(result.loss, len(own)).detach()
            sums = [tokens, result.clipped.sum(), result.divergence.sum(), result.weights.sum()]
            self.token_sums += torch.stack(sums)
        return Output(result.loss)

    # -- evaluation and prediction -------------------------------------------------------------------------------------

    def evaluate_prompts(self, run: Run, batch: Mapping[str, Any]) -> Output:
        """Completions of prompts of an evaluation: each draws with the same seeds, also where other splits come before
        this one, in batches of any size and on any number of processes."""
        count = self.eval_generations or self.num_generations
        rollout = self.roll_out(run, [batch], count, "evaluate", by_prompt=True)
        _, values = rollout.group_values()
        values = values.to(run.device)
        return Output(-values[:, 0].nan_to_num().mean(), values, values)

    @hookimpl
    def build_metrics(self) -> Any:
        from torchmetrics import MetricCollection

        from fastloop_grpo.metrics import GroupMeans

        parts = [f"rewards/{function.name}" for function in self.functions]
        return MetricCollection({"groups": GroupMeans(["reward", *parts, "completion_tokens", "truncated"])})

    @hookimpl
    def predict(self, run: Run, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The most probable completion of each prompt."""
        tokenizer = self.text_model.tokenizer
        asked = [ids.tolist() for ids in split(batch["input_ids"], batch)]
        sampling = Sampling(self.max_new_tokens, 0.0, self.ends)
        completions = generate_by_model(run, asked, 1, sampling, tokenizer.pad_token_id, 0, self.generation_batch_size)
        ids = [completion.ids for completion in completions]
        return {"text": tokenizer.batch_decode(ids, skip_special_tokens=True)}
