"""Train the rows of new tokens beside low-rank adapters: peft's ``trainable_token_indices``."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from fastloop import PluginError
from fastloop_plugins.models.vocabulary import embeddings

if TYPE_CHECKING:
    from fastloop import Run

DIVIDING = ("fsdp", "deepspeed", "tensor-parallel")
"""Strategies that divide weights. Peft replaces rows of whole ones."""


def new_token_rows(run: Run, model: Any, saved: Collection[str], merge: bool) -> dict[str, list[int]]:
    """Name of a module -> its rows to train: those of the tokens that ``model.tokens`` or ``model.resize_embeddings``
    adds. A head that shares the embedding's weight shares its rows, too.

    Args:
        saved: Names of modules that are trained in full.
        merge: Whether the adapters are merged into the exported model.

    Raises:
        PluginError: The strategy divides weights, or the adapter alone would have no base model with these rows.
    """
    ids: list[int] = getattr(model, "new_token_ids", [])
    if not ids:
        return {}
    strategy = run.plugins.in_slot("strategy")
    where = f"{run.recipe.where}: plugins.lora"
    if strategy in DIVIDING:
        raise PluginError(
            f"the recipe adds tokens to the model, and peft cannot train rows of weights that {strategy} divides.",
            code="unsupported-strategy",
            place=where,
            remedy="Use ddp, or add the tokens in a run without lora first.",
        )
    if model.has_new_rows and not merge:
        raise PluginError(
            "found false, and the recipe adds tokens: an adapter alone needs a base model with their rows.",
            code="conflicting-values",
            place=f"{where}.merge",
            remedy="Set merge: true.",
        )
    names = {module: name for name, module in model.named_modules()}
    rows: dict[str, list[int]] = {}
    weights = set()
    for module in embeddings(model):
        is_saved = any(names[module] == one or names[module].endswith(f".{one}") for one in saved)
        if not is_saved and id(module.weight) not in weights:
            rows[names[module]] = ids
        weights.add(id(module.weight))
    return rows


def check_token_rows(model: Any, trained: dict[str, list[int]] | list[int] | None, what: str) -> None:
    """Raise an error if an adapter to continue does not train the rows of the tokens that the recipe adds.

    Args:
        trained: The adapter's ``trainable_token_indices``.
        what: The adapter and its place in the recipe, for messages.

    Raises:
        PluginError: It trains other rows.
    """
    rows: set[int] = set()
    for part in trained.values() if isinstance(trained, dict) else [trained or []]:
        rows.update(part)
    if set(getattr(model, "new_token_ids", [])) - rows:
        raise PluginError(
            f"{what} has no rows for tokens that the recipe adds.",
            code="tokens-differ",
            remedy="Merge the adapter into its base model, and add the tokens to the merged model.",
        )
