"""Fit a model of transformers to its tokenizer: rows of the embedding, the id of padding, and the longest text."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from fastloop import Problem, RecipeError
from fastloop.problem import typed_clause
from fastloop_plugins.models.hub import quiet

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("fastloop")


def rows_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of an embedding that has one for each token: the largest id, plus one. Ids may have gaps."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return max(vocabulary.values()) + 1


def rows_of(config: Any) -> int | None:
    """Rows of the embedding that a configuration describes; None for a model without a vocabulary, such as CANINE."""
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def fit_vocabulary(config: Any, tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any], where: str) -> None:
    """Give a configuration from scratch the size and the special tokens of the tokenizer.

    Args:
        given: ``model.config`` of the recipe, whose place is ``where``.

    Raises:
        RecipeError: It has fewer tokens than the tokenizer.
    """
    tokens = rows_needed(tokenizer)
    size = given.get("vocab_size")
    if size is not None and size < tokens:
        raise RecipeError(
            f"found {size}, and the tokenizer has {tokens} tokens.",
            code="conflicting-values",
            place=f"{where}.vocab_size",
            remedy="Leave it out.",
        )
    config.vocab_size = size or tokens
    for token in ("bos_token_id", "eos_token_id"):
        setattr(config, token, getattr(tokenizer, token))


def tokens_after(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """The tokens whose ids an embedding with this number of rows does not have, in the order of their ids."""
    beyond = {token: index for token, index in tokenizer.get_vocab().items() if index >= rows}
    return sorted(beyond, key=beyond.__getitem__)


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], special: bool) -> list[int]:
    """Add those tokens that a tokenizer does not have, and return their ids. The tokenizer never divides an added
    token, and finds it in a text only in this spelling.

    Args:
        special: Whether decoding may leave the tokens out (``skip_special_tokens``), as it does the end of a text.
    """
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in vocabulary]
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=special) for token in new], special_tokens=special
    )
    return cast("list[int]", tokenizer.convert_tokens_to_ids(new))


def resize_embeddings(model: Any, rows: int, seed: int, where: str, remedy: str, like_old: bool = True) -> None:
    """Give embedding and head this number of rows. New rows are drawn by the seed, and other random numbers stay.

    Args:
        where: The option that requests it, for messages.
        like_old: Draw new rows from the distribution of the old ones, as transformers does by default
            (``mean_resizing``). Otherwise, draw them as the model initializes its weights.

    Raises:
        RecipeError: The model cannot be resized.
    """
    from fastloop.runtime.random_states import preserve_random_states, seed_all

    name = f"{where}: {type(model).__name__}"
    try:
        with preserve_random_states(), quiet():
            seed_all(seed)
            model.resize_token_embeddings(rows, mean_resizing=like_old)
        sizes = [len(module.weight) for module in embeddings(model)]
    except Exception as error:  # models raise errors of any type
        cause = typed_clause(error)
        raise RecipeError(f"{name} cannot be resized: {cause}.", code="not-resizable", remedy=remedy) from None
    if set(sizes) != {rows}:
        raise RecipeError(
            f"{name} has {sizes} rows of embedding and head, expected {rows} after resizing.",
            code="not-resizable",
            remedy=remedy,
        )


def embeddings(model: Any) -> list[Any]:
    """The modules of a model that have a row for each token: its embedding, and its head if that predicts tokens."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [module for module in modules if module is not None]


def counts_positions_from_padding(model: nn.Module) -> bool:
    """Whether positions begin after the id of padding, as RoBERTa's do: the padding of its position embedding shows
    it."""
    for name, module in model.named_modules():
        if "position" in name.rpartition(".")[2] and getattr(module, "padding_idx", None) is not None:
            return True
    return False


def longest_text(model: Any) -> int | None:
    """Tokens that a model takes at most; None: it has no limit, or its configuration does not name it."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    if not counts_positions_from_padding(model):
        return positions
    padding: int = model.config.pad_token_id
    return positions - padding - 1  # RoBERTa has 514 positions, of which 512 come after padding's, 1


def set_pad_id(config: Any, pad_token_id: int) -> None:
    """Set the id of padding in a configuration, and in its part for texts."""
    for part in (config, config.get_text_config()):
        part.pad_token_id = pad_token_id


def fit_padding(
    model: Any, tokenizer: PreTrainedTokenizerBase, before: int | None, name: str | None, key: str, where: str
) -> None:
    """Let generation and training use the tokenizer's id of padding, which the model's configuration has already.

    Args:
        before: The id in the checkpoint's configuration; None: it had none.
        name: The pretrained model; None: the model is made from scratch.
        key: The place of the model in the recipe, such as ``model``.
        where: ``key`` with the recipe, for messages.

    Raises:
        RecipeError: The checkpoint has another id, and counts positions from it.
    """
    pad = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = pad
    if before == pad:
        return
    if name is not None and before is not None:
        ids = f"the tokenizer pads with the id {pad} ({tokenizer.pad_token}), and the configuration of {name} has the "
        ids += f"id {before}"
        if counts_positions_from_padding(model):
            raise RecipeError(
                f"{ids}, from which {type(model).__name__} counts positions.",
                code="tokens-differ",
                place=f"{where}.tokenizer",
                remedy=(
                    "Set the tokenizer's pad_token to the token of this id, save it, and name its folder: "
                    f"{key}.tokenizer=FOLDER."
                ),
            )
        logger.warning(Problem(f"{ids}. The tokenizer's is used, and exported.", code="tokens-differ", place=key))
    _train_row_of_padding(model, tokenizer, is_new=name is None)


def _train_row_of_padding(model: Any, tokenizer: PreTrainedTokenizerBase, is_new: bool) -> None:
    """Give the embedding's row of the padding token a gradient, if that is another token, too, such as the end of a
    text. Torch gives the row that ``padding_idx`` names none, and transformers begins it with zeros.

    Args:
        is_new: Whether the model is made from scratch. The row is then drawn as the others are. From zeros, a norm
            would give it a gradient that is hundreds of times too large.
    """
    import torch

    from fastloop.runtime.random_states import preserve_random_states

    names = ("bos_token_id", "eos_token_id", "unk_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    if tokenizer.pad_token_id not in {getattr(tokenizer, name, None) for name in names}:
        return
    weight = model.get_input_embeddings().weight
    was_zero = False
    for module in model.modules():  # encoder and decoder may have an embedding each, of the same weight
        if getattr(module, "weight", None) is weight and getattr(module, "padding_idx", None) == tokenizer.pad_token_id:
            module.padding_idx = None
            was_zero = True
    if was_zero and is_new and not weight.is_meta:  # on meta, the weights come from another process
        with preserve_random_states(), torch.no_grad():
            weight[tokenizer.pad_token_id].normal_(0.0, float(weight.std()))
