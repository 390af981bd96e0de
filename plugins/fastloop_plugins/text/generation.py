"""Generation of texts: settings of a recipe over those of the model's ``generation_config.json``, and the call itself.

Prediction, the evaluation of generated texts and exports use the same ``GenerationConfig``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastloop import RecipeError, option
from fastloop.options import parse
from fastloop_plugins.models.hub import MessagesOnce

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig

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


@dataclass(kw_only=True)
class GenerationOptions:
    """Options of tasks that generate texts."""

    generation: dict[str, Any] | None = option(
        "Settings of transformers' generate instead of those in the model's generation_config.json, such as "
        "{min_length: 0, no_repeat_ngram_size: 3}; null unsets one.",
        default=None,
    )


def check_generation(
    given: Mapping[str, Any] | None, own: Mapping[str, str], num_beams: int, recipe: str, task: str
) -> dict[str, Any]:
    """The settings of ``plugins.<task>.generation``. A value of None unsets the model's.

    Args:
        own: Setting of ``generate`` -> the option of the task that sets it.
        num_beams: The task's own, unless it is a setting.
        recipe: The recipe, for messages.
        task: The place of the task's options, such as ``plugins.seq2seq``.

    Raises:
        RecipeError: A setting is unknown, has the wrong type or no effect, or the task has an option for it.
    """
    given, where = given or {}, f"{recipe}: {task}.generation"
    for name in given:
        if name in own:
            raise RecipeError(f"{where}.{name}: the task has an option for it. Set {task}.{own[name]} instead.")
    parsed = parse(GenerationSettings, given, where)
    settings = {name: getattr(parsed, name) for name in given}
    if (settings.get("num_beams") or num_beams) == 1:
        for name in BEAM_SETTINGS:
            if settings.get(name) is not None:
                raise RecipeError(
                    f"{where}.{name}: it is for beam search, and num_beams is 1. Remove it, or set num_beams."
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
                    f"{where}.{name}: found the token id {token}, expected one from 0 to {vocab_size - 1}."
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


def generate(
    model: Any, config: GenerationConfig, inputs: Mapping[str, Tensor], messages: MessagesOnce, **arguments: Any
) -> Tensor:
    """The ids that the model generates by ``config`` alone, (rows, tokens) int64.

    Args:
        messages: Lets each message of transformers pass once, and not for each batch.
        arguments: Other arguments of ``generate``, such as ``synced_gpus``.
    """
    before = model.generation_config
    model.generation_config = config  # as an argument, it would be completed by the settings of the model
    try:
        with messages.filtered():
            ids: Tensor = model.generate(**inputs, **arguments)
    finally:
        model.generation_config = before
    return ids
