"""The loss of a language model, as a part of its forward pass.

A compiler thus builds one graph of model and loss, and the head can compute only the tokens that have a loss, or head
and loss in chunks. A task that calls ``add_loss`` in ``build_model`` declares ``next-token-loss``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastloop_plugins._targets import IGNORED

if TYPE_CHECKING:
    from torch import Tensor, nn


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


class LossInputs(NamedTuple):
    """The inputs of an adapted head beside its hidden states. The forward of the model calls the head with these alone,
    so ``head_output`` sets the others as an attribute of the head.

    Attributes:
        targets: (N,) int64, the next token of each token to compute; -100: it has no loss.
        places: (N,) int64, the tokens to compute, as indices into the B * T tokens of the batch. None: all of them.
        reduction: As in the forward that ``add_loss`` makes, like ``temperature``.
    """

    targets: Tensor
    places: Tensor | None
    reduction: Reduction
    temperature: float


def adapt_head(model: Any, compute: HeadLoss | None = None) -> None:
    """Let the head of a language model that ``add_loss`` changed compute only the tokens that have a loss.

    For a batch of 2 texts of 3 tokens with the places [1, 2, 5], the head gets hidden states (2, 3, d) and computes
    those of 3 tokens, (3, d). Hooks of the head, such as those that gather sharded weights, act as before.

    Args:
        compute: Computes the loss instead of the logits, of all tokens if no places are given. None: the head computes
            the logits of the places, (1, N, vocabulary), which the model may change after the head.
    """
    if model.has_adapted_head:
        restore_head(model)
    head = model.get_output_embeddings()
    compute_logits = head.forward.__func__  # a function of the instance: it survives a copy of the model

    @wraps(compute_logits)
    def head_forward(self: Any, hidden: Tensor) -> Tensor:
        inputs: LossInputs | None = self.fastloop_loss_inputs
        if inputs is None:
            every: Tensor = compute_logits(self, hidden)
            return every
        states = hidden.flatten(0, -2)  # (B, T, d) -> (B * T, d)
        if inputs.places is not None:
            states = states.index_select(0, inputs.places)
        if compute is None:
            chosen: Tensor = compute_logits(self, states[None])
            return chosen
        return compute(self, states, inputs.targets, inputs.reduction, inputs.temperature)

    head.fastloop_compute_logits = compute_logits
    head.fastloop_loss_inputs = None  # without them, the head computes the logits of all tokens
    head.forward = MethodType(head_forward, head)
    model.has_adapted_head = True
    model.computes_in_head = compute is not None


def restore_head(model: Any) -> None:
    """Undo ``adapt_head``."""
    head = model.get_output_embeddings()
    head.forward = MethodType(head.fastloop_compute_logits, head)
    del head.fastloop_compute_logits
    del head.fastloop_loss_inputs
    model.has_adapted_head = False
    model.computes_in_head = False


def uses_head(model: Any, places: Tensor | None) -> bool:
    """Whether the adapted head computes the loss, or the logits of the places. If not, it computes all logits."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    if not model.has_adapted_head or model.keeps_logits:
        return False
    if places is None and not model.computes_in_head:
        return False
    head = model.get_output_embeddings()
    is_replaced = type(head) is not nn.Linear or not hasattr(head, "fastloop_loss_inputs")  # by one with an adapter
    if is_replaced:
        return False
    is_divided = isinstance(head.weight, DTensor)  # among processes
    return not is_divided


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
    """The output of the forward ``plain`` with the loss that the adapted head computes. It has no logits.

    Args:
        model: Its head is adapted, and ``uses_head`` is true.
        plain: The forward of the model before ``add_loss``.
        args: Arguments of ``plain``, like ``kwargs``.
        targets: (B, T) int64, as ``places``, ``reduction`` and ``temperature`` in the forward that ``add_loss`` makes.
    """
    head = model.get_output_embeddings()
    head_targets = targets.flatten()
    if places is not None:
        head_targets = head_targets.index_select(0, places)
    head.fastloop_loss_inputs = LossInputs(head_targets, places, reduction, temperature)
    try:
        output = plain(model, *args, **kwargs)
    finally:
        head.fastloop_loss_inputs = None
    fields = dict(output)
    from_head = fields.pop("logits")  # the model returns here what its head computes
    if model.computes_in_head:
        loss = from_head
    else:
        logits = from_head[..., : model.vocabulary].flatten(0, 1)  # (1, N, rows of the head) -> (N, vocabulary)
        loss = cross_entropy(logits, head_targets, reduction, temperature)
    if reduction == "none" and places is None:
        loss = loss.view_as(targets)
    fields["loss"] = loss
    return type(output)(**fields)
