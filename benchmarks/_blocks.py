"""Generated tokens for language models: the file that all arms of a comparison read, and the task with which fastloop
trains on it.

A file is a ``.npz`` with ``train`` and ``validation``: (blocks, tokens) uint16. Half of the tokens follow from the
token before; the others are drawn by Zipf's law. So a model can learn, and its loss falls slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastloop import Run, hookimpl
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.tasks.causal_lm import CausalLM
from fastloop_plugins.text.chat.tokens import block_sequences

FOLLOWS = 0.5
"""Share of the tokens that follow from the token before. The others keep the loss above 0."""


@dataclass(frozen=True)
class Size:
    """A model, and the batches that it trains on.

    Attributes:
        config: The configuration of transformers.
        tokens: Different tokens in the data. The vocabulary of the model may be larger.
        length: Tokens of a block.
        batch: Blocks of a step.
        steps: Steps of a window.
    """

    config: dict[str, Any]
    tokens: int
    length: int
    batch: int
    steps: int


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIZES = {
    "gpt2": Size(
        {"model_type": "gpt2", "vocab_size": 50_304, "n_positions": 1024, **NO_DROPOUT}, 50_257, 1024, 16, 100
    ),
    "tiny": Size(
        {
            "model_type": "gpt2",
            "vocab_size": 512,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "n_positions": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 32,
            **NO_DROPOUT,
        },
        500,
        32,
        4,
        4,
    ),
}
"""``gpt2`` is GPT-2 with 124M parameters. Its vocabulary is padded to a multiple of 64, and it has no dropout: both
are defaults of nanoGPT."""


def generate(blocks: int, size: Size, seed: int) -> NDArray[np.uint16]:
    """Generate (blocks, tokens). The same rule for all seeds determines which token follows another."""
    chance = np.random.default_rng(seed)
    follower = np.random.default_rng(0).permutation(size.tokens)
    weights = np.cumsum(1 / np.arange(1, size.tokens + 1))
    drawn = np.searchsorted(weights, chance.random((blocks, size.length)) * weights[-1]).clip(max=size.tokens - 1)
    follows = chance.random((blocks, size.length)) < FOLLOWS
    tokens: NDArray[np.uint16] = drawn.astype(np.uint16)
    for place in range(1, size.length):
        tokens[:, place] = np.where(follows[:, place], follower[tokens[:, place - 1]], tokens[:, place])
    return tokens


def write_tokenizer(folder: Path, size: Size) -> Path:
    """Write a tokenizer with one word for each token of the model; returns its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(size.config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    last = f"w{len(words) - 1}"
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=last, eos_token=last, unk_token="w0"
    )
    fast.save_pretrained(folder)
    return folder


def build_model(size: Size) -> Any:
    """A model with random weights, in train mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**size.config))  # type: ignore[no-untyped-call]
    return model.train()


def token_flops(size: Size) -> float:
    """Floating-point operations of a training step for each token, as nanoGPT's ``estimate_mfu`` counts them.

    6 for each weight but those of the positions, and 12 times layers, width and tokens of a block for attention
    (PaLM, arXiv:2204.02311, appendix B).
    """
    import torch

    with torch.device("meta"):
        model = build_model(size)
    config = model.config
    weights = sum(weight.numel() for weight in model.parameters()) - config.n_positions * config.hidden_size
    flops: float = 6.0 * weights + 12.0 * config.num_hidden_layers * config.hidden_size * size.length
    return flops


def validation_loss(weights: Mapping[str, Any], size: Size, blocks: NDArray[np.uint16], device: str) -> float:
    """The mean loss of the next token, by a new model with these weights, in bf16 and without a compiler: the same
    for all arms."""
    import torch
    from torch.nn.functional import cross_entropy

    model = build_model(size).to(device).eval()
    total = 0.0
    model.load_state_dict(weights)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for first in range(0, len(blocks), size.batch):
            ids = torch.from_numpy(blocks[first : first + size.batch].astype(np.int64)).to(device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            total += float(
                cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
            )
    return total / (len(blocks) * (size.length - 1))


class BlockTask(CausalLM):
    """fastloop's task of language models, on generated tokens instead of texts.

    Args:
        train: (blocks, tokens) uint16.
    """

    def __init__(self, train: NDArray[np.uint16] | None) -> None:
        super().__init__()
        self.train = train

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        assert self.train is not None
        length = self.data.options.max_length
        self.text_model.load_tokenizer(length)
        return {"train": block_sequences(self.train.ravel().astype(np.int32), length)}
