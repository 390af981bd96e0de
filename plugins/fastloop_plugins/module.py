"""Trains a module of your own: model, datasets, loss and metrics from a Python file beside the recipe, or from a package.

    model: {module: "digits_module.py:Digits", arguments: {hidden: 64}}
    data:  {module: "digits_module.py:digits"}
    plugins:
      - module: {loss: cross_entropy, metrics: {accuracy: {type: MulticlassAccuracy, num_classes: 10}}}

``data.module`` is a function that returns ``{"train": dataset, "evaluate": dataset, "test": dataset}``; the last two may be missing.
A sample ``(inputs, target)`` is trained as ``loss(model(inputs), target)``; a mapping as ``model(**batch).loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastloop import Output, Plugin, RecipeError, hookimpl, option
from fastloop.errors import did_you_mean
from fastloop.options import parse

if TYPE_CHECKING:
    from torch import nn
    from torchmetrics import MetricCollection

    from fastloop import Run
    from fastloop.recipe import Recipe


@dataclass(kw_only=True)
class Code:
    """The ``model`` and the ``data`` section."""

    module: Annotated[str, option("file.py:name or package.module:name.")]
    arguments: Annotated[dict[str, Any], option("Keyword arguments it is called with.")] = field(default_factory=dict)


class Module(Plugin):
    """Your own model, datasets, loss and metrics."""

    name = "module"
    slot = "task"
    configures = "trains a module of your own"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        loss: Annotated[str | None, option("A function of torch.nn.functional, or file.py:name; null: the model returns .loss.")] = None
        collate: Annotated[str | None, option("file.py:name of a collator; null: tensors are stacked.")] = None
        metrics: Annotated[dict[str, dict[str, Any]], option("Name -> {type: a class of torchmetrics, and its arguments}.")] = field(
            default_factory=dict
        )

    @classmethod
    def activates(cls, recipe: Recipe) -> str | None:
        return "model.module is set" if "module" in recipe.model else None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop.importing import import_object

        self.where = recipe.where
        self.code = {key: parse(Code, getattr(recipe, key), f"{recipe.where}: {key}") for key in ("model", "data")}
        self.make = {key: import_object(code.module, recipe, f"{key}.module") for key, code in self.code.items()}
        for key, made in self.make.items():
            if not callable(made):
                raise RecipeError(
                    f"{recipe.where}: {key}.module: {self.code[key].module} is a {type(made).__name__}, expected a class or function."
                )
        self.collate = import_object(self.config.collate, recipe, "plugins.module.collate") if self.config.collate else None
        self.loss = self._find_loss(recipe)
        self.metrics = self._make_metrics()

    @hookimpl
    def build_datasets(self) -> Mapping[str, Any]:
        datasets = self._call("data")
        splits = ("train", "evaluate", "test")
        if not isinstance(datasets, Mapping):
            raise RecipeError(
                f"{self.where}: data.module: returned a {type(datasets).__name__}, expected a mapping of {', '.join(splits)}."
            )
        for split in datasets:
            if split not in splits:
                raise RecipeError(f"{self.where}: data.module: returned a split {split!r}.{did_you_mean(split, splits)}")
        return datasets

    @hookimpl
    def build_collator(self) -> Callable[[list[Any]], Any] | None:
        return self.collate

    @hookimpl
    def build_model(self) -> nn.Module:
        from torch import nn

        model = self._call("model")
        if not isinstance(model, nn.Module):
            raise RecipeError(f"{self.where}: model.module: made a {type(model).__name__}, expected a torch.nn.Module.")
        return model

    @hookimpl
    def build_metrics(self) -> MetricCollection | None:
        return self.metrics

    @hookimpl
    def compute_loss(self, run: Run, model: nn.Module, batch: Any) -> Output:
        from fastloop.trainer import forward

        return forward(model, batch, self.loss)

    def _call(self, key: str) -> Any:
        try:
            return self.make[key](**self.code[key].arguments)
        except ImportError as error:
            raise RecipeError(f"{self.where}: {key}.module: {self.code[key].module}: {error}") from error
        except TypeError as error:
            raise RecipeError(
                f"{self.where}: {key}.arguments: {self.code[key].module} was called with {self.code[key].arguments}: {error}."
            ) from error

    def _find_loss(self, recipe: Recipe) -> Any:
        from torch.nn import functional

        from fastloop.importing import import_object

        name = self.config.loss
        if name is None:
            return None
        if ":" in name:
            return import_object(name, recipe, "plugins.module.loss")
        losses = [known for known in dir(functional) if known.endswith(("loss", "entropy", "with_logits", "div"))]
        if not hasattr(functional, name):
            raise RecipeError(f"{recipe.where}: plugins.module.loss: torch.nn.functional has no {name!r}.{did_you_mean(name, losses)}")
        return getattr(functional, name)

    def _make_metrics(self) -> MetricCollection | None:
        if not self.config.metrics:
            return None
        import torchmetrics
        from torchmetrics import classification, regression

        known = {name: getattr(home, name) for home in (torchmetrics, classification, regression) for name in home.__all__}
        made = {}
        for name, options in self.config.metrics.items():
            key = f"{self.where}: plugins.module.metrics.{name}"
            kind = options.get("type")
            if kind not in known:
                raise RecipeError(f"{key}.type: torchmetrics has no {kind!r}.{did_you_mean(str(kind), known)}")
            try:
                made[name] = known[kind](**{option: value for option, value in options.items() if option != "type"})
            except (TypeError, ValueError) as error:
                raise RecipeError(f"{key}: {error}") from None
        return torchmetrics.MetricCollection(made)
