"""The loss of a language model, as a part of its forward pass.

A compiler thus builds one graph of model and loss, and the head can compute only the tokens that have a loss, or head
and loss in chunks. A task that calls ``add_loss`` in ``build_model`` declares ``next-token-loss``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORED = -100
"""Target that cross entropy ignores."""

Reduction = Literal["mean", "none"]
"""One loss, the mean over all targets; or the loss of each token, 0 where there is no target."""


def add_loss(model: Any, vocabulary: int | None = None) -> None:
    """Let the forward of a causal language model take ``targets``, and return ``loss``: their mean cross entropy.

    Targets are (B, T) int64, the next token of each, or -100 for a token without a loss. With gradients, the output has
    no logits, unless the model's attribute ``keeps_logits`` is true.

    The forward takes three more arguments. ``places``, (N,) int64, are the tokens of the batch that have a target, as
    indices into its B * T tokens: a head that ``adapt_head`` changed computes only these, others ignore them.
    ``reduction="none"`` returns the loss of each token, (B, T) or (N,) float32. ``temperature`` divides the logits.

    Args:
        vocabulary: Tokens of the vocabulary, if the head has more rows: their logits are cut off. None: no more rows.
    """
    import torch

    plain = model.forward.__func__  # a function of the instance: it survives a copy of the model

    @wraps(plain)
    def forward(
        self: nn.Module,
        *args: Any,
        targets: Tensor | None = None,
        places: Tensor | None = None,
        reduction: Reduction = "mean",
        temperature: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        if targets is not None and uses_head(self, places):
            return head_output(self, plain, args, kwargs, targets, places, reduction, temperature)
        output = plain(self, *args, **kwargs)
        if targets is None and vocabulary is None:
            return output
        fields = dict(output)
        if vocabulary is not None:
            fields["logits"] = fields["logits"][..., :vocabulary]
        if targets is not None:
            loss = cross_entropy(fields["logits"].flatten(0, 1), targets.flatten(), reduction, temperature)
            if reduction == "none":
                loss = loss.view_as(targets) if places is None else loss.index_select(0, places)
            fields["loss"] = loss
            if torch.is_grad_enabled() and not self.keeps_logits:
                del fields["logits"]  # accelerate would convert them to float32
        return type(output)(**fields)

    model.forward = MethodType(forward, model)
    model.keeps_logits = False
    model.has_adapted_head = False
    model.computes_in_head = False
    model.vocabulary = vocabulary  # ``with_loss`` finds the model by this attribute


def cross_entropy(logits: Tensor, targets: Tensor, reduction: Reduction, temperature: float) -> Tensor:
    """Cross entropy in float32 of logits (N, V), which temperature divides, and targets (N,) int64."""
    import torch

    is_narrow = logits.dtype in (torch.bfloat16, torch.float16) and logits.device.type == "cpu"
    if is_narrow and not torch.compiler.is_compiling() and type(logits) is torch.Tensor:  # no DTensor
        from fastloop_plugins.text.narrow_cross_entropy import narrow_cross_entropy

        return narrow_cross_entropy(logits, targets, reduction, temperature)
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)


def with_loss(model: nn.Module) -> Any:
    """The module in ``model`` that ``add_loss`` changed, whatever wraps it; None if there is none."""
    return next((module for module in model.modules() if "vocabulary" in vars(module)), None)


HeadLoss = Callable[[Any, "Tensor", "Tensor", Reduction, float], "Tensor"]
"""``(head, hidden states (N, d), targets (N,), reduction, temperature) -> loss``."""


def adapt_head(model: Any, compute: HeadLoss | None = None) -> None:
    """Let the head of a language model that ``add_loss`` changed compute only the tokens that have a loss.

    Hooks of the head, such as those that gather sharded weights, act as before.

    Args:
        compute: Computes the loss instead of the logits, of all tokens if no places are given. None: the head computes
            the logits of the places, (1, N, vocabulary), which the model may change after the head.
    """
    if model.has_adapted_head:
        restore_head(model)
    head = model.get_output_embeddings()
    logits = head.forward.__func__

    @wraps(logits)
    def head_forward(self: Any, hidden: Tensor) -> Tensor:
        if self.fastloop_targets is None:
            every: Tensor = logits(self, hidden)
            return every
        states = hidden.flatten(0, -2)
        if self.fastloop_places is not None:
            states = states.index_select(0, self.fastloop_places)
        if compute is None:
            chosen: Tensor = logits(self, states[None])
            return chosen
        return compute(self, states, self.fastloop_targets, *self.fastloop_arguments)

    head.fastloop_logits = logits
    head.forward = MethodType(head_forward, head)
    _set_loss_inputs(head, None, None, None)
    model.has_adapted_head = True
    model.computes_in_head = compute is not None


def _set_loss_inputs(
    head: Any, targets: Tensor | None, places: Tensor | None, arguments: tuple[Reduction, float] | None
) -> None:
    """Set what the adapted head reads beside its hidden states. Without targets, it computes logits."""
    head.fastloop_targets = targets
    head.fastloop_places = places
    head.fastloop_arguments = arguments


def restore_head(model: Any) -> None:
    """Undo ``adapt_head``."""
    head = model.get_output_embeddings()
    head.forward = MethodType(head.fastloop_logits, head)
    for name in ("logits", "targets", "places", "arguments"):
        delattr(head, f"fastloop_{name}")
    model.has_adapted_head = False
    model.computes_in_head = False


def uses_head(model: Any, places: Tensor | None) -> bool:
    """Whether the adapted head computes a loss. It does not if the output needs logits, if a plugin has replaced the
    head since, such as by one with an adapter, or if processes divide its weight."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    if not model.has_adapted_head or model.keeps_logits:
        return False
    if places is None and not model.computes_in_head:
        return False
    head = model.get_output_embeddings()
    return type(head) is nn.Linear and hasattr(head, "fastloop_targets") and not isinstance(head.weight, DTensor)


def head_output(
    model: Any,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Tensor,
    places: Tensor | None,
    reduction: Reduction,
    temperature: float,
) -> Any:
    """The output of the forward ``plain`` with the loss that the adapted head computes. It has no logits."""
    head = model.get_output_embeddings()
    tokens = targets.flatten()
    if places is not None:
        tokens = tokens.index_select(0, places)
    _set_loss_inputs(head, tokens, places, (reduction, temperature))
    try:
        output = plain(model, *args, **kwargs)
    finally:
        _set_loss_inputs(head, None, None, None)
    fields = dict(output)
    from_head = fields.pop("logits")  # the loss, or the logits of the places
    if model.computes_in_head:
        loss = from_head
        if reduction == "none" and places is None:
            loss = loss.view_as(targets)
    else:
        logits = from_head[..., : model.vocabulary].flatten(0, 1)
        loss = cross_entropy(logits, tokens, reduction, temperature)
    fields["loss"] = loss
    return type(output)(**fields)
