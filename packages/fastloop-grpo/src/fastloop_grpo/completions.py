"""Completions of prompts: by the model that is trained, or by the engine of another plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from fastloop import PluginError, hookspec
from fastloop_plugins.text import Completion, generate

if TYPE_CHECKING:
    from fastloop import Run


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from the softmax of the logits divided by the temperature, without top-k or penalties.

    Attributes:
        max_new_tokens: Tokens of a completion at most.
        temperature: Divides the logits; 0: take the most probable token.
        end_tokens: The ids after which a completion ends.
    """

    max_new_tokens: int
    temperature: float
    end_tokens: tuple[int, ...]

    @staticmethod
    def ends_of(model: Any) -> tuple[int, ...]:
        """The ids after which ``generate`` of a model of transformers stops, as it does after the export: the end
        tokens of its tokenizer, and further ones of its own, such as Qwen's ``<|endoftext|>``."""
        ends = model.generation_config.eos_token_id
        return (ends,) if isinstance(ends, int) else tuple(ends)


class CompletionHooks:
    """The hook that an engine implements."""

    @hookspec(firstresult=True)
    def generate_completions(  # type: ignore[empty-body]
        self, run: Run, prompts: list[list[int]], count: int, options: Sampling, seed: int, seeds: list[int] | None
    ) -> list[Completion]:
        """First. Complete the prompts of this process with the current weights of ``run.model``.

        In training, every process calls it once for each step, maybe without prompts. In an evaluation, processes may
        call it differently often. So an engine that needs the weights sends them in ``before_step`` and
        ``before_evaluate``, by ``run.full_state_dict()``, which every process must call.

        Args:
            prompts: Token ids of each prompt.
            count: Completions of each prompt.
            options: A ``Sampling``.
            seed: Differs between steps and processes.
            seeds: In an evaluation, one for each prompt. An engine that can draws each prompt by its own: the
                completions then depend neither on the batch size nor on the number of processes. None in training.

        Returns:
            ``count`` objects ``Completion`` of the first prompt, then those of the next ones. ``log_probabilities`` are
            those by which the engine has drawn the tokens. The loss then weights tokens by the ratio of the model's
            probability to the engine's, at most ``sampler_cap``. None: as the model's.
        """


def seed_of(name: str) -> int:
    """The seed that a name stands for, below 2**48."""
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little")


def generate_by_model(
    run: Run,
    prompts: Sequence[Sequence[int]],
    count: int,
    options: Sampling,
    pad_token: int,
    seed: int | Sequence[int],
    batch_size: int | None,
) -> list[Completion]:
    """Complete prompts by the model itself; see ``fastloop_plugins.text.generate``."""
    from transformers import GenerationConfig

    drawing = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=options.max_new_tokens,
        eos_token_id=list(options.end_tokens),
        pad_token_id=pad_token,
        **(drawing if options.temperature > 0 else {"do_sample": False}),
    )
    return generate(run, prompts, count, config, seed, batch_size)


def check_completions(completions: Sequence[Completion], expected: int, vocabulary: int) -> None:
    """Check what an engine returned.

    Raises:
        PluginError: There are not ``expected`` completions, one has no token or one that is not in the vocabulary, or
            it has other than one log-probability for each token.
    """
    hook = "generate_completions"
    if len(completions) != expected:
        raise PluginError(
            code="wrong-result",
            place=str(hook),
            found=f"{len(completions)} completions",
            expected=f"{expected}: `count` of each prompt",
        )
    for place, completion in enumerate(completions):
        size = len(completion.ids)
        if not size:
            raise PluginError(
                f"completion {place + 1} has no token, expected at least its end token.",
                code="wrong-result",
                place=str(hook),
            )
        if min(completion.ids) < 0 or max(completion.ids) >= vocabulary:
            raise PluginError(
                f"completion {place + 1} has the tokens {completion.ids}, expected ids below {vocabulary}.",
                code="wrong-result",
                place=str(hook),
            )
        log_probabilities = completion.log_probabilities
        if log_probabilities is not None and len(log_probabilities) != size:
            raise PluginError(
                f"completion {place + 1} has {size} tokens and {len(log_probabilities)} log-probabilities, expected "
                "one for each token, or None.",
                code="wrong-result",
                place=str(hook),
            )
