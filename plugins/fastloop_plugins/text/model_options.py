"""The section ``model`` of tasks on texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastloop import option
from fastloop_plugins.models.warm_start import HELP, STRICT_HELP


@dataclass(kw_only=True)
class ModelOptions:
    """The ``model`` section."""

    name: str | None = option("Pretrained model: hub id or local folder.", default=None)
    config: dict[str, Any] | None = option(
        "Instead of name, to train from scratch: model_type and its options.", default=None
    )
    tokenizer: str | dict[str, Any] | None = option(
        "Hub id or local folder; from scratch: {kind: word|bpe|char|byte}, made from the training texts.", default=None
    )
    tokens: list[str] | None = option("Tokens to add to the tokenizer. Predictions show them.", default=None)
    special_tokens: list[str] | None = option(
        "Tokens to add that predictions leave out, such as one that ends a message.", default=None
    )
    resize_embeddings: bool = option(
        "Add rows to a pretrained model whose tokenizer has more tokens; model.tokens adds its own.", default=False
    )
    attn_implementation: str | None = option(
        "Transformers' attention: sdpa, eager, ...; null: its default.", default=None
    )
    trust_remote_code: bool = option("Run Python code that ships with the model.", default=False)
    revision: str | None = option("Branch, tag or commit of name on the hub; from scratch, of tokenizer.", default=None)
    weights: str | None = option(HELP, default=None)
    weights_strict: bool = option(STRICT_HELP, default=False)
