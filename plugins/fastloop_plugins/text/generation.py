"""Generation of texts: settings of a recipe over those of the model's ``generation_config.json``, and the call itself.

Prediction, the evaluation of generated texts and exports use the same ``GenerationConfig``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from fastloop import Plugin, PluginError, RecipeError, option
from fastloop.options import parse
from fastloop.probing import uncompiled
from fastloop_plugins.models.hub import MessagesOnce, quiet

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import GenerationConfig

    from fastloop import Run

logger = logging.getLogger("fastloop")

BEAM_SETTINGS = ("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty")
"""Settings without effect unless ``num_beams`` is 2 or more. Transformers saves no ``GenerationConfig`` with such."""
SAMPLING_SETTINGS = (
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip
"""Settings without effect unless ``do_sample`` is true."""
OUTPUT_SETTINGS = (
    "return_dict_in_generate", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits",
)  # fmt: skip
"""Settings by which ``generate`` returns more than one row of ids for each input."""

SHARED_SETTINGS = {
    "max_new_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "do_sample": "temperature",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Setting of ``generate`` -> the option that sets it in each task that generates texts."""


@dataclass(kw_only=True)
class GenerationSettings:
    """``plugins.<task>.generation``: settings of ``generate`` that replace those of the model."""

    min_length: int | None = option(
        "Tokens at least: of a target with its start and end token, or of a prompt with its answer.", default=None, ge=0
    )
    min_new_tokens: int | None = option("Tokens to generate at least, before the end token.", default=None, ge=0)
    no_repeat_ngram_size: int | None = option("Generate no sequence of this many tokens twice.", default=None, ge=0)
    encoder_no_repeat_ngram_size: int | None = option(
        "Generate no sequence of this many tokens that the input has.", default=None, ge=0
    )
    repetition_penalty: float | None = option(
        "Makes tokens that are there already less probable; 1: does not.", default=None, gt=0
    )
    length_penalty: float | None = option(
        "Exponent of the length by which beam search divides a score; above 0: longer texts.", default=None
    )
    early_stopping: bool | Literal["never"] | None = option(
        "Whether beam search stops once there are num_beams finished texts.", default=None
    )
    forced_bos_token_id: int | None = option(
        "The first token of each text, such as the language of mBART.", default=None, ge=0
    )
    forced_eos_token_id: int | list[int] | None = option(
        "The last token of a text that reaches the maximum length.", default=None
    )
    suppress_tokens: list[int] | None = option("Tokens that are never generated.", default=None)
    begin_suppress_tokens: list[int] | None = option("Tokens that are not generated first.", default=None)
    bad_words_ids: list[list[int]] | None = option("Sequences of tokens that are never generated.", default=None)
    remove_invalid_values: bool | None = option("Replace NaN and infinity in the logits.", default=None)
    num_beams: int | None = option("Candidates that beam search keeps; 1: no beam search.", default=None, ge=1)


class GenerationOptions(Plugin):
    """Options of tasks that generate texts."""

    generation: dict[str, Any] | None = option(
        "Settings of transformers' generate instead of those in the model's generation_config.json, such as "
        "{min_length: 0, no_repeat_ngram_size: 3}; null unsets one.",
        default=None,
    )
    samples: int = option(
        "Validation prompts that the model answers at each evaluation while it trains, for the log, the run folder, "
        "the report, TensorBoard and trackers.",
        default=0,
        ge=0,
    )


def check_generation(
    changes: Mapping[str, Any] | None, own: Mapping[str, str], num_beams: int, recipe: str, task: str
) -> dict[str, Any]:
    """The settings of ``plugins.<task>.generation``. A value of None unsets the model's.

    Args:
        changes: The option, as in the recipe.
        own: Setting of ``generate`` -> the option of the task that sets it.
        num_beams: The task's own, unless it is a setting.
        recipe: The recipe, for messages.
        task: The place of the task's options, such as ``plugins.seq2seq``.

    Raises:
        RecipeError: A setting is unknown, has the wrong type or no effect, or the task has an option for it.
    """
    changes = changes or {}
    where = f"{recipe}: {task}.generation"
    for name in changes:
        if name in own:
            raise RecipeError(
                "the task has an option for it.",
                code="set-twice",
                place=f"{where}.{name}",
                remedy=f"Set {task}.{own[name]} instead.",
            )
    parsed = parse(GenerationSettings, changes, where)
    settings = {name: getattr(parsed, name) for name in changes}
    if (settings.get("num_beams") or num_beams) == 1:
        for name in BEAM_SETTINGS:
            if settings.get(name) is not None:
                raise RecipeError(
                    "it is for beam search, and num_beams is 1.",
                    code="unknown-option",
                    place=f"{where}.{name}",
                    remedy="Remove it, or set num_beams.",
                )
    return settings


def check_token_ids(settings: Mapping[str, Any], vocab_size: int, where: str) -> None:
    """Check that the settings name tokens of the model.

    Args:
        where: The place of the settings, for messages.

    Raises:
        RecipeError: A token id is too large.
    """
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        value = settings.get(name)
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if token is not None and not 0 <= token < vocab_size:
                raise RecipeError(
                    code="out-of-range",
                    place=f"{where}.{name}",
                    found=f"the token id {token}",
                    expected=f"one from 0 to {vocab_size - 1}",
                )


def has_beams(config: GenerationConfig) -> bool:
    """Whether ``generate`` searches with beams."""
    return config.num_beams is not None and config.num_beams > 1


def generation_config(model: Any, settings: Mapping[str, Any]) -> GenerationConfig:
    """The model's ``generation_config`` with other settings, and without those that then have no effect."""
    config: GenerationConfig = deepcopy(model.generation_config)
    if settings.get("min_length") is not None:
        config.min_new_tokens = None  # transformers would use this one
    if settings.get("min_new_tokens") is not None:
        config.min_length = None
    if settings.get("max_new_tokens") is not None:
        config.max_length = None
    for name, value in settings.items():
        setattr(config, name, value)
    for name in (*OUTPUT_SETTINGS, *void_settings(config)):
        setattr(config, name, None)
    return config


def void_settings(config: GenerationConfig) -> list[str]:
    """The settings that have no effect beside the others. Transformers does not save a changed config that has some.

    A base model's ``early_stopping`` has none without beams, for example.
    """
    names: list[str] = []
    if not has_beams(config):
        names += BEAM_SETTINGS
    if not config.do_sample:
        names += SAMPLING_SETTINGS
    return [name for name in names if getattr(config, name, None) is not None]


@cache
def saves_void_settings() -> bool:
    """Whether transformers saves a config that has settings without effect, if it is as it was loaded.

    Versions up to 5.17 refuse it, and so the base model's settings would end the export.
    """
    from transformers import GenerationConfig

    with TemporaryDirectory() as folder:
        Path(folder, "generation_config.json").write_text('{"temperature": 3.0}')
        with quiet():
            config = GenerationConfig.from_pretrained(folder)
            try:
                config.save_pretrained(folder)
            except ValueError:
                return False
    return True


def drop_void_settings(config: GenerationConfig) -> None:
    """Unset the settings of a changed config that have no effect, so that transformers saves it."""
    names = void_settings(config)
    for name in names:
        setattr(config, name, None)
    if names:
        logger.info(
            "generation_config.json: without do_sample and beams, %s have no effect, and are not exported",
            ", ".join(names),
        )


@dataclass
class Completion:
    """A text that a model generated.

    Attributes:
        ids: Its tokens, with the end token if there is one.
        ended: Whether it ends with an end token; otherwise it has the largest number of new tokens.
        log_probabilities: One for each token, by an engine other than the model; None: the model has generated it.
    """

    ids: list[int]
    ended: bool
    log_probabilities: list[float] | None = None


KNOWN_MESSAGES: WeakKeyDictionary[Run, MessagesOnce] = WeakKeyDictionary()
"""Lets each message of transformers pass once in a run, and not for each batch."""


@dataclass
class Generator:
    """A model that generates texts.

    Attributes:
        model: A model of transformers.
        messages: Lets each message of transformers pass once.
    """

    model: Any
    messages: MessagesOnce

    def generate(self, config: GenerationConfig, inputs: Mapping[str, Tensor], **arguments: Any) -> Tensor:
        """The ids that the model generates by ``config`` alone, (rows, tokens) int64.

        Args:
            inputs: ``input_ids`` and ``attention_mask``, (rows, T) int64; prompts are padded on the left.
            arguments: Other arguments of transformers' ``generate``, such as ``synced_gpus``.
        """
        before = self.model.generation_config
        self.model.generation_config = config  # as an argument, it would be completed by the settings of the model
        try:
            with self.messages.filtered():
                ids: Tensor = self.model.generate(**inputs, **arguments)
        finally:
            self.model.generation_config = before
        return ids


def base_model(run: Run) -> Any:
    """The run's model of transformers. With adapters, it has their layers."""
    model: Any = run.unwrap_model()
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def casting_once(model: nn.Module) -> Iterator[None]:
    """Let autocast keep its 16-bit copies of frozen weights, as it keeps those of trained ones, until autocast ends.

    Autocast copies a weight once only if the weight requires gradients. The frozen weights of `lora` would be copied
    again for each token. Enter it without gradients, inside of autocast.
    """
    import torch
    from torch.distributed.tensor import DTensor

    frozen = []
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dtype == torch.float32 and not isinstance(parameter, DTensor):
            frozen.append(parameter)
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def generating(run: Run) -> Iterator[Generator]:
    """Yields the model of a run, which generates with its weights as they are. Every process must enter it.

    Weights are whole, the model is in eval mode, without gradients, and in the precision of the run. Afterwards, modes
    and attention are what they were.

    Raises:
        PluginError: The strategy divides the weights, and cannot gather them, or a plugin divides sequences.
    """
    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    from fastloop.evaluation_results import evaluating

    model = base_model(run)
    attention = model.config._attn_implementation
    reads_mask = attention in ALL_MASK_ATTENTION_FUNCTIONS
    with ExitStack() as stack:
        stack.enter_context(run.strategy.unsharded(run))
        if run.world_size > 1 and run.settings.processes_per_batch != 1:
            raise PluginError(
                f"plugin {run.settings.writers['processes_per_batch']!r} divides each sequence over processes, and a "
                "part of the run needs whole ones, such as to generate texts.",
                code="unsupported-strategy",
                place=run.recipe.where,
                remedy="Use ddp or fsdp.",
            )
        stack.enter_context(evaluating(run.model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(run.accelerator.autocast())
        if torch.is_autocast_enabled(run.device.type):
            stack.enter_context(casting_once(model))
        if run.recipe.inference is None:  # each length of a text would be compiled again
            stack.enter_context(uncompiled())
        if not reads_mask:  # `packing` on CUDA: its kernel takes rows without padding
            stack.callback(model.set_attn_implementation, attention)
            model.set_attn_implementation("sdpa")
        yield Generator(model, KNOWN_MESSAGES.setdefault(run, MessagesOnce()))


def generate(
    run: Run,
    prompts: Sequence[Sequence[int]],
    count: int,
    options: GenerationConfig,
    seed: int | Sequence[int] | None = None,
    batch_size: int | None = None,
) -> list[Completion]:
    """Complete prompts with the current weights of a causal language model, in batches that are padded on the left.

    Every process must call it, with prompts of its own, or with none. The model is in eval mode and computes in the
    precision of the run, with a cache of keys and values, also under `lora`, `packing`, `compile`, `ddp` and `fsdp`.
    Afterwards, modes and random states are what they were.

    Args:
        prompts: Token ids of each prompt, without padding.
        count: Completions of each prompt.
        options: The settings, which the model's own do not complete, such as ``GenerationConfig(max_new_tokens=64,
            do_sample=True, eos_token_id=end_tokens(tokenizer), pad_token_id=tokenizer.pad_token_id)``.
        seed: Seeds the random numbers that draw tokens; processes need different ones. None: continue those of the
            process, and do not restore them. A sequence: one for each prompt, whose completions then do not depend on
            the other prompts, on ``batch_size`` and on the process.
        batch_size: Completions that are generated at once. None: all.

    Returns:
        ``count`` completions of the first prompt, then those of the next ones.

    Raises:
        PluginError: The strategy divides the weights, and cannot gather them, or there is a seed for each prompt, and
            ``options`` leave tokens out.
    """
    import torch

    from fastloop.runtime.random_states import preserve_random_states

    row_seeds: list[int] | None = None
    temperature = 1.0
    if options.do_sample and isinstance(seed, Sequence):
        row_seeds = []
        for prompt_seed in seed:
            row_seeds += range(prompt_seed, prompt_seed + count)
        temperature = options.temperature if options.temperature is not None else 1.0
        options = without_sampling(options)
    if isinstance(seed, Sequence):
        seed = 0  # nothing else draws random numbers
    rows: list[Sequence[int]] = []
    for prompt in prompts:
        rows += [prompt] * count
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))  # similar lengths have little padding
    size = batch_size or len(rows) or 1
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    together = run.strategy.forwards_together and run.world_size > 1
    if together:
        missing = max(run.processes.all_gather_object(len(batches))) - len(batches)
        batches += [[]] * missing
    completions: dict[int, Completion] = {}
    with preserve_random_states(seed is not None), generating(run) as generator:
        if seed is not None:
            torch.manual_seed(seed)
        for batch in batches:
            parts = [rows[index] for index in batch] or [[options.pad_token_id]]
            inputs = pad_prompts(parts, options.pad_token_id, run.device)
            arguments: dict[str, Any] = {}
            if row_seeds is not None:
                seeds = [row_seeds[index] for index in batch] or [0]
                arguments["logits_processor"] = [RowNoise(seeds, temperature, run.device)]
            drawn = generator.generate(options, inputs, synced_gpus=together, **arguments)
            new = drawn[:, inputs["input_ids"].shape[1] :].tolist()
            for index, ids in zip(batch, new, strict=False):  # a batch without rows repeats no prompt of its own
                completions[index] = cut_at_end(ids, options.eos_token_id)
    return [completions[index] for index in range(len(rows))]


def without_sampling(options: GenerationConfig) -> GenerationConfig:
    """The same settings, with which ``generate`` takes the most probable token.

    Raises:
        PluginError: A setting other than the temperature changes the probabilities of tokens.
    """
    options = deepcopy(options)
    neutral = {"temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    for name in SAMPLING_SETTINGS:
        value = getattr(options, name, None)
        if value is not None and value != neutral.get(name):
            raise PluginError(
                f"found a seed for each prompt and {name}={value}, which leaves tokens out.",
                code="conflicting-values",
                place="generate",
                expected="only a temperature",
            )
        setattr(options, name, None)
    options.do_sample = False
    return options


class RowNoise:
    """A processor of logits with which the largest value is a drawn token, each row from random numbers of its own.

    The largest of ``logits - log(E)``, where each E is drawn from the exponential distribution, has the probabilities
    of the softmax (Gumbel-max trick).

    Args:
        seeds: One for each row.
        temperature: Divides the logits.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        import torch

        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The logits of the next token of each row with noise, (rows, vocabulary) float32."""
        scores = scores.float()
        noise = scores.new_empty(scores.shape)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores / self.temperature - noise.log()


def pad_prompts(prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` of prompts, (prompts, longest) int64, padded on the left.

    For ``[[5, 6, 7], [8]]`` with the padding 0, the ids are ``[[5, 6, 7], [0, 0, 8]]``, and the mask is ``[[1, 1, 1],
    [0, 0, 1]]``.
    """
    import torch

    width = max(map(len, prompts))
    ids = [[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def cut_at_end(ids: list[int], ends: int | list[int] | None) -> Completion:
    """The tokens up to the first end token, which may also be the padding."""
    known = ends if isinstance(ends, list) else [ends]
    for place, token in enumerate(ids):
        if token in known:
            return Completion(ids[: place + 1], ended=True)
    return Completion(ids, ended=False)
