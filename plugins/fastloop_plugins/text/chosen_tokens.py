"""Log-probabilities of chosen tokens, without the logits of all tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastloop import Batch, PluginError, RecipeError
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.models.checks import ROUTER_REMEDY
from fastloop_plugins.text.forward_passes import compute
from fastloop_plugins.text.head_trial import try_head
from fastloop_plugins.text.next_token_loss import Reduction, with_loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run

logger = logging.getLogger("fastloop")

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time: 200 MB of float32 with a vocabulary of 50,000."""


def chunk_log_probabilities(run: Run, model: nn.Module, chunk_tokens: int = CHUNK_TOKENS) -> None:
    """Let ``log_probabilities`` compute the head of a model in chunks of tokens, forward and backward.

    Call it in ``before_prepare``, for a model whose ``build_model`` has called ``add_loss``, after plugins that replace
    the head, and before those that shard the model: a task declares ``runs_after = ("lora",)`` and ``runs_before =
    ("activation-checkpointing", "slot:strategy")``. Every process must call it. A model that changes its logits after
    the head, such as by ``final_logit_softcapping``, computes all logits, and the log names the reason.

    Raises:
        RecipeError: In training, the configuration asks for the loss of a router, ``output_router_logits``, which is no
            part of log-probabilities.
    """
    from fastloop_plugins.text.chunked_loss import chunked_loss, chunked_token_losses

    changed = with_loss(model)
    vocabulary = None if changed is None else changed.vocabulary
    config = getattr(changed, "config", None)
    is_trained = run.recipe.inference is None
    if is_trained and config is not None and getattr(config.get_text_config(), "output_router_logits", False):
        raise RecipeError(
            f"{type(changed).__name__} has output_router_logits: true, and the loss of this task has no part for the "
            "router.",
            code="unsupported-model",
            place=f"{run.recipe.where}: model",
            remedy=ROUTER_REMEDY,
        )

    def loss(head: Any, states: Tensor, targets: Tensor, reduction: Reduction, temperature: float) -> Tensor:
        if reduction == "mean":
            return chunked_loss(head, states, targets, vocabulary, chunk_tokens)
        losses: Tensor = chunked_token_losses(head, states, targets, vocabulary, chunk_tokens, temperature)
        return losses

    reason = try_head(run, model, "log_probabilities", loss)
    if reason is not None:
        name = type(changed if changed is not None else model).__name__
        logger.info("log-probabilities need the logits of all tokens: %s %s", name, reason)


def log_probabilities(
    model: nn.Module,
    batch: Mapping[str, Any],
    targets: Tensor,
    places: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities of chosen tokens, float32, with gradients.

    After ``chunk_log_probabilities``, the logits of a few tokens exist at a time, and the backward pass computes them
    again. Otherwise all exist; the result is the same up to rounding.

    Args:
        model: ``run.model``, or another one on which ``add_loss`` was called.
        batch: Inputs of the model, such as ``input_ids`` (B, T) int64 and ``attention_mask``; padded or packed.
        targets: The next token of each token of the batch, (B, T) int64; -100: none.
        places: The tokens whose targets are chosen, (N,) int64, as indices into the B * T tokens of the batch: see
            ``WithPlaces``. None: all tokens.
        temperature: Divides the logits.

    Returns:
        (N,), or (B, T) without ``places``; 0 for a target of -100.

    Raises:
        PluginError: ``add_loss`` was not called on the model.
    """
    if with_loss(model) is None:
        raise PluginError(
            f"{type(model).__name__} takes no targets.",
            code="unsupported-model",
            place="log_probabilities",
            remedy="Call fastloop_plugins.text.add_loss(model) in build_model.",
        )
    arguments: dict[str, Any] = {"reduction": "none", "temperature": temperature, "use_cache": False}
    losses: Tensor = compute(model, batch, targets=targets, places=places, **arguments).loss
    return -losses


class WithPlaces:
    """Collates with another collator, and adds ``places``: the tokens that have a target, (N,) int64, as indices into
    the B * T tokens of the batch.

    The host knows them, so no device is read. Wrap the collator outside of `packing`:

        @hookimpl(wrapper=True, specname="build_collator", tryfirst=True)
        def add_places(self):
            return WithPlaces((yield))

    Args:
        collate: Builds a batch with ``column``; batches without it stay as they are.
        column: The targets, (B, T); -100 for a token without one.
    """

    def __init__(self, collate: Callable[[list[Any]], Batch], column: str = "targets") -> None:
        self.collate = collate
        self.column = column

    @property
    def deterministic(self) -> bool:
        """As in ``DatasetProtocol``."""
        return getattr(self.collate, "deterministic", False)

    def __call__(self, samples: list[Any]) -> Batch:
        batch = self.collate(samples)
        if self.column not in batch.inputs:
            return batch
        chosen = batch.inputs[self.column].flatten() != IGNORED
        return replace(batch, inputs={**batch.inputs, "places": chosen.nonzero()[:, 0]})
