"""Tokens that a pretrained model does not have: ``model.tokens``, ``special_tokens`` and ``resize_embeddings``.

The tokenizer gets them when it is loaded, and the model's embedding and head get their rows when it is built.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from fastloop import RecipeError
from fastloop_plugins.models.vocabulary import add_tokens, resize_embeddings, rows_needed, rows_of, tokens_after

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins.text.model_options import ModelOptions

logger = logging.getLogger("fastloop")


class NewTokens:
    """Adds tokens to a tokenizer, and their rows to a model.

    Args:
        options: The ``model`` section.
        model: The name of the pretrained model; None: the model is made from scratch, with a row for each token.
        source: The option that names the tokenizer: tokenizer or name.
        key: The place of the options in the recipe, such as ``model``.
        where: ``key`` with the recipe, for messages.

    Attributes:
        wanted: The tokens of both options.
        ids: The tokens that the checkpoint was not trained with; from ``add`` on.
        rows: Rows that the embedding of the pretrained model gets, from ``add`` on; None: it keeps its own.

    Raises:
        RecipeError: An option is invalid.
    """

    def __init__(self, options: ModelOptions, model: str | None, source: str, key: str, where: str) -> None:
        self.options = options
        self.model = model
        self.source = source
        self.key = key
        self.where = where
        self.wanted = [*(options.tokens or ()), *(options.special_tokens or ())]
        self.ids: list[int] = []
        self.rows: int | None = None
        for token in self.wanted:
            if not token or token != token.strip():
                raise RecipeError(
                    code="wrong-format",
                    place=f"{where}.tokens",
                    found=repr(token),
                    expected="a token that neither begins nor ends with a space",
                )
        for token in options.special_tokens or ():
            if token in (options.tokens or ()):
                raise RecipeError(
                    f"found {token!r}, which tokens has, too.",
                    code="set-twice",
                    place=f"{where}.special_tokens",
                    remedy="Remove one of them.",
                )
        if options.resize_embeddings and model is None:
            raise RecipeError(
                "found model.config, and a model from scratch has a row for each token of its tokenizer.",
                code="unknown-option",
                place=f"{where}.resize_embeddings",
                remedy="Leave it out.",
            )

    def add(self, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
        """Add the tokens of the options to a tokenizer.

        Args:
            config: The model's configuration.

        Raises:
            RecipeError: The tokenizer already has tokens without a row in the model's embedding, and the recipe does
                not request rows for them.
        """
        self.ids = []
        rows = rows_of(config)
        if self.model is not None and rows is not None:
            without_row = tokens_after(tokenizer, rows)
            if without_row and not self.options.resize_embeddings:
                raise self._tokenizer_is_larger(tokenizer, rows, without_row)
            self.ids += cast("list[int]", tokenizer.convert_tokens_to_ids(without_row))
        self.ids += add_tokens(tokenizer, self.options.tokens or [], special=False)
        self.ids += add_tokens(tokenizer, self.options.special_tokens or [], special=True)
        self.rows = None
        if self.model is not None and rows is not None and self.ids:
            needed = rows_needed(tokenizer)
            self.rows = needed if needed > rows else None

    def _tokenizer_is_larger(
        self, tokenizer: PreTrainedTokenizerBase, rows: int, without_row: list[str]
    ) -> RecipeError:
        """The error of a tokenizer with tokens that the model's embedding has no row for.

        Args:
            rows: Rows of the embedding.
            without_row: The tokens without a row.
        """
        named = ", ".join(without_row[:4])
        if len(without_row) > 4:
            named += ", ..."
        return RecipeError(
            f"the tokenizer has {rows_needed(tokenizer)} tokens, and the embedding of {self.model} has {rows} rows: "
            f"none for {named}.",
            code="tokens-differ",
            place=f"{self.where}.{self.source}",
            remedy=(
                f"To train rows for these tokens, set {self.key}.resize_embeddings=true. Or use the tokenizer that "
                "the model was trained with."
            ),
        )

    def add_rows(self, model: Any, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """Give embedding and head of a model their new rows, drawn by the seed, and log what is new.

        Raises:
            RecipeError: The model cannot be resized.
        """
        known = [token for token in self.wanted if tokenizer.convert_tokens_to_ids(token) not in self.ids]
        if known:
            logger.info("%s.tokens: the tokenizer has %s already", self.key, ", ".join(known))
        added = [token for token in self.wanted if token not in known]
        if added:
            logger.info("%s.tokens: added %s", self.key, ", ".join(added))
        if self.model is None:
            return
        model.new_token_ids = self.ids  # by these two, lora finds what to train
        model.has_new_rows = self.rows is not None
        before = rows_of(model.config)
        if self.rows is None:
            if self.options.resize_embeddings or self.ids:
                logger.info("%s: the embedding keeps its %s rows, enough for all tokens", self.key, before)
        elif before != self.rows:
            key = "resize_embeddings" if self.options.resize_embeddings else "tokens"
            remedy = f"Leave {self.key}.{key} out, or use another model."
            resize_embeddings(model, self.rows, seed, f"{self.where}.{key}", remedy)
            logger.info("%s.%s: the embedding grows from %d to %d rows", self.key, key, before, self.rows)
