"""Collators of datasets that come without one: torch's ``default_collate``, padding by a tokenizer, and the number of
targets that a loss is the mean over, for the losses and models whose rule is known.

A mean over the targets that are not ignored needs that number as the weight of a micro-batch. With the number of
samples as weight, micro-batches and processes would change the gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten
from torch.utils.data import default_collate

from fastloop import Batch, UsageError
from fastloop.errors import DataError
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.tasks.shared.losses import ClassLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DefaultCollator:
    """Stacks samples. Lists of token ids become tensors, and a tokenizer pads those of different lengths, and their
    ``labels``.

    Args:
        tokenizer: A tokenizer of transformers; None: samples must have equal shapes.
        remedy: How the user can make samples equal, for messages.
        multiple: The length of padded samples is a multiple of this.
        names_labels: Whether a column ``label`` or ``label_ids`` becomes ``labels``, as in transformers'
            ``DataCollatorWithPadding``.
        pads_right: Whether to pad on the right, whatever the tokenizer's side is. A causal language model needs it in
            training: with padding on the left, the padding would have to predict a row's first token, and many models
            count positions from the padding. The loss of a row would depend on the other rows of its batch.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        remedy: str,
        multiple: int | None = None,
        *,
        names_labels: bool = False,
        pads_right: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.remedy = remedy
        self.multiple = multiple
        self.names_labels = names_labels
        self.pads_right = pads_right

    def __call__(self, samples: list[Any]) -> Any:
        rows = samples
        first = samples[0]
        # first dict: its check calls no Python function
        has_ids = not isinstance(first, tuple) and isinstance(first, dict | Mapping) and "input_ids" in first
        if has_ids:
            rows = [_as_tensors(sample) for sample in samples]
            if self.tokenizer is not None and _find_difference(rows):
                rows = self._pad(rows, self.tokenizer)
        try:
            batch = default_collate(rows)
        except RuntimeError:
            difference = _find_difference(rows)
            if difference is None:
                raise
            raise DataError(
                f"the samples of a batch have {difference}, expected one shape.", code="wrong-shape", remedy=self.remedy
            ) from None
        if self.names_labels and isinstance(batch, dict) and "labels" not in batch:
            for name in ("label", "label_ids"):
                if name in batch:
                    batch["labels"] = batch.pop(name)
                    break
        return batch

    def _pad(self, rows: list[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[Mapping[str, Any]]:
        """Rows of equal length: the tokenizer pads its own inputs, and labels get -100."""
        from transformers.data.data_collator import pad_without_fast_tokenizer_warning

        if tokenizer.pad_token is None:
            raise DataError(
                "the tokenizer has no padding token.",
                code="no-padding-token",
                place="processing_class",
                remedy="Set one: tokenizer.pad_token = tokenizer.eos_token.",
            )
        inputs_of_tokenizer = {"input_ids", "special_tokens_mask", *tokenizer.model_input_names}
        names = [name for name in rows[0] if name in inputs_of_tokenizer]
        inputs = [{name: row[name].tolist() for name in names} for row in rows]
        padding_side = "right" if self.pads_right else tokenizer.padding_side
        padded: Any = pad_without_fast_tokenizer_warning(  # type: ignore[no-untyped-call]
            tokenizer,
            inputs,
            padding_side=padding_side,
            pad_to_multiple_of=self.multiple,
            return_tensors="pt",
        )
        padded_rows: list[Mapping[str, Any]] = []
        labels = self._pad_labels(rows, padded["input_ids"].shape[1], padding_side)
        for index, row in enumerate(rows):
            padded_row = dict(row)
            for name, values in padded.items():
                padded_row[name] = values[index]
            if labels is not None:
                padded_row["labels"] = labels[index]
            padded_rows.append(padded_row)
        return padded_rows

    @staticmethod
    def _pad_labels(rows: list[Mapping[str, Any]], width: int, padding_side: str) -> list[Tensor] | None:
        """The labels of rows in equal length. Labels of tokens get the width of the inputs, on the same side; others,
        such as those of a decoder, that of the longest one. None: not every row has a sequence of labels.

        Args:
            width: Tokens of the padded inputs.
            padding_side: That of the inputs.
        """
        labels = []
        for row in rows:
            label = row.get("labels")
            if not isinstance(label, Tensor) or label.dim() != 1:
                return None
            labels.append(label)
        is_per_token = all(len(label) == len(row["input_ids"]) for label, row in zip(labels, rows, strict=True))
        if not is_per_token:
            width = max(len(label) for label in labels)
        pads_left = is_per_token and padding_side == "left"
        padded = []
        for label in labels:
            missing = width - len(label)
            sides = (missing, 0) if pads_left else (0, missing)
            padded.append(functional.pad(label, sides, value=IGNORED))
        return padded


def _as_tensors(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """A sample whose lists of numbers are tensors, if its token ids are a list. ``default_collate`` would transpose
    lists."""
    if not isinstance(sample.get("input_ids"), list):
        return sample
    tensors = {}
    for name, value in sample.items():
        is_numbers = isinstance(value, list) and all(isinstance(number, int | float) for number in value)
        tensors[name] = torch.tensor(value) if is_numbers else value
    return tensors


def _find_difference(samples: Sequence[Any]) -> str | None:
    """The first field whose shapes differ, and two of the shapes; None if there is none."""
    first = samples[0]
    if isinstance(first, Mapping):
        fields = [(repr(name), [sample.get(name) for sample in samples]) for name in first]
    elif isinstance(first, tuple):
        # the elements that all samples have
        fields = [(f"element {place}", list(values)) for place, values in enumerate(zip(*samples, strict=False))]
    else:
        fields = [("tensors", list(samples))]
    for name, values in fields:
        shapes = [_shape(value) for value in values]
        for shape in shapes:
            if shape != shapes[0]:
                return f"{name} of the shapes {shapes[0]} and {shape}"
    return None


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or the length of a list; empty for other values."""
    if hasattr(value, "shape"):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list | tuple) else ()


@dataclass(frozen=True)
class TargetRule:
    """How to count the targets of a batch.

    Attributes:
        ignored: Targets of this value do not count.
        weight: Weight of each class, float, (classes,); None: all are 1.
        shifted: The first target of each row has no prediction, as in transformers' causal language models.
    """

    ignored: int = IGNORED
    weight: Tensor | None = None
    shifted: bool = False

    def count(self, targets: Tensor) -> float | None:
        """The number of the targets, or the sum of their weights; None for targets that are no integers."""
        if targets.is_floating_point():
            return None
        if self.shifted:
            targets = targets[..., 1:]
        is_counted = targets != self.ignored
        counted = targets[is_counted]
        if self.weight is None:
            return float(counted.numel())
        return float(self.weight.double()[counted].sum())


class TargetCounter:
    """Sets the ``samples`` of a batch to those that the collator kept, its ``loss_weight`` to the number of targets,
    and its ``tokens``.

    It keeps the values that the collator has set, except the ``loss_weight`` for ``ClassLoss``.

    Attributes:
        count: The function for the targets of batches ``(inputs, targets)`` and the ``labels`` of mappings; None:
            samples are counted.
        deterministic: As in ``DatasetProtocol``: that of the collator.

    Raises:
        DataError: The collator left all samples out.
        UsageError: ``ClassLoss`` finds no targets.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], loss: Any, model: nn.Module | None = None) -> None:
        self.collate = collate
        self.count = count_for_loss(loss)
        self.count_of_next = count_for_loss(loss, shifted=True)
        # spawned workers get a copy of the counter: a loss may be a lambda, which cannot be copied
        self.class_loss = loss if isinstance(loss, ClassLoss) else None
        self.model_computes_loss = loss is None
        self.deterministic = getattr(collate, "deterministic", False)
        if model is not None:
            self.set_model(model)

    def set_model(self, model: nn.Module) -> None:
        """Count for the loss of a model, which computes it if there is no loss function, and for a loss function beside
        a causal language model. Call it before the first batch."""
        rule = target_rule(model)
        if self.model_computes_loss:
            self.count = rule.count if rule is not None else None
        elif rule is not None and rule.shifted and self.count_of_next is not None:
            self.count = self.count_of_next

    def __call__(self, samples: list[Any]) -> Any:
        result = self.collate(samples)
        batch = result if isinstance(result, Batch) else Batch(result)
        values, targets = values_and_targets(batch.inputs)
        if self.class_loss is not None and not _is_pair(batch.inputs):
            raise UsageError(
                f"needs batches (inputs, targets), and found one of type {type(batch.inputs).__name__}.",
                code="wrong-batch",
                place=self.class_loss.where,
            )
        kept_samples = batch.samples or count_samples(values, targets, len(samples))
        if kept_samples == 0:
            raise DataError(
                f"the collator left out all samples of a micro-batch: {len(samples)}.",
                code="empty-batch",
                expected="at least one",
                remedy=(
                    "Leave samples out of the dataset instead (torch.utils.data.Subset), or use larger micro-batches."
                ),
            )
        counted: float | None = None
        if self.count is not None and isinstance(targets, Tensor):
            counted = self.count(targets)
        weight = kept_samples if counted is None else counted
        tokens = batch.tokens or count_tokens(values)
        if result is not batch and weight == kept_samples == len(samples) and not tokens:
            return result  # plugins that wrap the collator read the plain inputs
        batch.samples = kept_samples
        batch.tokens = tokens
        if self.class_loss is not None or batch.loss_weight < 0:
            batch.loss_weight = weight
        return batch


def count_samples(values: Any, targets: Any, drawn: int) -> int:
    """The number of samples in a batch. A collator may leave samples out, or make several of one.

    It is the length of the targets, if another tensor of the batch has this length, too. Without targets, all tensors
    of a mapping must have the same length. Otherwise the shapes do not show it, and the batch has the samples that were
    drawn. For example:

    * values (29, 8), targets (29,): 29 samples, of 32 drawn;
    * values (5, 32, 8), targets (5, 32), 32 drawn: 32 samples, with positions in the first dimension;
    * values (50, 32, 8), targets (117,), as CTC takes them, 32 drawn: 32 samples.

    Args:
        values: A tensor, a mapping, or anything else; None: the collator returned nothing.
        targets: A tensor, or anything else; None: there are none.
        drawn: The number of samples that the collator was given.
    """
    if values is None and targets is None:
        return 0
    if isinstance(targets, Tensor) and targets.dim():
        if len(targets) == drawn:
            return drawn  # as most batches
        shapes = _shapes(values)
        length = len(targets)
        agrees = any(shape[0] == length for shape in shapes)
        shapes.append(targets.shape)
    elif isinstance(values, Tensor) and values.dim():
        shapes = _shapes(targets)
        length = len(values)
        agrees = bool(shapes) and all(shape[0] == length for shape in shapes)
        shapes.append(values.shape)
    elif isinstance(values, Mapping) and all(isinstance(value, Tensor) for value in values.values()):
        shapes = _shapes(values)
        length = shapes[0][0] if shapes else drawn
        agrees = all(shape[0] == length for shape in shapes)
    else:
        return drawn
    positions_come_first = all(len(shape) > 1 and shape[1] == drawn for shape in shapes)
    return length if agrees and not positions_come_first else drawn


def count_tokens(inputs: Any) -> int:
    """The number of tokens that the attention mask of a batch keeps, or of all without one. 0 for inputs that are no
    mapping with ``input_ids``."""
    if not isinstance(inputs, dict | Mapping):
        return 0
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        return 0
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return int(mask.count_nonzero())
    return ids.numel()


def _is_pair(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and len(inputs) == 2


def values_and_targets(inputs: Any) -> tuple[Any, Any]:
    """The values that the model reads, and the targets of the loss; None: there are none."""
    if isinstance(inputs, dict | Mapping):  # first dict: its check calls no Python function
        values = {name: value for name, value in inputs.items() if name != "labels"}
        return values, inputs.get("labels")
    if _is_pair(inputs):
        return inputs[0], inputs[1]
    return inputs, None


def _shapes(values: Any) -> list[torch.Size]:
    """The shapes of all tensors that have a dimension."""
    leaves, _ = tree_flatten(dict(values) if isinstance(values, Mapping) else values)
    return [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]


def count_for_loss(loss: Any, shifted: bool = False) -> Callable[[Tensor], float | None] | None:
    """The function for ``ClassLoss``, and for ``cross_entropy`` and ``nll_loss`` of torch, also as modules or
    ``partial``; else None.

    Args:
        shifted: See ``TargetRule``.
    """
    if isinstance(loss, ClassLoss):
        return TargetRule().count if loss.weights is None else loss.weight_of
    arguments: Mapping[str, Any]
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        arguments = {"reduction": loss.reduction, "ignore_index": loss.ignore_index, "weight": loss.weight}
    else:
        function = loss.func if isinstance(loss, functools.partial) else loss
        arguments = loss.keywords if isinstance(loss, functools.partial) else {}
        if function not in (functional.cross_entropy, functional.nll_loss):
            return None
    if arguments.get("reduction", "mean") != "mean":
        return None
    weight = arguments.get("weight")
    if weight is not None:
        weight = weight.detach().cpu()
    return TargetRule(arguments.get("ignore_index", IGNORED), weight, shifted).count


def target_rule(model: nn.Module) -> TargetRule | None:
    """The rule for a model of transformers that computes a mean cross entropy of its ``labels``; None for other
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
        return TargetRule()
    if base.loss_type in (None, "ForCausalLM", "ForConditionalGeneration") and base.get_output_embeddings() is not None:
        return TargetRule(shifted=not base.config.is_encoder_decoder)
    return None
