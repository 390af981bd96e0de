"""Models of torchvision and timm by name. Both are optional, and torchvision must fit the build of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError
from fastloop.errors import did_you_mean
from fastloop.problem import clause, typed_clause
from fastloop_plugins.models.hub import FAILURES, log_new, offline
from fastloop_plugins.tasks.image.data import InputChanges, InputFormat

if TYPE_CHECKING:
    from torch import nn

    from fastloop_plugins.tasks.image.processors import ImageProcessor

LIBRARIES = ("torchvision", "timm")


class LibraryModel:
    """A model of torchvision or timm.

    Args:
        name: ``torchvision/NAME`` or ``timm/NAME``.
        arguments: Further arguments of the function that builds it.
        where: The section ``model`` of the recipe, for messages.

    Attributes:
        new: Names of weights that the built model has and its pretrained weights have not.

    Raises:
        RecipeError: The library is not installed or cannot be imported, or it has no such model.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], where: str) -> None:
        self.name = name
        self.arguments = arguments
        self.where = where
        self.new: set[str] = set()
        self.library, _, self.short = name.partition("/")
        known = self._known()
        if self.short not in known:
            raise RecipeError(
                f"{self.library} has no model {self.short!r}.",
                code="unknown-model",
                place=f"{self.where}.name",
                remedy=did_you_mean(self.short, known),
            )

    def _known(self) -> list[str]:
        """The models of the library. timm's names may have a tag: ``resnet18.a1_in1k``."""
        if find_spec(self.library) is None:
            raise RecipeError(
                f"{self.library} is not installed.",
                code="not-installed",
                place=f"{self.where}.name",
                remedy="Install it:",
                command=f"pip install {self.library}",
            )
        try:
            if self.library == "torchvision":
                from torchvision import models

                return list(models.list_models(module=models))
            import timm
        except (ImportError, RuntimeError, OSError) as error:  # such as torchvision for CUDA beside torch's CPU build
            from torch import __version__

            raise RecipeError(
                f"{self.library} cannot be imported: {typed_clause(error)}.",
                code="import-failed",
                place=f"{self.where}.name",
                remedy=f"Install the build of torchvision for torch {__version__}: see pytorch.org.",
            ) from None
        tagged: list[str] = timm.list_models(self.short, include_tags=True) if "." in self.short else []
        return [*timm.list_models(), *tagged]

    def processor(self, pretrained: bool, changes: InputChanges, where: str) -> ImageProcessor:
        """The transform of the pretrained weights, or for a model from scratch, one of the library with the defaults of
        ``InputFormat``.

        Args:
            where: The section ``data`` of the recipe, for messages.

        Raises:
            RecipeError: The transform cannot be changed as the recipe says.
        """
        if pretrained:
            return self._pretrained_processor().changed(changes, where)
        return self.processor_from(asdict(InputFormat().updated(changes)))

    def _pretrained_processor(self) -> ImageProcessor:
        from fastloop_plugins.tasks.image.transforms import TimmProcessor, TorchvisionProcessor

        if self.library == "torchvision":
            return TorchvisionProcessor(self._default_weights().transforms, {})
        import timm

        weights: Any = timm.get_pretrained_cfg(self.short)
        return TimmProcessor.from_weights(weights.to_dict())

    def processor_from(self, settings: Mapping[str, Any]) -> ImageProcessor:
        """The transform with these ``ImageProcessor.settings``, or fields of ``InputFormat``.

        Raises:
            ValueError: The library cannot use them.
        """
        from fastloop_plugins.tasks.image.transforms import TimmProcessor, TorchvisionProcessor

        if "image_size" in settings:
            form = InputFormat(**settings)
            same = {"interpolation": form.interpolation, "mean": list(form.mean), "std": list(form.std)}
            if self.library == "torchvision":
                settings = {"crop_size": form.image_size, "resize_size": form.resized, **same}
            else:
                size = {"input_size": [3, form.image_size, form.image_size], "crop_mode": "center"}
                settings = {**size, "crop_pct": form.crop_fraction, **same}
        if self.library == "torchvision":
            return TorchvisionProcessor(self._default_weights().transforms, settings)
        return TimmProcessor(settings)

    def _default_weights(self) -> Any:
        from torchvision import models

        return models.get_model_weights(self.short).DEFAULT

    def build(self, classes: int, pretrained: bool) -> nn.Module:
        """The model with one output for each class, with random or pretrained weights.

        Raises:
            RecipeError: The arguments do not fit, or the weights cannot be loaded.
        """
        model: nn.Module = (self._torchvision if self.library == "torchvision" else self._timm)(classes, pretrained)
        return model

    def _torchvision(self, classes: int, pretrained: bool) -> Any:
        from torchvision import models

        with self._explained_arguments():
            model = models.get_model(self.short, weights=None, num_classes=classes, **self.arguments)
        if pretrained:
            weights = self._default_weights()
            try:
                state = weights.get_state_dict(progress=False, check_hash=True)
            except (OSError, RuntimeError) as error:
                raise self._no_weights(weights.url, error) from None
            self._load_matching(model, state)
        return model

    def _load_matching(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load the tensors of equal shape, and log the others: usually the head, which has another number of
        classes."""
        own = model.state_dict()
        matched = {name: tensor for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
        model.load_state_dict(matched, strict=False)
        self.new = own.keys() - matched.keys()
        log_new(self.name, self.new)

    def _timm(self, classes: int, pretrained: bool) -> Any:
        import timm

        arguments = {"num_classes": classes, **self.arguments}
        with self._explained_arguments():
            model: Any = timm.create_model(self.short, **arguments)
        if pretrained:
            offline()  # if so, the hub's library does not retry for a minute
            try:
                model = timm.create_model(self.short, pretrained=True, **arguments)
            except FAILURES as error:
                raise self._no_weights(f"timm/{self.short}", error) from None
            if model.pretrained_cfg["num_classes"] != classes:
                head = model.pretrained_cfg["classifier"]
                names = [head] if isinstance(head, str) else head
                new = tuple(f"{name}." for name in names)
                self.new = {key for key in model.state_dict() if key.startswith(new)}
                log_new(self.name, self.new)
        return model

    @contextmanager
    def _explained_arguments(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            place = f"{self.where}.arguments: {self.name} was called with {self.arguments}"
            raise RecipeError(f"{clause(error)}.", code="invalid-value", place=place) from None

    def _no_weights(self, source: str, error: BaseException) -> RecipeError:
        return RecipeError(
            f"the weights of {self.name} cannot be loaded from {source}: {clause(error)}.",
            code="file-unreadable",
            place=f"{self.where}.pretrained",
            remedy=(
                "Use a local copy: model.pretrained=false model.weights=FILE. Or train from scratch: "
                "model.pretrained=false."
            ),
        )
