"""Refuses losses and metrics that broadcast predictions of shape (N, 1) with targets of shape (N,) to (N, N).

Each prediction then meets every target, so the model learns the mean of the targets. Torch's own losses only warn of
it, and an expression such as ``((predictions - targets) ** 2).mean()`` does not even warn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fastloop import UsageError
from fastloop.probing import uncompiled

HIDES_SHAPE = {
    torch.dist,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.gaussian_nll_loss,
    functional.hinge_embedding_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.poisson_nll_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
}
"""Functions of torch that compare elements. Their result is a mean, so it does not have the shape of the broadcast."""


class BroadcastCheck:
    """Calls a loss, or a model that computes its own, and watches the first calls of a run."""

    def __init__(self) -> None:
        self._checked: set[tuple[Any, Any]] = set()
        self._is_model_checked = False

    def call_loss(self, loss: Callable[[Any, Any], Tensor], predictions: Any, targets: Any) -> Tensor:
        """``loss(predictions, targets)``, watched at the first call for each combination of shapes.

        Raises:
            UsageError: A value of the predictions and one of the targets were broadcast to a larger shape.
        """
        shapes = (_inner_shapes(predictions), _inner_shapes(targets))
        if shapes in self._checked:
            return loss(predictions, targets)
        with uncompiled(), BroadcastWatch(predictions, targets):
            result = loss(predictions, targets)
        if not _has_one_sample(targets):
            self._checked.add(shapes)
        return result

    def call_model(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        """``model(**batch)``, watched at the first training pass, unless the model is compiled or one of transformers.
        Every tensor that depends on parameters is a value of the predictions, and ``labels`` are the targets.

        Raises:
            UsageError: As ``call_loss``.
        """
        if self._is_model_checked or not torch.is_grad_enabled():
            return model(**batch)
        labels = batch.get("labels")
        self._is_model_checked = not _has_one_sample(labels)
        if not self._is_model_checked or not _runs_own_code(model):
            return model(**batch)
        with BroadcastWatch((), labels):
            return model(**batch)


class BroadcastWatch(TorchFunctionMode):
    """Raises an error at a call of torch that broadcasts predictions with targets to a larger shape.

    A value belongs to the predictions or to the targets if it was computed from one of both only. Pairwise losses are
    let through: they subtract predictions from predictions, such as (N, 1) from (1, N), or give both operands the same
    number of dimensions.
    """

    def __init__(self, predictions: Any, targets: Any) -> None:
        super().__init__()
        # id -> tensor: a tensor that is kept shares its id with no other one
        self._predictions = {id(tensor): tensor for tensor in _tensors(predictions)}
        self._targets = {id(tensor): tensor for tensor in _tensors(targets)}
        self._mixed: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        arguments = _tensors((args, kwargs))
        predictions = [tensor for tensor in arguments if self._is_prediction(tensor)]
        targets = [tensor for tensor in arguments if id(tensor) in self._targets and id(tensor) not in self._mixed]
        has_mixed = any(id(tensor) in self._mixed for tensor in arguments)
        if func in HIDES_SHAPE:
            for prediction in predictions:
                for target in targets:
                    check_shapes(prediction.shape, target.shape)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if has_mixed or (predictions and targets):
                self._mixed[id(tensor)] = tensor
            elif predictions:
                self._predictions[id(tensor)] = tensor
            elif targets:
                self._targets[id(tensor)] = tensor
            for prediction in predictions:
                for target in targets:
                    if tensor.shape == _broadcast_shape(prediction.shape, target.shape):
                        check_shapes(prediction.shape, target.shape)
        return result

    def _is_prediction(self, tensor: Tensor) -> bool:
        if id(tensor) in self._mixed or id(tensor) in self._targets:
            return False
        return id(tensor) in self._predictions or tensor.requires_grad


def check_shapes(predictions: Sequence[int], targets: Sequence[int]) -> None:
    """Check the shapes of values that are compared element by element.

    Examples of shapes that raise an error: (8, 1) and (8,), (8,) and (8, 1), (8, 1, 1) and (8, 1), (8, 8, 1) and
    (8, 8). Shapes that do not: (8, 1) and (8, 1), (8, 3) and (3,), (8, 1) and (1, 8).

    Raises:
        UsageError: Their broadcast has more elements than each of them, and they differ in the number of dimensions.
    """
    shape = _broadcast_shape(predictions, targets)
    if shape is None or len(predictions) == len(targets):
        return
    if shape.numel() <= max(math.prod(predictions), math.prod(targets)):
        return
    if len(predictions) > len(targets):
        remedy = (
            "Let the model return output.squeeze(-1), or let the dataset give targets the last dimension, as "
            "target.unsqueeze(-1)."
        )
    else:
        remedy = "Let the model return output.unsqueeze(-1), or the dataset targets without their last dimension."
    raise UsageError(
        f"predictions of shape {tuple(predictions)} and targets of shape {tuple(targets)} would be broadcast to "
        f"{tuple(shape)}: each prediction would be compared with every target.",
        code="shapes-broadcast",
        expected="predictions and targets of one shape",
        remedy=remedy,
    )


def _broadcast_shape(first: Sequence[int], second: Sequence[int]) -> torch.Size | None:
    """None: the shapes cannot be broadcast. Torch's function would import sympy, for half a second."""
    try:
        return torch.Size(np.broadcast_shapes(tuple(first), tuple(second)))
    except ValueError:
        return None


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _inner_shapes(values: Any) -> Any:
    """The shapes without the first dimension; None for a tensor without dimensions."""
    if isinstance(values, Tensor):
        return values.shape[1:] if values.dim() else None
    return tuple(_inner_shapes(tensor) for tensor in _tensors(values))


def _has_one_sample(targets: Any) -> bool:
    """Whether no tensor has two elements in its first dimension: (1, 1) and (1,) are broadcast to nothing larger."""
    return all(tensor.dim() == 0 or len(tensor) < 2 for tensor in _tensors(targets))


def _runs_own_code(model: nn.Module) -> bool:
    """Whether the model computes its loss in Python code that is not compiled and not part of transformers."""
    from accelerate.utils import extract_model_from_parallel

    compiler = sys.modules.get("torch._dynamo")  # nothing is compiled if nothing has imported it
    for module in model.modules():
        if compiler is not None and isinstance(module, compiler.OptimizedModule):
            return False
        if module._compiled_call_impl is not None:
            return False
    return not type(extract_model_from_parallel(model)).__module__.startswith("transformers.")
