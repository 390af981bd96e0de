"""Trains your own ``nn.Module``.

Model, datasets, loss and metrics come from a Python file next to the recipe, or from a package.

    model: {module: "digits_module.py:Digits", arguments: {hidden: 64}}
    data:  {module: "digits_module.py:digits"}
    plugins:
      - module: {loss: cross_entropy, metrics: {accuracy: {type: MulticlassAccuracy, num_classes: 10}}}

A loss with arguments is a mapping: ``{name: cross_entropy, label_smoothing: 0.1}``, ``{name: focal, gamma: 2}``.
``class_weights`` are a list, or ``balanced``: from the targets of the training split. ``data.module`` returns
``{"train": dataset, "validation": dataset, "test": dataset}``; the last two are optional. The loss of a sample
``(inputs, target)`` is ``loss(model(inputs), target)``; that of a mapping is ``model(**batch).loss``. With a loss, that
of a mapping with ``labels`` is ``loss(model(**batch).logits, labels)``. Torch's ``cross_entropy`` works with models of
transformers for sequences and tokens: it gets the label of the next token for a causal language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import Output, Plugin, RecipeError, hookimpl, option
from fastloop.errors import did_you_mean
from fastloop.options import parse
from fastloop.problem import clause
from fastloop.splits import SPLITS
from fastloop_plugins.models.warm_start import HELP, STRICT_HELP, load_weights, weight_files
from fastloop_plugins.tasks.shared.losses import (
    ClassLoss,
    targets_of,
    torch_loss,
    warn_of_untrained,
    with_arguments,
)  # fmt: skip
from fastloop_plugins.tasks.shared.metrics import (
    collect,
    find_metrics,
    make_metrics,
    with_probabilities,
    with_sigmoids,
)

if TYPE_CHECKING:
    from torch import nn
    from torchmetrics import MetricCollection

    from fastloop import Batch, Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.tasks.shared.broadcasts import BroadcastCheck

SOFTMAX_LOSSES = ("cross_entropy", "focal", "nll_loss")
"""Losses of logits, or of the logarithms of probabilities, whose softmax is the probability of each class."""
SIGMOID_LOSSES = ("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss")
"""Losses of logits whose sigmoid is the probability of a class."""


@dataclass(kw_only=True)
class ReferencedCode:
    """The keys of both sections."""

    module: str = option("file.py:name or package.module:name.")
    arguments: dict[str, Any] = option("Its keyword arguments.", default_factory=dict)


@dataclass(kw_only=True)
class ReferencedModel(ReferencedCode):
    """The ``model`` section."""

    weights: str | None = option(HELP, default=None)
    weights_strict: bool = option(STRICT_HELP, default=False)


@dataclass(kw_only=True)
class ReferencedData(ReferencedCode):
    """The ``data`` section."""

    pad_to_multiple_of: int | None = option(
        "Multiple to which your collator pads lengths, for plugins that count tokens; null: as they choose.",
        default=None,
        ge=1,
    )
    shuffle_block: int | None = option(
        "Shuffle training samples in blocks of this many, for a slow disk; null: an epoch as a whole.",
        default=None,
        ge=16,
    )


class Module(Plugin):
    """Trains a module of your own, with your datasets, loss and metrics."""

    name = "module"
    on_resume = {"metrics": "free"}
    slot = "task"
    sections = {"model": ReferencedModel, "data": ReferencedData}

    loss: str | dict[str, Any] | None = option(
        "focal, a function of torch.nn.functional or file.py:name, or {name: ..., arguments}; null: the model "
        "returns .loss.",
        default=None,
    )
    collate: str | None = option("file.py:name of a collator; null: stack tensors.", default=None)
    metrics: dict[str, dict[str, Any]] = option(
        "Name -> {type: a class of torchmetrics, or file.py:name, and its arguments}.", default_factory=dict
    )

    recipe: Recipe  # this and the next attributes: from check_recipe on
    file: str  # the recipe, for messages
    code: dict[str, Any]  # section -> its options
    named: dict[str, str]  # key of the recipe -> the reference to code that it holds
    criterion: Any  # None: the loss is code of the user
    counters: list[Any]  # the collator of each split
    collection: MetricCollection | None
    imported: dict[str, Any]  # key of the recipe -> its class or function; from build_datasets on
    broadcasts: BroadcastCheck  # from build_model on

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        loss = self.loss
        self.loss_name = loss.get("name") if isinstance(loss, dict) else loss
        if loss is not None and not isinstance(self.loss_name, str):
            raise RecipeError(
                code="missing-value",
                place=f"{self.where}.loss",
                found=f"{loss!r} without a name",
                expected="such as {name: cross_entropy}",
            )
        weighted = isinstance(loss, dict) and loss.get("class_weights") is not None
        self.uses_classes = weighted or self.loss_name == "focal"
        answered_if_set = {"build_collator": self.collate or weighted, "build_metrics": self.metrics}
        self.has_warned = False
        self.fallback_hooks = ("compute_loss", *(hook for hook, value in answered_if_set.items() if not value))

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        return "model.module is set" if "module" in recipe.model else None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop.recipe.references import check_reference

        self.recipe = recipe
        self.file = recipe.where
        self.code: dict[str, Any] = {
            key: parse(cls, getattr(recipe, key), f"{recipe.where}: {key}") for key, cls in self.sections.items()
        }
        self.named = {f"{key}.module": code.module for key, code in self.code.items()}
        if self.collate is not None:
            self.named["plugins.module.collate"] = self.collate
        if self.loss_name is not None and ":" in self.loss_name:
            self.named["plugins.module.loss"] = self.loss_name
        for key, reference in self.named.items():
            check_reference(reference, recipe, key)
        weight_files(recipe)
        self.criterion: Any = None
        self.counters: list[Any] = []  # the collator of each split
        chosen: Any = self.loss
        place = f"{recipe.where}: plugins.module.loss"
        metrics = self.metrics
        if self.uses_classes:
            self.criterion = ClassLoss(chosen, place)
        elif self.loss_name is not None and "plugins.module.loss" not in self.named:
            self.criterion = torch_loss(chosen, place)
        place = f"{recipe.where}: plugins.module.metrics"
        classes = find_metrics(metrics, recipe, "plugins.module.metrics")
        made = make_metrics(classes, metrics, place)
        if self.loss_name in SOFTMAX_LOSSES:
            made = with_probabilities(made)
        elif self.loss_name in SIGMOID_LOSSES:
            made = with_sigmoids(made)
        self.collection = collect(made, place) if metrics else None

    @hookimpl
    def build_datasets(self) -> Mapping[str, Any]:
        from fastloop.recipe.references import import_object

        self.imported = {key: import_object(reference, self.recipe, key) for key, reference in self.named.items()}
        for key, code in self.imported.items():
            if not callable(code):
                problem = f"{self.named[key]} is of type {type(code).__name__}, expected a class or function."
                raise RecipeError(problem, code="wrong-result", place=f"{self.file}: {key}")
        datasets = self._call("data")
        if not isinstance(datasets, Mapping):
            problem = f"returned a {type(datasets).__name__}, expected a mapping of {', '.join(SPLITS)}."
            raise RecipeError(problem, code="wrong-result", place=f"{self.file}: data.module")
        for split in datasets:
            if split not in SPLITS:
                raise RecipeError(
                    f"returned a split {split!r}.",
                    code="unknown-split",
                    place=f"{self.file}: data.module",
                    remedy=did_you_mean(split, SPLITS),
                )
        loss = self.imported.get("plugins.module.loss")
        if self.uses_classes:
            train = datasets.get("train")
            self.criterion.set_weights(lambda: targets_of(train, self.criterion.where), dataset=train)
        elif loss is not None:
            self.criterion = with_arguments(loss, self.loss or "", f"{self.file}: plugins.module.loss")
        return datasets

    @hookimpl
    def before_prepare(self, run: Run) -> None:
        if self.uses_classes and run.recipe.inference is None:
            train = run.datasets["train"]
            self.criterion.count_again(train, lambda: targets_of(train, self.criterion.where))

    @hookimpl
    def build_collator(self) -> Callable[[list[Any]], Any]:
        from fastloop_plugins.tasks.shared.collate import DefaultCollator, TargetCounter

        remedy = "Let the dataset pad them, or name a collator: plugins.module.collate=FILE.py:NAME."
        collate = self.imported.get("plugins.module.collate") or DefaultCollator(None, remedy)
        counter = TargetCounter(collate, self.criterion)
        self.counters.append(counter)
        return counter

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        from torch import nn

        from fastloop_plugins.tasks.shared.broadcasts import BroadcastCheck
        from fastloop_plugins.tasks.shared.user_losses import loss_for_model

        self.broadcasts = BroadcastCheck()

        model = self._call("model")
        if not isinstance(model, nn.Module):
            raise RecipeError(
                f"made a {type(model).__name__}, expected a torch.nn.Module.",
                code="wrong-result",
                place=f"{self.file}: model.module",
            )
        run.new_weights = frozenset(load_weights(model, self.recipe, None))
        for counter in self.counters:
            counter.set_model(model)
        if not self.uses_classes:
            self.criterion = loss_for_model(self.criterion, model, f"{self.file}: plugins.module.loss")
        return model

    @hookimpl
    def build_metrics(self) -> MetricCollection | None:
        return self.collection

    @hookimpl
    def check_run(self, run: Run) -> None:
        warn_of_untrained(self.imported.get("plugins.module.loss"), run, f"{self.file}: plugins.module.loss")

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        from fastloop_plugins.tasks.shared.micro_batches import warn_of_other_means

        run.plugins.unsubscribe(self, "before_step")
        warn_of_other_means(run, batches, self)

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        from fastloop_plugins.tasks.shared.forward import compute_output, warn_of_unused_loss

        output = compute_output(model, batch, self.criterion, self.broadcasts)
        if self.criterion is not None and not self.has_warned:
            place = f"{self.file}: plugins.module.loss"
            self.has_warned = warn_of_unused_loss(batch, output, model, place)
        return output

    @hookimpl
    def predict(self, run: Run, batch: Any) -> Mapping[str, list[Any]]:
        from fastloop_plugins.tasks.shared.predicted_columns import predicted_columns

        return predicted_columns(run.hooks.compute_loss(run=run, model=run.model, batch=batch))

    def _call(self, key: str) -> Any:
        try:
            return self.imported[f"{key}.module"](**self.code[key].arguments)
        except ImportError as error:
            raise RecipeError(
                str(error), code="import-failed", place=f"{self.file}: {key}.module: {self.code[key].module}"
            ) from error
        except TypeError as error:
            raise RecipeError(
                f"{self.code[key].module} was called with {self.code[key].arguments}: {clause(error)}.",
                code="call-failed",
                place=f"{self.file}: {key}.arguments",
            ) from error
