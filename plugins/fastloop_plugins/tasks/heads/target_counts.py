"""The number of targets that a loss is the mean over, for the losses and models whose rule is known.

A mean over the targets that are not ignored needs that number as the weight of a micro-batch. With the number of
samples as weight, micro-batches and processes would change the gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fastloop import Batch, UsageError
from fastloop_plugins.tasks.heads.losses import ClassLoss


@dataclass(frozen=True)
class TargetRule:
    """How to count the targets of a batch.

    Attributes:
        ignored: Targets of this value do not count.
        weight: Weight of each class, float, (classes,); None: all are 1.
        shifted: The first target of each row has no prediction, as in transformers' causal language models.
    """

    ignored: int = -100
    weight: Tensor | None = None
    shifted: bool = False

    def count(self, targets: Tensor) -> float:
        """The number of the targets, or the sum of their weights; 0 for targets that are no integers."""
        if targets.is_floating_point():
            return 0
        found = targets[..., 1:] if self.shifted else targets
        found = found[found != self.ignored]
        return float(found.numel() if self.weight is None else self.weight.double()[found].sum())


class TargetCounter:
    """Sets the ``loss_weight`` of batches to their number of targets. Keeps one that the collator has set, but not for
    ``ClassLoss``.

    Attributes:
        count: The function for the targets of batches ``(inputs, targets)`` and the ``labels`` of mappings; None:
            samples are counted.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], loss: Any, model: nn.Module | None = None) -> None:
        self.collate, self.loss, self.count = collate, loss, count_for_loss(loss)
        if model is not None:
            self.set_model(model)

    def set_model(self, model: nn.Module) -> None:
        """Count for the loss of a model, which computes it if there is no loss function. Call it before the first
        batch."""
        if self.loss is None:
            self.count = count_for_model(model)

    def __call__(self, samples: list[Any]) -> Any:
        result = self.collate(samples)
        if self.count is None:
            return result
        batch = result if isinstance(result, Batch) else Batch(result)
        inputs, has_classes = batch.inputs, isinstance(self.loss, ClassLoss)
        if batch.loss_weight and not has_classes:
            return result
        if isinstance(inputs, Sequence) and len(inputs) == 2:
            targets = inputs[1]
        elif has_classes:
            raise UsageError(
                f"{self.loss.where}: needs batches (inputs, targets), and found one of type {type(inputs).__name__}."
            )
        else:
            targets = inputs.get("labels") if isinstance(inputs, Mapping) else None
        weight = self.count(targets) if isinstance(targets, Tensor) else 0
        if result is not batch and weight in (0, len(samples)):  # plugins that wrap the collator read the plain inputs
            return result
        batch.loss_weight = weight
        return batch


def count_for_loss(loss: Any) -> Callable[[Tensor], float] | None:
    """The function for ``ClassLoss``, and for ``cross_entropy`` and ``nll_loss`` of torch, also as modules or
    ``partial``; else None."""
    if isinstance(loss, ClassLoss):
        return TargetRule().count if loss.weights is None else loss.weight_of
    function, given = (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        given = {name: getattr(loss, name) for name in ("reduction", "ignore_index", "weight")}
    elif function not in (functional.cross_entropy, functional.nll_loss):
        return None
    if given.get("reduction", "mean") != "mean":
        return None
    weight = given.get("weight")
    return TargetRule(given.get("ignore_index", -100), None if weight is None else weight.detach().cpu()).count


def count_for_model(model: nn.Module) -> Callable[[Tensor], float] | None:
    """The function for a model of transformers that computes a mean cross entropy of its ``labels``; None for other
    models."""
    transformers = sys.modules.get("transformers")  # it has created the model, so it is imported
    base: Any = getattr(model, "get_base_model", lambda: model)()  # that of a PeftModel
    if transformers is None or not isinstance(base, transformers.PreTrainedModel):
        return None
    if base.loss_type in (
        "ForMaskedLM",
        "ForTokenClassification",
        "ForSequenceClassification",
        "ForImageClassification",
    ):
        return TargetRule().count
    if base.loss_type in (None, "ForCausalLM", "ForConditionalGeneration") and base.get_output_embeddings() is not None:
        return TargetRule(shifted=not base.config.is_encoder_decoder).count
    return None
