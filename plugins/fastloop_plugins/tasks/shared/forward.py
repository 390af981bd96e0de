"""The loss and the outputs of a batch in one of two common forms: a mapping, or ``(inputs, targets)``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastloop import Output, Problem, UsageError
from fastloop.errors import did_you_mean
from fastloop.problem import clause, counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop_plugins.tasks.shared.broadcasts import BroadcastCheck


log = logging.getLogger("fastloop")


def compute_output(
    model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None, broadcasts: BroadcastCheck
) -> Output:
    """Compute the loss of a batch in one of two common forms.

    * a mapping: ``model(**batch)`` returns an object or mapping with ``loss`` (and ``logits``), like Hugging Face
      models. With a loss function, ``labels`` in the batch and ``logits`` in the result, the loss is
      ``loss(logits, labels)`` instead of the model's own. See ``TokenLoss`` for logits of tokens;
    * ``(inputs, targets)``: ``loss(model(inputs), targets)``.

    Args:
        broadcasts: Calls the loss or the model, and watches the first calls.

    Raises:
        UsageError: The batch has another form, the model returned no loss, or the loss broadcasts predictions with
            targets.
    """
    if isinstance(batch, dict | Mapping):  # first dict: its check calls no Python function
        try:
            result = broadcasts.call_model(model, batch)
        except TypeError as error:
            _check_arguments(model, batch, error)
            raise
        is_mapping = isinstance(result, dict | Mapping)
        logits = result.get("logits") if is_mapping else getattr(result, "logits", None)
        labels = batch.get("labels")
        if loss is not None and logits is not None and labels is not None:
            return Output(broadcasts.call_loss(loss, logits, labels), logits, labels)
        batch_loss = result.get("loss") if is_mapping else getattr(result, "loss", None)
        if batch_loss is None:
            raise UsageError(
                "the model returned no loss for a batch with the keys "
                f"{', '.join(map(str, batch))}.{_label_hint(batch)} Put the labels into the batch, or return an "
                "object with .loss.",
                code="no-loss",
            )
        return Output(batch_loss, logits, labels)
    if isinstance(batch, Sequence) and len(batch) == 2 and loss is not None:
        inputs, targets = batch
        predictions = model(inputs)
        return Output(broadcasts.call_loss(loss, predictions, targets), predictions, targets)
    raise UsageError(
        f"the loss of a batch cannot be computed: found {_describe(batch)}, and "
        f"{'no loss function' if loss is None else 'a loss function'}. Expected a mapping for model(**batch), which "
        f"returns the loss, or (inputs, targets) and a loss function.{_remedy(batch)}",
        code="wrong-batch",
    )


def warn_of_unused_loss(batch: Any, output: Output, model: nn.Module, place: str) -> bool:
    """Warn that a loss function is not used, because the model has computed the loss of a batch. Returns whether it
    has.

    Args:
        place: The argument or key of the loss function.
    """
    if not isinstance(batch, dict | Mapping):
        return False
    if output.predictions is not None and output.targets is not None:  # by which the loss function was computed
        return False
    missing = "the batch has no labels" if output.targets is None else "the model returns no logits"
    log.warning(
        Problem(
            f"the loss is not used: {missing}, and {type(model).__name__} returns its own loss.",
            code="loss-not-used",
            place=place,
            expected="`labels` in the batch and `logits` in the model's result, for loss(logits, labels)",
            remedy="Add them, or leave the loss out.",
        )
    )
    return True


def outputs(model: nn.Module, batch: Any) -> dict[str, list[Tensor]]:
    """The outputs of a batch, which needs no labels: name -> a tensor on the CPU for each sample.

    A mapping calls ``model(**batch)``; a tuple or list calls the model with its first element, and anything else with
    the batch itself. A tensor is named ``output``, and the elements of a tuple as in ``name_elements``. From a tuple,
    an object or a mapping, all tensors with a value for each sample are returned, without the loss.

    Raises:
        UsageError: The model returned no such tensor.
    """
    import torch
    from accelerate.utils import find_batch_size

    inputs = batch[0] if isinstance(batch, Sequence) and batch else batch
    try:
        result = model(**batch) if isinstance(batch, Mapping) else model(inputs)
    except TypeError as error:
        if isinstance(batch, Mapping):
            _check_arguments(model, batch, error)
        raise
    size = find_batch_size(batch)
    if isinstance(result, torch.Tensor):
        fields: dict[str, Any] = {"output": result}
    elif isinstance(result, Mapping):
        fields = dict(result)
    elif isinstance(result, tuple | list):
        fields = name_elements(result)
    else:
        fields = getattr(result, "__dict__", {})
    columns = {}
    for name, value in fields.items():
        has_samples = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == size
        if has_samples and name != "loss":
            columns[str(name)] = [row.clone() for row in value.cpu()]
    if not columns:
        raise UsageError(
            f"the model returned a {type(result).__name__} without a tensor that has a value for each of the {size} "
            "samples of a batch.",
            code="wrong-result",
            remedy="Return a tensor, or an object or mapping with tensors such as logits.",
        )
    return columns


def name_elements(result: Sequence[Any]) -> dict[str, Any]:
    """Name -> element of a sequence that a model returns: the fields of a namedtuple, else ``output_0``, ``output_1``
    and so on."""
    if hasattr(result, "_asdict"):
        return dict(result._asdict())
    return {f"output_{index}": value for index, value in enumerate(result)}


def _describe(batch: Any) -> str:
    """The class of a batch, and its number of elements."""
    name = type(batch).__name__
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        elements = counted(len(batch), "element")
        return f"a {name} of {elements}"
    return f"a {name}"


def _remedy(batch: Any) -> str:
    """How to write the samples of a batch that is a sequence."""
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        return ""
    if len(batch) == 2:
        return " Give a loss function: loss= of Trainer, or plugins.module.loss of a recipe."
    if len(batch) < 2:
        return " Let the dataset return the target, too."
    names = [f"x{number}" for number in range(1, len(batch))]
    values = ", ".join(names)
    mapping = ", ".join(f"'{name}': {name}" for name in names)
    return (
        f" If the last element is the target, let a sample be (({values}), y): forward then gets ({values}) as one "
        f"argument. Or let it be a mapping, {{{mapping}, 'labels': y}}, and let forward compute the loss."
    )


def _label_hint(batch: Mapping[str, Any]) -> str:
    """Advice to rename labels whose name Hugging Face models do not read."""
    similar = [name for name in ("label", "label_ids", "target", "targets") if name in batch]
    if "labels" in batch or not similar:
        return ""
    return (
        f" Hugging Face models compute a loss from 'labels': rename {similar[0]!r} to 'labels' in the dataset or "
        "the collator."
    )


def _check_arguments(model: nn.Module, batch: Mapping[str, Any], error: TypeError) -> None:
    """Raise a clearer error if the batch's keys do not match the arguments of the model's ``forward``.

    Raises:
        UsageError: They do not match.
    """
    from accelerate.utils import extract_model_from_parallel

    signature = inspect.signature(extract_model_from_parallel(model).forward)
    try:
        signature.bind(**batch)
    except TypeError:
        unknown = [name for name in batch if name not in signature.parameters]
        hint = _label_hint(batch) or (did_you_mean(unknown[0], signature.parameters) if unknown else "")
        raise UsageError(
            f"the model's forward does not take a batch with the keys {', '.join(map(str, batch))}: {clause(error)}.",
            code="wrong-batch",
            remedy=hint,
        ) from error
