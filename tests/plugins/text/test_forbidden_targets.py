"""Targets that settings of ``generate`` forbid: transformers does not return them, even with the highest scores.

Modules:
    plugins/fastloop_plugins/text/forbidden_targets.py
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    T5Config,
    T5ForConditionalGeneration,
)

from fastloop_plugins.text.forbidden_targets import RULES, Target, forbidden

PAD, END, WORDS = 0, 1, range(3, 8)
SETTINGS: list[dict[str, Any]] = [
    {"min_length": 5},
    {"min_length": 0},
    {"min_new_tokens": 3},
    {"max_new_tokens": 4},
    {"max_length": 6, "max_new_tokens": None},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 0},
    {"encoder_no_repeat_ngram_size": 2},
    {"forced_bos_token_id": 4},
    {"forced_eos_token_id": 5, "max_new_tokens": 4},
    {"forced_eos_token_id": [5, 1], "max_length": 6, "max_new_tokens": None},
    {"suppress_tokens": [4, 6]},
    {"begin_suppress_tokens": [4]},
    {"begin_suppress_tokens": [5], "forced_bos_token_id": 4},
    {"bad_words_ids": [[4], [5, 6], [END]]},
]


class Favour(LogitsProcessor):
    """Gives the next token of each row's target the highest score, unless it is forbidden."""

    def __init__(self, targets: list[Target]) -> None:
        self.targets = targets

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        for row, target in enumerate(self.targets):
            place = input_ids.shape[1] - len(target.prompt)
            token = target.tokens[place] if place < len(target.tokens) else END
            scores[row, token] += 1e4
        return scores


def random_targets(prompt: int, count: int = 60) -> list[Target]:
    """Targets of one to seven tokens, with a prompt of this many tokens."""
    draw = random.Random(0)
    targets = []
    for _ in range(count):
        tokens = draw.choices(WORDS, k=draw.randrange(7))
        start = [PAD] if prompt == 1 else draw.choices(WORDS, k=prompt)
        targets.append(Target(prompt=start, tokens=[*tokens, END], source=draw.choices(WORDS, k=4)))
    return targets


def is_generated(model: Any, config: GenerationConfig, targets: list[Target]) -> list[bool]:
    """Whether ``generate`` returns each target."""
    torch.manual_seed(0)
    prompts = torch.tensor([target.prompt for target in targets])
    sources = torch.tensor([target.source for target in targets])
    ids = sources if model.config.is_encoder_decoder else prompts
    model.generation_config = config
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList([Favour(targets)])
    )
    rows = found[:, prompts.shape[1] :].tolist()
    return [row[: len(target.tokens)] == target.tokens for row, target in zip(rows, targets, strict=True)]


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("encoder-decoder", settings) for settings in SETTINGS]
    + [("decoder", settings) for settings in SETTINGS if "encoder_no_repeat_ngram_size" not in settings],
    ids=str,
)
def test_forbidden_targets_are_those_that_generate_does_not_return(kind, settings):
    model: Any
    if kind == "decoder":
        tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": END}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_layer=1, n_head=1, n_embd=8, n_positions=32, **tokens))
    else:
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=PAD)
        )
    targets = random_targets(prompt=3 if kind == "decoder" else 1)
    ids = {"eos_token_id": END, "pad_token_id": PAD, "decoder_start_token_id": PAD}
    config = GenerationConfig(**{"max_new_tokens": 9, "do_sample": False} | ids | settings)
    expected = is_generated(model.eval(), config, targets)
    found = forbidden(config, targets)
    kept = [not any(target is one for those in found.values() for one in those) for target in targets]
    assert kept == expected
    assert set(found) <= set(settings) <= {*RULES}


def test_settings_of_the_test_cover_all_rules():
    assert {name for settings in SETTINGS for name in settings} == set(RULES)
