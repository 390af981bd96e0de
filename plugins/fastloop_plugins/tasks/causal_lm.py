"""Trains a causal language model, pretrained or from scratch. On by default if ``data`` names no ``label`` column.

    model: {config: {model_type: gpt2, n_layer: 4, n_head: 4, n_embd: 256}, tokenizer: {kind: bpe, vocab_size: 4000}}
    data:  {files: {train: "texts/*.txt"}, max_length: 256}
    plugins:
      - causal-lm

Texts are concatenated and cut into blocks of ``max_length`` tokens, so only the last block has padding.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Batch, Output, Plugin, RecipeError, hookimpl
from fastloop_plugins.tasks._model_checks import check_causal
from fastloop_plugins.tasks._text_data import Data, TextData
from fastloop_plugins.tasks._text_model import Model, TextModel

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.tasks._text_batches import Ragged, Sequences, Width

IGNORED = -100
"""Target that cross entropy ignores."""


class CausalLM(Plugin):
    """Trains on blocks of ``data.max_length`` tokens with cross entropy of the next token, and reports ``perplexity``."""

    name = "causal-lm"
    slot = "task"
    fallback_hooks = ("compute_loss",)
    sections = {"model": Model, "data": Data}
    adds_metrics = ("perplexity",)
    description = "model, data and loss of a causal language model"

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        unlabelled = recipe.data and recipe.data.get("label") is None and not recipe.model.get("module")
        return "data names no label column" if unlabelled else None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data, self.text_model = TextData(recipe, labelled=False), TextModel(recipe, classify=False)

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Sequences]:
        from fastloop_plugins.tasks import _text_tokens

        self.data.skip_unreadable = run.loader_settings.skip_unreadable
        splits = _text_tokens.read(self.data, self.text_model, documents=True, add_special_tokens=False, verbose=False)
        run.state.unreadable += self.data.unreadable
        return {name: self._blocks(name, split.ids) for name, split in splits.items()}

    def _blocks(self, split: str, ids: NDArray[np.int32]) -> Sequences:
        """Concatenate texts, each followed by the end token, and cut them into blocks; the last one may be shorter."""
        import numpy as np

        from fastloop_plugins.tasks._text_batches import Sequences

        size = self.data.options.max_length
        blocks, rest = divmod(len(ids), size)
        lengths = np.array([size] * blocks + [rest] * (rest > 1), dtype=np.int64)
        if not len(lengths):
            raise RecipeError(f"{self.data.where}: the {split} split has no two tokens: there is no next token to learn.")
        return Sequences(ids, lengths)

    @hookimpl
    def build_collator(self, run: Run) -> Collator:
        from fastloop_plugins.tasks._text_batches import Width

        options = self.data.options
        width = Width(options.max_length, run.loader_settings.pad_to_multiple_of, options.padding == "max_length")
        return Collator(self.text_model.tokenizer.pad_token_id, width)

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: nn.Module = self.text_model.build(AutoModelForCausalLM)
        if run.recipe.inference is None:
            check_causal(run, model, run.datasets["train"][0]["input_ids"][:8].tolist(), self.text_model.where)
        return model

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Output:
        from torch.nn.functional import cross_entropy

        from fastloop_plugins.tasks._text_masks import forward

        # No mask: padding is on the right, so no real token attends to it, and attention uses its causal fast path.
        inputs = {name: value for name, value in batch.items() if name != "targets"} | {"use_cache": False}
        logits = forward(model, inputs, never=True).logits
        return Output(cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), ignore_index=IGNORED))

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self) -> Generator[None, dict[str, float], dict[str, float]]:
        metrics = yield
        return metrics | {"perplexity": math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf}

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        return self.text_model.export(run, folder)


class Collator:
    """Pads a list of blocks. ``targets`` are the tokens shifted by one: shifting here avoids a copy of the logits."""

    def __init__(self, pad_token_id: int, width: Width) -> None:
        self.pad_token_id, self.width = pad_token_id, width

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        from fastloop_plugins.tasks._text_batches import padded

        batch = self.ragged(samples)
        width = self.width(batch.columns["input_ids"][0])
        inputs = {name: padded(rows, width, fill) for name, (rows, fill) in batch.columns.items()}
        return Batch(inputs, loss_weight=batch.loss_weight, tokens=batch.tokens)

    def ragged(self, samples: list[dict[str, Any]]) -> Ragged:
        """The batch without padding."""
        from fastloop_plugins.tasks._text_batches import Ragged

        rows = [sample["input_ids"] for sample in samples]
        columns = {"input_ids": (rows, self.pad_token_id), "targets": ([row[1:] for row in rows], IGNORED)}
        tokens = sum(map(len, rows))
        return Ragged(columns=columns, loss_weight=tokens - len(rows), tokens=tokens)
