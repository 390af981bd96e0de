"""Targets that a setting of ``generate`` forbids: a model that has learned them cannot generate them.

A summarization model, for example, has ``min_length: 56`` in its ``generation_config.json``, and is trained to write
single words.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastloop import Problem
from fastloop.problem import counted_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

logger = logging.getLogger("fastloop")

CHECKED = 2000
"""Targets of a split to check at most: with their repeated n-grams, 2000 targets of 100 tokens take 0.2 seconds."""
SHOWN = 60
"""Characters of a target in a message."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The tokens that a model learns to generate.

    Attributes:
        prompt: The tokens before them: the start token of a decoder, or the prompt of a language model.
        tokens: The target, with its end token.
        source: The tokens of the encoder; empty without one.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    source: Sequence[int] = field(default=())


def _ngrams(row: Sequence[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(row[start : start + size]) for start in range(len(row) - size + 1)}


def _ngrams_of_target(target: Target, size: int) -> Iterator[tuple[int, ...]]:
    """Yield the n-gram that each token of the target ends, in prompt and target, if there are as many tokens.

    For prompt ``[0]``, tokens ``[5, 6, 1]`` and size 2: ``(0, 5)``, ``(5, 6)`` and ``(6, 1)``.
    """
    row = [*target.prompt, *target.tokens]
    for end in range(max(len(target.prompt) + 1, size), len(row) + 1):
        yield tuple(row[end - size : end])


def _as_list(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


# -- one function for each setting: whether it forbids a target --------------------------------------------------------


def _ends_within(target: Target, size: int, config: GenerationConfig) -> bool:
    """Whether an end token is among the first ``size`` tokens of the target."""
    ends = _as_list(config.eos_token_id)
    return any(token in ends for token in target.tokens[: max(size, 0)])


def _min_length(target: Target, value: int, config: GenerationConfig) -> bool:
    return _ends_within(target, value - len(target.prompt), config)


def _min_new_tokens(target: Target, value: int, config: GenerationConfig) -> bool:
    return _ends_within(target, value, config)


def _max_new_tokens(target: Target, value: int, config: GenerationConfig) -> bool:
    return len(target.tokens) > value


def _max_length(target: Target, value: int, config: GenerationConfig) -> bool:
    return len(target.prompt) + len(target.tokens) > value


def _no_repeat_ngram_size(target: Target, value: int, config: GenerationConfig) -> bool:
    if not value:
        return False
    seen = _ngrams(target.prompt, value)
    for ngram in _ngrams_of_target(target, value):
        if ngram in seen:
            return True
        seen.add(ngram)
    return False


def _encoder_no_repeat_ngram_size(target: Target, value: int, config: GenerationConfig) -> bool:
    in_source = _ngrams(target.source, value)
    return value > 0 and any(ngram in in_source for ngram in _ngrams_of_target(target, value))


def _forced_bos_token_id(target: Target, value: int, config: GenerationConfig) -> bool:
    return len(target.prompt) == 1 and target.tokens[0] != value


def _forced_eos_token_id(target: Target, value: int | Sequence[int], config: GenerationConfig) -> bool:
    last = config.max_new_tokens
    if last is None and config.max_length is not None:
        last = config.max_length - len(target.prompt)
    if last is None or not 0 < last <= len(target.tokens):
        return False
    return target.tokens[last - 1] not in _as_list(value)


def _suppress_tokens(target: Target, value: Sequence[int], config: GenerationConfig) -> bool:
    return not set(value).isdisjoint(target.tokens)


def _begin_suppress_tokens(target: Target, value: Sequence[int], config: GenerationConfig) -> bool:
    is_forced = len(target.prompt) == 1 and config.forced_bos_token_id is not None
    place = 1 if is_forced else 0
    return any(token in value for token in target.tokens[place : place + 1])


def _bad_words_ids(target: Target, value: Iterable[Sequence[int]], config: GenerationConfig) -> bool:
    ends = _as_list(config.eos_token_id)
    for sequence in value:
        is_end = len(sequence) == 1 and sequence[0] in ends  # transformers leaves these out
        if not is_end and tuple(sequence) in _ngrams_of_target(target, len(sequence)):
            return True
    return False


@dataclass(frozen=True)
class ForbiddingSetting:
    """A setting of ``GenerationConfig`` that forbids some targets.

    Attributes:
        finding: The forbidden targets, for messages: they ``finding``.
        forbids: Whether the setting's value, which is not None, forbids a target.
    """

    finding: str
    forbids: Callable[[Target, Any, GenerationConfig], bool]


RULES = {
    "min_length": ForbiddingSetting("are shorter", _min_length),
    "min_new_tokens": ForbiddingSetting("are shorter", _min_new_tokens),
    "max_length": ForbiddingSetting("are longer", _max_length),
    "max_new_tokens": ForbiddingSetting("are longer", _max_new_tokens),
    "no_repeat_ngram_size": ForbiddingSetting("repeat a sequence of as many tokens", _no_repeat_ngram_size),
    "encoder_no_repeat_ngram_size": ForbiddingSetting(
        "have a sequence of as many tokens of the input", _encoder_no_repeat_ngram_size
    ),
    "forced_bos_token_id": ForbiddingSetting("begin with another token", _forced_bos_token_id),
    "forced_eos_token_id": ForbiddingSetting("end with another token at the maximum length", _forced_eos_token_id),
    "suppress_tokens": ForbiddingSetting("have such a token", _suppress_tokens),
    "begin_suppress_tokens": ForbiddingSetting("begin with such a token", _begin_suppress_tokens),
    "bad_words_ids": ForbiddingSetting("have such a sequence of tokens", _bad_words_ids),
}


def forbidden(config: GenerationConfig, targets: Sequence[Target]) -> dict[str, list[Target]]:
    """Setting of ``config`` -> the targets that it forbids. Settings that forbid none are left out."""
    forbidden_by = dict[str, list[Target]]()
    for name, rule in RULES.items():
        value = getattr(config, name, None)
        if value is None:
            continue
        impossible = [target for target in targets if rule.forbids(target, value, config)]
        if impossible:
            forbidden_by[name] = impossible
    return forbidden_by


def warn_about_forbidden(
    config: GenerationConfig,
    targets: Mapping[str, Sequence[Target]],
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    own: Mapping[str, str],
) -> None:
    """Log a warning for each setting that forbids targets, with their share and the option that changes it.

    Args:
        targets: Split -> its targets.
        task: The place of the task's options, for messages: ``plugins.seq2seq``.
        own: Setting of ``generate`` -> the option of the task that sets it; others are in its ``generation``.
    """
    by_split = {split: forbidden(config, checked) for split, checked in targets.items()}
    for name, rule in RULES.items():
        shares = []
        example = ""
        for split, checked in targets.items():
            impossible = by_split[split].get(name)
            if not impossible:
                continue
            share = len(impossible) / len(checked)
            shares.append(f"{counted_of(len(impossible), len(checked), 'targets')} of {split} ({share:.1%})")
            if not example:
                example = str(tokenizer.decode(list(impossible[0].tokens), skip_special_tokens=True))
        if not shares:
            continue
        if len(example) > SHOWN:
            example = f"{example[:SHOWN]}..."
        option = f"{task}.{own[name]}" if name in own else f"{task}.generation.{name}"
        logger.warning(
            Problem(
                f"the model cannot generate {' and '.join(shares)}: its generation has "
                f"{name}={getattr(config, name)}, and they {rule.finding}, such as {example!r}.",
                code="forbidden-targets",
                place="data",
                remedy=f"Set {option} to another value, or to null.",
            )
        )
