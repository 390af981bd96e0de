"""The loss that a user gives to `module` or `Trainer`, beside a model of transformers with logits for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastloop import UsageError
from fastloop_plugins.tasks.shared.collate import count_for_loss, target_rule


class TokenLoss:
    """Gives a loss the logits and labels of tokens as it expects them.

    Torch's cross entropy gets logits of shape (N, C) and classes of shape (N,). For a causal language model, the logits
    at a token are compared with the label of the next one, as in transformers::

        labels of a row           [5, 6, 7, 8]
        logits                    after 5, after 6, after 7     (those after 8 predict nothing)
        compared with             [6, 7, 8]

    Any other loss gets both as they are, unless the model is a causal language model: its loss would compare each
    token with itself.

    Args:
        loss: The loss function.
        is_shifted: Whether the model is a causal language model.
        place: The argument or key of the loss, for messages.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], is_shifted: bool, place: str) -> None:
        self.loss = loss
        self.is_shifted = is_shifted
        self.place = place
        self.is_cross_entropy = count_for_loss(loss) is not None

    def __call__(self, logits: Any, labels: Any) -> Tensor:
        """The loss of logits (batch, tokens, classes) and labels (batch, tokens), or of values of other shapes.

        Raises:
            UsageError: A loss of another kind is given for a causal language model.
        """
        are_tokens = isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[:2] == labels.shape
        if not are_tokens:
            return self.loss(logits, labels)
        if self.is_cross_entropy:
            if self.is_shifted:
                logits = logits[:, :-1]
                labels = labels[:, 1:]
            return self.loss(logits.flatten(0, 1), labels.flatten())
        if self.is_shifted:
            raise UsageError(
                "the logits of a causal language model predict the next token, and this loss would compare them with "
                "the token itself.",
                code="labels-not-shifted",
                place=self.place,
                expected="cross_entropy or nll_loss of torch, for which fastloop shifts the labels",
                remedy="For another loss, shift logits and labels in the hook compute_loss of a plugin.",
            )
        return self.loss(logits, labels)


def loss_for_model(loss: Callable[[Any, Any], Tensor] | None, model: nn.Module, place: str) -> Any:
    """The loss to call with outputs of ``model``: a ``TokenLoss`` for one of transformers whose targets are classes."""
    rule = target_rule(model)
    if loss is None or rule is None:
        return loss
    return TokenLoss(loss, rule.shifted, place)
