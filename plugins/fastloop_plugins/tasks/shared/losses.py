"""Losses of a recipe: cross entropy and focal loss with class weights, functions of torch, or code of your own."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Plugin, Problem, RecipeError, UsageError, option
from fastloop.errors import did_you_mean
from fastloop.options import parse
from fastloop.plugins.plugin import hookimpl
from fastloop.problem import counted, typed_clause

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fastloop import Run

logger = logging.getLogger("fastloop")


MEANS = ("mean", "batchmean")
"""Values of ``reduction`` with which a loss of torch is a mean. ``batchmean`` is that of ``kl_div``, over samples."""
LEGACY = ("size_average", "reduce")
"""Older arguments of torch's losses, in place of ``reduction``."""
NEEDS_MEAN = "fastloop needs the mean, which it weights by samples."


class ClassifierOptions(Plugin):
    """Base class of tasks with classes: their options for losses and metrics, and the count of ``balanced``."""

    loss: str | dict[str, Any] = option(
        "cross_entropy or focal, or with options: {name: cross_entropy, label_smoothing: 0.1, class_weights: "
        "balanced}.",
        default="cross_entropy",
    )
    metrics: dict[str, dict[str, Any]] = option(
        "More metrics: name -> {type: a class of torchmetrics, or file.py:name, and its arguments}.",
        default_factory=dict,
    )
    criterion: ClassLoss

    @hookimpl
    def before_prepare(self, run: Run) -> None:
        """Count ``balanced`` on the samples that the run trains on: a plugin such as `folds` may have divided them."""
        if run.recipe.inference is None:
            self.criterion.count_again(run.datasets["train"])


@dataclass(kw_only=True)
class LossOptions:
    """The options of a classifier's loss."""

    name: Literal["cross_entropy", "focal"] = option("The loss.", default="cross_entropy")
    class_weights: Literal["balanced"] | list[float] | dict[str, float] | None = option(
        "A weight for each class: a list, a mapping of the classes' names, or balanced.", default=None
    )
    label_smoothing: float = option(
        "Share of the target that is spread over all classes, for cross_entropy.", default=0.0, ge=0, le=1
    )
    gamma: float = option("Exponent of focal: 0 gives cross entropy.", default=2.0, ge=0)

    def __post_init__(self) -> None:
        if self.name == "focal" and self.label_smoothing:
            raise ValueError("label_smoothing: is for cross_entropy, and the loss is focal. Remove it.")


class ClassLoss:
    """The mean loss of logits of shape (N, C, ...) and classes of shape (N, ...) int64, weighted by class.

    It has the dtype of the logits. Tasks on texts and images cast them to float32, whatever the precision of the
    forward pass.

    The mean is over the sum of the targets' weights, as in torch. So that micro-batches and processes give the loss of
    one big batch, a batch's ``loss_weight`` must be ``weight_of`` its targets. Focal loss: Lin et al., "Focal Loss for
    Dense Object Detection", 2017.

    Args:
        value: The recipe's value: a name or a mapping of ``LossOptions``.
        where: The recipe and the key, for messages.

    Attributes:
        weights: One weight for each class, shape (C,), float32, on the CPU; None: all are 1.

    Raises:
        RecipeError: An option is invalid.
    """

    def __init__(self, value: str | Mapping[str, Any], where: str) -> None:
        self.options = parse(LossOptions, {"name": value} if isinstance(value, str) else value, where)
        self.place = where
        self.where = f"{where}.class_weights"
        self.weights: Tensor | None = None
        self._placed: Tensor | None = None
        self._names: Sequence[str] | None = None
        self._counted_dataset: Any = None  # the dataset of ``set_weights``

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_placed": None, "_counted_dataset": None}  # workers of a loader get a copy

    def count_again(self, dataset: Any, labels: Callable[[], Any] | None = None) -> None:
        """Count the classes of ``balanced`` again, if the run trains on another dataset than that of ``set_weights``.

        Args:
            labels: Returns the classes of its samples; None: its method ``tags``, else its attribute ``labels``. A
                warning says if it has neither.

        Raises:
            RecipeError: ``balanced`` finds no sample of a class in it.
        """
        if self.options.class_weights != "balanced" or self._counted_dataset is None:
            return
        if dataset is self._counted_dataset:
            return
        of_dataset = getattr(dataset, "labels", None)
        if labels is None:
            labels = getattr(dataset, "tags", None)
        if labels is None and of_dataset is None:
            logger.warning(
                Problem(
                    "balanced counts the training split before a plugin has replaced it by other samples.",
                    code="other-class-weights",
                    place=self.where,
                    remedy="Give a list of weights.",
                )
            )
            return
        self.set_weights(labels or (lambda: of_dataset), self._names, dataset)

    def set_weights(
        self, labels: Callable[[], Any] | None, names: Sequence[str] | None = None, dataset: Any = None
    ) -> None:
        """Compute ``weights``. ``balanced`` is ``N / (C * count)``, as in scikit-learn, with the counts of the training
        split; for sets of classes, it is ``(N - count) / count``.

        Args:
            labels: Returns the classes of the training samples, (N,) int64, of which negative ones are ignored, or the
                sets of classes, (N, C) of 0.0 and 1.0; None: the training split is not read.
            names: The classes' names; None: unknown, and as many as ``balanced`` finds or the list has.
            dataset: The dataset of these samples, for ``count_again``.

        Raises:
            RecipeError: A class has no weight, or ``balanced`` finds no sample of it.
        """
        import torch

        self._names = names
        self._counted_dataset = dataset
        weights = self.options.class_weights
        if weights is None:
            return
        if weights == "balanced":
            self._balance(labels, names)
            return
        if isinstance(weights, dict):
            weights = self._in_order(weights, names or ())
        has_other_count = names is not None and len(weights) != len(names)
        if has_other_count or min(weights, default=0.0) <= 0:
            raise RecipeError(
                code="wrong-weights",
                place=self.where,
                found=str(weights),
                expected=f"a weight above 0 for each of the {len(names or weights)} classes",
            )
        self.weights = torch.tensor(weights)

    def _balance(self, labels: Callable[[], Any] | None, names: Sequence[str] | None) -> None:
        """Compute the weights of ``balanced``. The arguments are those of ``set_weights``."""
        import torch

        if labels is None:
            logger.warning(
                Problem(
                    "this loss has no class weights: balanced counts the training split, which is not read here. So "
                    "the loss differs from that of the run, and the metrics of predicted classes do not.",
                    code="no-class-weights",
                    place=self.where,
                )
            )
            return
        classes = torch.as_tensor(labels())
        if classes.dim() == 2:  # 0.0 and 1.0 for each class
            self._balance_sets(classes, names or ())
            return
        counts = torch.bincount(classes[classes >= 0], minlength=len(names or ()))
        if not counts.all():
            number = int(counts.argmin())
            raise RecipeError(
                f"no training sample has the class {names[number] if names else number!r}.",
                code="empty-class",
                place=f"{self.where}: balanced",
                remedy="Give a list of weights.",
            )
        self.weights = (counts.sum() / (len(counts) * counts.double())).float()

    def _balance_sets(self, sets: Tensor, names: Sequence[str]) -> None:
        """Compute the weights of ``balanced`` for sets of classes: samples without the class, divided by those with it.

        Args:
            sets: (samples, C), 0.0 and 1.0.
            names: The classes' names.

        Raises:
            RecipeError: No sample has a class, or all have it.
        """
        counts = sets.double().sum(0)
        for name, count in zip(names, counts.tolist(), strict=True):
            if not 0 < count < len(sets):
                raise RecipeError(
                    f"{'every' if count else 'no'} training sample has the class {name!r}.",
                    code="empty-class",
                    place=f"{self.where}: balanced",
                    remedy="Give a list of weights.",
                )
        self.weights = ((len(sets) - counts) / counts).float()

    def _in_order(self, by_name: Mapping[str, float], names: Sequence[str]) -> list[float]:
        """The weights of a mapping in the order of the classes.

        Raises:
            RecipeError: A class has no weight, or a weight has no class.
        """
        for name in [*by_name, *names]:
            if name in by_name and name in names:
                continue
            remedy = f" The classes: {', '.join(names)}."
            if not names:
                remedy = " The task has no names of classes: give a list."
            raise RecipeError(
                f"{'no class' if name in by_name else 'no weight for'} {name!r}.",
                code="unknown-label",
                place=self.where,
                remedy=remedy,
            )
        return [by_name[name] for name in names]

    def weight_of(self, targets: Tensor) -> float:
        """The sum of the targets' weights, in float64. Negative targets have no weight: torch's loss ignores -100, its
        default for ``ignore_index``, and refuses the others.

        Raises:
            UsageError: A target is no class with a weight.
        """
        import torch

        assert self.weights is not None
        problem = ""
        if targets.is_floating_point():
            problem = str(targets.dtype)
        elif targets.numel() and targets.max() >= len(self.weights):
            problem = f"the class {int(targets.max())}"
        if problem:
            raise UsageError(
                f"has {len(self.weights)} weights, and a batch's targets have {problem}.",
                code="wrong-weights",
                place=self.where,
                expected="classes from 0",
            )
        classes = targets[targets >= 0].to(torch.int64)
        return float(self.weights.double()[classes].sum())

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss.

        Raises:
            UsageError: The targets are one-hot integers, or there are more or fewer weights than classes of the logits.
        """
        from torch.nn.functional import cross_entropy, log_softmax, nll_loss

        self._refuse_one_hot(logits, targets)
        weights = self._weights_on(logits.device)
        if weights is not None and logits.shape[1:2] != weights.shape:
            raise UsageError(
                code="wrong-weights",
                place=self.where,
                found=f"{counted(len(weights), 'weight')}, logits of the shape {tuple(logits.shape)} and targets of "
                f"{tuple(targets.shape)}",
                expected="a weight for each class, in the second dimension of the logits",
            )
        if self.options.name == "cross_entropy":
            return cross_entropy(logits, targets, weights, label_smoothing=self.options.label_smoothing)
        log = log_softmax(logits, 1)
        return nll_loss((1 - log.exp()) ** self.options.gamma * log, targets, weights)

    def _refuse_one_hot(self, logits: Tensor, targets: Tensor) -> None:
        """Raise an error for integers of the shape of the logits, such as (N, C): ``balanced`` has counted 0 and 1 as
        classes. Without the logits, they look like the classes of tokens (N, T), for which logits are (N, C, T).
        """
        if targets.is_floating_point() or logits.shape != targets.shape:
            return
        samples = (len(targets), *targets.shape[2:])
        raise UsageError(
            f"the targets are integers of the shape of the logits, {tuple(logits.shape)}. They seem to be one-hot.",
            code="one-hot-targets",
            place=self.place,
            expected=f"the numbers of the classes, of the shape {samples}",
            remedy="Return the argmax of each one-hot target from the dataset.",
        )

    def of_sets(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The binary cross entropy of logits (N, C) and targets (N, C) of 0.0 and 1.0: the mean over all of them.

        A class's weight multiplies the loss of its ones, as ``pos_weight`` does in torch. So the mean has no weights,
        and a batch has its number of samples as ``loss_weight``.
        """
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(logits, targets, pos_weight=self._weights_on(logits.device))

    def _weights_on(self, device: torch.device) -> Tensor | None:
        """``weights`` on a device."""
        if self.weights is not None and (self._placed is None or self._placed.device != device):
            self._placed = self.weights.to(device)
        return self._placed


def targets_of(dataset: Any, where: str) -> Tensor:
    """The targets of all samples ``(inputs, target)`` of a map-style dataset, end to end: (targets,) of integers. Reads
    every sample, except of a ``TensorDataset``.

    Raises:
        RecipeError: The dataset has no length, its samples another form, or their targets are no integers.
    """
    targets = _read_targets(dataset, where)
    if targets.is_floating_point():
        raise RecipeError(
            code="wrong-weights",
            place=f"{where}: balanced",
            found=f"targets of {targets.dtype}",
            expected="classes from 0, as integers",
            remedy="Return them, such as the argmax of one-hot targets, or remove class_weights.",
        )
    return targets


def _read_targets(dataset: Any, where: str) -> Tensor:
    """The targets of all samples, end to end. The arguments and errors are those of ``targets_of``."""
    import torch
    from torch.utils.data import TensorDataset

    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1].flatten()
    try:
        return torch.cat([torch.as_tensor(dataset[index][1]).flatten() for index in range(len(dataset))])
    except (TypeError, ValueError, KeyError, IndexError) as error:
        problem = typed_clause(error)
        raise RecipeError(
            f"cannot read the class of each training sample: {problem}.",
            code="no-labels",
            place=f"{where}: balanced",
            remedy="Give a list of weights.",
        ) from error


def torch_loss(value: str | Mapping[str, Any], where: str) -> Callable[..., Tensor]:
    """The function of torch.nn.functional that a recipe names, with its arguments.

    Raises:
        RecipeError: It does not exist, or has no such argument.
    """
    from torch.nn import functional

    name = value if isinstance(value, str) else str(value["name"])
    losses = [known for known in dir(functional) if known.endswith(("loss", "entropy", "with_logits", "div"))]
    if not hasattr(functional, name):
        raise RecipeError(
            f"torch.nn.functional has no {name!r}.",
            code="unknown-loss",
            place=where,
            remedy=did_you_mean(name, [*losses, "focal"]),
        )
    function: Callable[..., Tensor] = getattr(functional, name)
    return with_arguments(function, value, where)


def check_mean(loss: Any, where: str) -> None:
    """Check the settings of a loss: a module of torch or like one, or a ``partial``.

    Raises:
        UsageError: It returns a sum, or the loss of each sample.
    """
    keywords: dict[str, Any] = {}
    if isinstance(loss, functools.partial):
        keywords = loss.keywords
        loss = loss.func
    reduction = keywords.get("reduction", getattr(loss, "reduction", "mean"))
    if isinstance(reduction, str) and reduction not in MEANS:
        raise UsageError(
            f"found reduction={reduction!r}. {NEEDS_MEAN} Set reduction='mean'.", code="conflicting-values", place=where
        )
    for name in LEGACY:
        if keywords.get(name) is False:
            raise UsageError(f"found {name}=False. {NEEDS_MEAN} Remove it.", code="conflicting-values", place=where)


def warn_of_untrained(loss: Any, run: Run, place: str) -> None:
    """Warn of parameters of a loss that require gradients, and that neither the model nor the optimizer holds.

    Args:
        loss: A function, a module or a ``partial``; None: the model computes the loss.
        place: The argument or key of the loss, for messages.
    """
    from torch import nn

    from fastloop.unstepped import stepped_parameters

    function = loss.func if isinstance(loss, functools.partial) else loss
    if not isinstance(function, nn.Module):
        return
    held = {id(parameter) for parameter in run.unwrap_model().parameters()}
    held.update(id(parameter) for parameter in stepped_parameters(run.optimizer))
    for name, parameter in function.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            logger.warning(
                Problem(
                    f"{type(function).__name__} has parameters, such as {name}, that the optimizer does not hold. So "
                    "they do not change.",
                    code="parameters-left-out",
                    place=place,
                    remedy=(
                        "To train them, let the model hold and call the loss. Otherwise set requires_grad to False on "
                        "them."
                    ),
                )
            )
            return


def with_arguments(function: Callable[..., Any], value: str | Mapping[str, Any], where: str) -> Callable[..., Any]:
    """A function ``(predictions, targets)`` with the keyword arguments in a recipe's value.

    Raises:
        RecipeError: It has no such argument, or the loss would not be a mean.
        UsageError: The function itself is set to return no mean.
    """
    check_mean(function, where)
    if isinstance(value, str):
        return function
    name = value["name"]
    arguments = {key: item for key, item in value.items() if key != "name"}
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in arguments:
        is_no_mean = key == "reduction" and arguments[key] not in MEANS
        if key in LEGACY or is_no_mean:
            raise RecipeError(f"{NEEDS_MEAN} Remove it.", code="conflicting-values", place=f"{where}.{key}")
        if key == "weight":
            raise RecipeError(
                "set class_weights instead: they also weight micro-batches and processes.",
                code="conflicting-values",
                place=f"{where}.weight",
            )
        if key not in list(parameters)[2:] and not takes_any:
            raise RecipeError(
                f"{name} has no such argument.",
                code="unknown-argument",
                place=f"{where}.{key}",
                remedy=did_you_mean(key, list(parameters)[2:]),
            )
    return functools.partial(function, **arguments)
