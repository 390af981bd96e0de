"""Runs that complete prompts before and after training, on one process or several."""

from __future__ import annotations

from typing import Any

from text_helpers import make_run
from training_runs import execute
from transformers import GenerationConfig

from fastloop import Plugin, hookimpl
from fastloop_plugins.text import Completion, end_tokens, generate

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MODEL = {"config": LLAMA, "tokenizer": {"kind": "byte"}}
DATA = {"files": {"train": "rows.jsonl"}, "prompt": "q", "completion": "a", "max_length": 40}
PROMPTS = [[70, 71], [80, 81, 82, 83, 84], [90], [65, 66, 67]]
"""Token ids. The first process of two has the first three prompts, the second one none."""


class Complete(Plugin):
    """Completes prompts before the first step and after training.

    Args:
        settings: For ``GenerationConfig``.
        count: Completions of a prompt.
        seed: As for ``generate``.
    """

    name = "complete"

    def __init__(self, settings: dict[str, Any], count: int = 1, seed: int | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.count = count
        self.seed = seed
        self.completions: list[list[Completion]] = []
        self.training: list[bool] = []

    def complete(self, run: Any) -> None:
        tokenizer = run.plugins.task.text_model.tokenizer
        options = GenerationConfig(
            eos_token_id=end_tokens(tokenizer), pad_token_id=tokenizer.pad_token_id, **self.settings
        )
        prompts = PROMPTS
        if run.world_size > 1:  # the processes have different numbers of prompts
            prompts = PROMPTS[:3] if run.is_main else []
        self.completions.append(generate(run, prompts, self.count, options, self.seed, batch_size=2))
        self.training.append(run.model.training)

    @hookimpl
    def before_step(self, run: Any) -> None:
        if run.state.step == 0:
            self.complete(run)

    @hookimpl
    def after_fit(self, run: Any) -> None:
        self.complete(run)


def completed(*plugins: Plugin, settings: dict[str, Any], count: int = 1, seed: int | None = None) -> Complete:
    """The plugin ``Complete`` of a run with these plugins."""
    complete = Complete(settings, count, seed)
    execute(make_run("causal-lm", MODEL, DATA, [*plugins, complete], batch_size=4))
    return complete


def completions_by_strategy(strategies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Strategy -> the ids of completions before and after training, or the message of an error."""
    from fastloop.errors import FastloopError
    from fastloop.plugins.installed import entry_points

    results: dict[str, Any] = {}
    for name, options in strategies.items():
        strategy = entry_points("fastloop.plugins")[name.partition(" ")[0]].load()(**options)
        try:
            complete = completed(strategy, settings={"max_new_tokens": 6, "do_sample": False})
        except FastloopError as error:
            results[name] = str(error)
            continue
        results[name] = [[each.ids for each in part] for part in complete.completions]
    return results
