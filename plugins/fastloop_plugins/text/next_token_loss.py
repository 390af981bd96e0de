"""The loss of a language model, as a part of its forward pass.

A compiler thus builds one graph of model and loss, and ``fused-loss`` can compute head and loss without all logits. A
task that calls ``add_loss`` in ``build_model`` declares ``next-token-loss``.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORED = -100
"""Target that cross entropy ignores."""


def add_loss(model: Any, vocabulary: int | None = None) -> None:
    """Let the forward of a causal language model take ``targets``, and return ``loss``: their mean cross entropy.

    Targets are (B, T) int64, the next token of each, or -100 for a token without a loss. With gradients, the output has
    no logits, unless the model's attribute ``keeps_logits`` is true.

    Args:
        vocabulary: Tokens of the vocabulary, if the head has more rows: their logits are cut off. None: no more rows.
    """
    import torch
    from torch.nn.functional import cross_entropy

    plain = model.forward.__func__  # a function of the instance: it survives a copy of the model

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, targets: Tensor | None = None, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        if targets is None and vocabulary is None:
            return output
        fields = dict(output)
        if vocabulary is not None:
            fields["logits"] = fields["logits"][..., :vocabulary]
        if targets is not None:
            fields["loss"] = cross_entropy(
                fields["logits"].flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED
            )
            if torch.is_grad_enabled() and not self.keeps_logits:
                del fields["logits"]  # accelerate would convert them to float32
        return type(output)(**fields)

    model.forward, model.keeps_logits = MethodType(forward, model), False
    model.vocabulary = vocabulary  # by which ``with_loss`` finds the model


def with_loss(model: nn.Module) -> Any:
    """The module in ``model`` that ``add_loss`` changed, whatever wraps it; None if there is none."""
    return next((module for module in model.modules() if "vocabulary" in vars(module)), None)


def compute_in_head(model: Any, head: Any, compute: Any) -> None:
    """Let the head of a language model that ``add_loss`` changed compute the loss, instead of the logits.

    Args:
        head: The module that computes logits. Its hooks, such as those that gather sharded weights, act as before.
        compute: ``(head, hidden states, targets) -> loss``, 0-dim.
    """
    with_targets, plain, logits = model.forward.__func__, model.forward.__func__.__wrapped__, head.forward.__func__

    @wraps(logits)
    def head_forward(self: Any, hidden: Tensor) -> Tensor:
        result: Tensor = logits(self, hidden) if self.targets is None else compute(self, hidden, self.targets)
        return result

    @wraps(plain)
    def forward(self: Any, *args: Any, targets: Tensor | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return with_targets(self, *args, **kwargs)
        head.targets = targets
        try:
            output = plain(self, *args, **kwargs)
        finally:
            head.targets = None
        fields = dict(output)
        return type(output)(**fields | {"loss": fields.pop("logits")})

    head.targets = None
    head.forward, model.forward = MethodType(head_forward, head), MethodType(forward, model)
