"""A pretrained model beside the one that a run trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastloop_plugins.models.adapters import merge_adapter
from fastloop_plugins.text.model import TextModel

if TYPE_CHECKING:
    from fastloop.recipe import Recipe


class SecondModel:
    """A pretrained model beside the one that a run trains, such as a teacher.

    Args:
        options: Those of ``model``, such as ``name``.
        auto_class: The Auto class of transformers that builds it.
        key: The place of the options in the recipe, for messages.
        adapter: The folder of an adapter to merge into the weights; None: there is none.

    Attributes:
        config: None until ``load_tokenizer``, as ``tokenizer``.

    Raises:
        RecipeError: An option is invalid.
    """

    def __init__(
        self, recipe: Recipe, options: Mapping[str, Any], auto_class: str, key: str, adapter: str | None = None
    ) -> None:
        self._auto_class = auto_class
        classify = not auto_class.endswith("ForCausalLM")
        alone = replace(recipe, model=dict(options), inference=None, plugins={})  # `lora` trains no adapter of it
        self._model = TextModel(alone, classify, key)
        self._adapter = adapter
        self.config: Any = None
        self.tokenizer: Any = None

    def load_tokenizer(self, max_length: int) -> None:
        """Load configuration and tokenizer.

        Raises:
            RecipeError: One of them is missing or invalid, or the model cannot take ``max_length`` tokens.
        """
        self._model.load_tokenizer(max_length)
        self.config = self._model.config
        self.tokenizer = self._model.tokenizer

    def build(self) -> tuple[Any, set[str]]:
        """The model in float32 on the CPU, and the names of its weights that the checkpoint does not have. Call it
        after ``load_tokenizer``.

        Raises:
            RecipeError: The weights cannot be loaded.
        """
        import transformers

        model = self._model.build(getattr(transformers, self._auto_class))
        new = self._model.new
        if self._adapter is not None:
            folder = self._model.recipe.find(self._adapter)
            new = new - merge_adapter(model, folder, f"{self._model.where}: {folder}")
        return model, new
