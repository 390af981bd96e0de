"""Adapt the head of a language model, and try whether its losses stay the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop.probing import has_values, probing
from fastloop.problem import typed_clause
from fastloop_plugins.text.next_token_loss import HeadLoss, adapt_head, restore_head, with_loss

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run

TOLERANCE = 1e-4
"""Largest relative difference of the two losses by rounding. A change of the logits gives 1e-3 and more."""
CHANGES = ("logit", "softcap", "logits_scaling", "lm_head_multiplier")
"""Parts of the names of a model's options that change its logits after the head."""


def try_head(run: Run, model: nn.Module, plugin: str, compute: HeadLoss | None = None) -> str | None:
    """``adapt_head``, unless the model's losses would change; returns the reason against it, which continues the name
    of the model's class. Every process must call it, in ``before_prepare``. Only processes with weights try the model.

    Args:
        plugin: The plugin that needs it, for the reason.
        compute: As for ``adapt_head``.
    """
    reasons = run.processes.all_gather_object(_adapt(model, plugin, compute))
    reason = next(filter(None, reasons), None)
    changed = with_loss(model)
    if reason is not None and changed is not None and changed.has_adapted_head:
        restore_head(changed)
    return reason


def _adapt(model: nn.Module, plugin: str, compute: HeadLoss | None) -> str | None:
    from torch import nn

    changed = with_loss(model)
    if changed is None:
        return "computes no loss in its forward: its task did not call add_loss"
    head = changed.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"has the head {type(head).__name__}, and {plugin} computes a torch.nn.Linear"
    if not has_values(model):
        adapt_head(changed, compute)
        return None
    chooses = compute is None
    expected = trial_loss(changed, chooses)
    adapt_head(changed, compute)
    try:
        change = abs(trial_loss(changed, chooses) / expected - 1)
    except Exception as error:  # models may do anything with what the head returns
        problem = typed_clause(error)
        return f"computes with its logits after the head ({problem}){describe_options(changed)}"
    if change <= TOLERANCE:
        return None
    return f"changes its logits after the head: its loss differs by {100 * change:.2g}%{describe_options(changed)}"


def trial_loss(model: Any, chooses: bool) -> float:
    """The model's loss of a few tokens, without dropout. One of them is ignored.

    Args:
        chooses: Name the places of the others.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = min(100, model.vocabulary or model.config.get_text_config().vocab_size)
    ids, targets = torch.randint(tokens, (2, 2, 8), generator=generator)
    targets[0, 3] = -100
    places = (targets.flatten() >= 0).nonzero()[:, 0] if chooses else None
    with probing(model):
        if "flash" in str(model.config._attn_implementation):
            model.set_attn_implementation("sdpa")  # FlashAttention needs CUDA, and the model is on the CPU
        return float(model(input_ids=ids, targets=targets, places=places, use_cache=False).loss)


def describe_options(model: Any) -> str:
    """The options of a model that may change its logits, for a message."""
    shown = []
    for name, value in model.config.get_text_config().to_dict().items():
        if name == "output_router_logits" or not isinstance(value, int | float):
            continue
        if any(part in name for part in CHANGES):
            shown.append(f"{name}: {value}")
    return f" (its options: {', '.join(shown)})" if shown else ""
