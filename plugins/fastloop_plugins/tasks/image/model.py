"""The ``model`` section of ``image-classification``: a model of transformers, torchvision or timm, and its export."""

from __future__ import annotations

import json
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError, option
from fastloop.options import parse
from fastloop.problem import clause, typed_clause
from fastloop_plugins.models.adapters import Adapter, check_classes, continues, find_adapter, merge_adapter
from fastloop_plugins.models.hub import (
    FAILURES,
    FROM_SCRATCH,
    build_from_config,
    check_model_source,
    check_name,
    check_new,
    check_one_export,
    config_from_scratch,
    explaining,
    new_weights,
    offline,
    quiet,
)  # fmt: skip
from fastloop_plugins.models.label_order import LabelOrder, name_classes, start_head_fresh
from fastloop_plugins.models.warm_start import HELP, STRICT_HELP, load_weights, weight_files
from fastloop_plugins.tasks.image.data import InputChanges, InputFormat
from fastloop_plugins.tasks.image.libraries import LIBRARIES, LibraryModel

if TYPE_CHECKING:
    from torch import nn

    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop_plugins.tasks.image.processors import ImageProcessor

logger = logging.getLogger("fastloop")

FILE = "image_classification.json"
"""In an exported model: ``classes``, their names in the order of the model's outputs. For a model of torchvision or
timm, also ``input``, the settings of its transform; earlier versions wrote the fields of ``InputFormat``."""


@dataclass(kw_only=True)
class ImageModelOptions:
    """The ``model`` section."""

    name: str | None = option(
        "A model of transformers (hub id or local folder), torchvision/NAME or timm/NAME.", default=None
    )
    config: dict[str, Any] | None = option(
        "Instead of name, a transformers model from scratch: model_type and its options.", default=None
    )
    pretrained: bool = option("Start from the pretrained weights; false: from random ones.", default=True)
    arguments: dict[str, Any] | None = option("Further arguments of a model of torchvision or timm.", default=None)
    weights: str | None = option(HELP, default=None)
    weights_strict: bool = option(STRICT_HELP, default=False)


class ImageModel:
    """The ``model`` section of a recipe. The constructor checks it.

    Attributes:
        names: The classes in the order of the model's outputs, after ``order``.
        processor: Makes the inputs from images, after ``load_processor``.
        new: Weights of the built model that have random values, because its checkpoint lacks them: a value of
            ``run.new_weights``.

    Raises:
        RecipeError: An option is invalid, a library is not installed, or it has no such model.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.where = f"{recipe.where}: model"
        self.options = parse(ImageModelOptions, recipe.model, self.where)
        check_model_source(self.options, self.where, "resnet")
        self.adapter = self._use_base_of_adapter()
        self.name = self.options.name or str((self.options.config or {}).get("model_type"))
        self.pretrained = self.options.pretrained and self.options.config is None
        self.library: LibraryModel | None = None
        self.names: list[str] = []
        self.new: set[str] = set()
        self.processor: ImageProcessor
        self.config: Any = None
        if self.name.partition("/")[0] in LIBRARIES:
            self.library = LibraryModel(self.name, self.options.arguments or {}, self.where)
        else:
            self._check_transformers()
        weight_files(recipe)

    def _use_base_of_adapter(self) -> Adapter | None:
        """If ``model.name`` or the evaluated model is the folder of an adapter, replace it by the adapter's base model.
        Returns the adapter."""
        inference = self.recipe.inference
        folder = self.options.name if inference is None or inference.model is None else str(inference.model)
        adapter = None if folder is None else find_adapter(self.recipe, folder, f"{self.where}.name")
        if adapter is not None:
            self.options.name = adapter.base
        return adapter

    def _check_transformers(self) -> None:
        if self.options.arguments:
            raise RecipeError(
                "are for torchvision/NAME and timm/NAME.",
                code="unknown-option",
                place=f"{self.where}.arguments",
                remedy=f"Change config.json of {self.name} instead.",
            )
        if self.recipe.inference is None and self.options.config is None:
            folder = self.recipe.find(self.name)
            check_name(f"{self.where}.name", self.name, folder)
            check_one_export(f"{self.where}.name", folder)

    # -- configuration: before the data --------------------------------------------------------------------------------

    def load_config(self) -> None:
        """Load the configuration of a transformers model.

        Raises:
            RecipeError: The configuration is missing, or is not that of an image classifier.
        """
        if self.library is not None:
            return
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

        if self.options.config is not None and self.recipe.inference is None:
            self.config = config_from_scratch(self.options.config, f"{self.where}.config")
        elif self.adapter is not None and self.adapter.base_config is not None:
            self.config = AutoConfig.from_pretrained(str(self.adapter.base_config))
        else:
            with self._explained():
                self.config = AutoConfig.from_pretrained(self._source(), local_files_only=self._local())
        if self.config.model_type not in CLASSIFIERS:
            raise RecipeError(
                f"transformers has no image classifier for {self.config.model_type!r} "
                "(AutoModelForImageClassification).",
                code="unsupported-model",
                place=f"{self.where}.{'name' if self.options.config is None else 'config'}",
                remedy="Use one that it has, such as vit, resnet or convnext.",
            )

    def load_processor(self, changes: InputChanges) -> None:
        """Set ``processor``: that of the pretrained or exported model, with the changes of the recipe. A model without
        one has that of ``InputFormat``. Call it after ``load_config``.

        Raises:
            RecipeError: It cannot be loaded, or cannot be changed as the recipe says.
        """
        where = f"{self.recipe.where}: data"
        exported = None if self.recipe.inference is None else self._exported_processor()
        if exported is not None:
            self.processor = exported
            self._warn_of(changes, where)
        elif self.library is not None:
            self.processor = self.library.processor(self.pretrained, changes, where)
        else:
            from fastloop_plugins.tasks.image.processors import TransformersProcessor

            checkpoint = self._checkpoint_processor()
            if checkpoint is None:
                with quiet():
                    self.processor = TransformersProcessor.from_format(InputFormat().updated(changes))
            else:
                self.processor = checkpoint.changed(changes, where)

    def _warn_of(self, changes: InputChanges, where: str) -> None:
        """Warn of the keys of an inference run that differ from what the model was trained with."""
        for key in fields(changes):
            value = getattr(changes, key.name)
            if value is None:
                continue
            settings = self.processor.changed(InputChanges(**{key.name: value}), where).settings
            trained = {name: old for name, old in self.processor.settings.items() if settings.get(name) != old}
            if trained:
                shown = ", ".join(f"{name}={old}" for name, old in trained.items())
                logger.warning(
                    Problem(
                        f"the model was trained with {shown}, which is used instead of {value}.",
                        code="option-replaced",
                        place=f"data.{key.name}",
                    )
                )

    def _exported_processor(self) -> ImageProcessor | None:
        """The processor of a model that fastloop exported."""
        assert self.recipe.inference is not None
        assert self.recipe.inference.model is not None
        file = self.recipe.inference.model / FILE
        if self.library is None:
            return self._checkpoint_processor() if file.is_file() else None
        settings = self._read_export()["input"]
        try:
            return self.library.processor_from(settings)
        except FAILURES as error:
            raise RecipeError(
                f"{self.name} cannot use it: {clause(error)}.",
                code="invalid-value",
                place=f"{file}: input: {settings}",
            ) from None

    def _checkpoint_processor(self) -> ImageProcessor | None:
        """The image processor of a transformers model; None: it has none."""
        if self.options.config is not None and self.recipe.inference is None:
            return None
        from fastloop_plugins.tasks.image.processors import find_processor

        if self.adapter is not None:
            with explaining(f"{self.where}.name", self.name, self.adapter.folder, FROM_SCRATCH):
                own = find_processor(str(self.adapter.folder), self.config, local=True)
            if own is not None:
                return own
        with self._explained():
            return find_processor(self._source(), self.config, self._local())

    def _source(self) -> str:
        if self.recipe.inference is not None and self.adapter is None:
            return str(self.recipe.inference.model)
        folder = self.recipe.find(self.name)
        return str(folder.resolve()) if folder.is_dir() else self.name

    def _local(self) -> bool:
        return Path(self._source()).is_dir() or offline()

    def _explained(self) -> AbstractContextManager[None]:
        return explaining(f"{self.where}.name", self.name, Path(self._source()), FROM_SCRATCH)

    def exported_classes(self) -> list[str]:
        """Classes of the exported model that an inference run uses. Call it after ``load_config``.

        Raises:
            RecipeError: The file is missing or damaged.
        """
        assert self.recipe.inference is not None
        assert self.recipe.inference.model is not None
        file = self.recipe.inference.model / FILE
        if not file.is_file() and self.config is not None:  # a transformers model that another program exported
            return [str(self.config.id2label[index]) for index in range(len(self.config.id2label))]
        return [str(name) for name in self._read_export()["classes"]]

    def _read_export(self) -> dict[str, Any]:
        """The content of ``FILE``, with all its keys."""
        assert self.recipe.inference is not None
        assert self.recipe.inference.model is not None
        file = self.recipe.inference.model / FILE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            keys = ("classes",) if self.library is None else ("classes", "input")
            return {key: content[key] for key in keys}
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = "no such file" if isinstance(error, FileNotFoundError) else typed_clause(error)
            raise RecipeError(
                f"{problem}.",
                code="wrong-format",
                place=str(file),
                expected="a model that fastloop exported for image-classification",
            ) from None

    def order(self, classes: list[str]) -> LabelOrder:
        """The classes in sorted order, or in that of a transformers checkpoint with the same names, whose head is
        kept."""
        is_new = self.config is None or not self.pretrained
        sorted_order = LabelOrder(classes, list(range(len(classes))), keeps_head=is_new)
        if is_new:
            return sorted_order
        if not any("ForImageClassification" in name for name in self.config.architectures or ()):
            return sorted_order
        names: dict[int, Any] = self.config.id2label or {}
        of_checkpoint: list[Any] = [names.get(index) for index in range(len(names))]
        if sorted(map(str, of_checkpoint)) != sorted(classes):
            return sorted_order
        return LabelOrder(of_checkpoint, [of_checkpoint.index(name) for name in classes], keeps_head=True)

    # -- the model -----------------------------------------------------------------------------------------------------

    def build(self, labels: LabelOrder) -> nn.Module:
        """The model with one output for each class, with random or pretrained weights, or those of ``model.weights``,
        in float32.

        Raises:
            RecipeError: The arguments do not fit, or the weights cannot be loaded.
        """
        import torch

        self.names = labels.names
        if self.adapter is not None and self.recipe.inference is None:
            check_classes(self.adapter, labels, f"{self.where}.name")
        initial = self.pretrained and self.recipe.inference is None
        initial = initial and torch.get_default_device().type != "meta"  # there, the weights come from another process
        if self.library is None:
            model: Any = self._transformers(labels, initial or self.recipe.inference is not None)
        else:
            model = self.library.build(len(labels.names), initial)
            self.new = self.library.new
            model.class_names = labels.names  # `fastloop evaluate` shows them
        self.new = load_weights(model, self.recipe, self.new if self.pretrained else None)
        if self.adapter is not None and self.recipe.inference is None and not continues(self.recipe):
            self.new -= merge_adapter(model, self.adapter.folder, f"{self.where}.name")
        built: nn.Module = model
        return built

    def _transformers(self, labels: LabelOrder, pretrained: bool) -> Any:
        import torch
        from transformers import AutoModelForImageClassification

        from fastloop_plugins.tasks.image.processors import TIMM

        auto: Any = AutoModelForImageClassification
        if self.config.model_type == TIMM:
            self.config.pretrained_cfg = {**(self.config.pretrained_cfg or {}), **self.processor.settings}
        old_names = name_classes(self.config, labels.names)
        self.config.problem_type = "single_label_classification"
        if not pretrained:
            return self._from_configuration(auto)
        with self._explained():
            model, notes = auto.from_pretrained(
                self._source(),
                config=self.config,
                use_safetensors=True,  # the alternative is a pickle
                dtype=torch.float32,
                local_files_only=self._local(),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        self.new = new_weights(notes)
        if self.adapter is None:  # an adapter has the weights that its base model lacks
            check_new(model, self.name, notes, f"{self.where}.name")
        if self.recipe.inference is None and not labels.keeps_head:
            self.new |= start_head_fresh(model, set(notes["missing_keys"]), old_names, labels, f"{self.where}.name")
        return model

    def _from_configuration(self, auto: Any) -> Any:
        """The model with random weights."""
        given = self.options.config
        if given is not None and "image_size" not in given and hasattr(self.config, "image_size"):
            self.config.image_size = self.processor.height
        architectures = auto._model_mapping[type(self.config)]
        if isinstance(architectures, tuple) and self.config.architectures is None:
            # such as DeiT, with or without the head of a teacher: transformers would ask the configuration which one
            self.config.architectures = [architectures[0].__name__]
        return build_from_config(auto, self.config, f"{self.where}.{'name' if given is None else 'config'}")

    def export(self, run: Run, folder: Path) -> Path:
        """Write the model, its classes, and its image processor or the settings of its transform."""
        from fastloop.export.model import save_model
        from fastloop_plugins.tasks.image.processors import TransformersProcessor

        content: dict[str, Any] = {"classes": self.names}
        if self.library is not None:
            content["input"] = self.processor.settings
        with quiet():
            save_model(run, folder)
            if run.is_main:
                if isinstance(self.processor, TransformersProcessor):
                    self.processor.save(folder)
                (folder / FILE).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return folder
