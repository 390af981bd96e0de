"""Loads the weights of an exported model into the model of a run without training."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from fastloop import Plugin, hookimpl
from fastloop.errors import RecipeError
from fastloop.problem import clause
from fastloop_plugins.models.adapters import is_adapter, merge_adapter
from fastloop_plugins.models.hub import quiet

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run


class ExportedWeights(Plugin):
    """Loads the weights of an exported model into the model that the task has built."""

    name = "exported-weights"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @hookimpl(wrapper=True, tryfirst=True)
    def build_model(self, run: Run) -> Generator[None, nn.Module | None, nn.Module | None]:
        """Load them.

        Raises:
            RecipeError: See ``load_model``.
        """
        model = yield
        if model is not None:
            load_model(model, self.folder, run.recipe.where)
        return model


def load_model(model: nn.Module, folder: Path, where: str) -> None:
    """Load the weights that ``save_model`` wrote, or merge those of an adapter. Does nothing if ``from_pretrained``
    made the model from the same folder.

    Args:
        where: The recipe, for messages.

    Raises:
        RecipeError: The folder has no weights, or they are not this model's.
    """
    if getattr(model, "name_or_path", None) == str(folder):
        return
    if is_adapter(folder):  # the task has built its base model
        merge_adapter(model, folder, where)
        return
    try:
        pretrained: Any = getattr(type(model), "from_pretrained", None)
        if pretrained is not None:
            with quiet():
                weights = pretrained(folder).state_dict()
            model.load_state_dict(weights)
        else:
            _load_file(model, folder / "model.safetensors")
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RecipeError(
            f"its weights are not those of {type(model).__name__}, the model of {where}: {clause(error)}.",
            code="weights-differ",
            place=str(folder),
        ) from None


def _load_file(model: nn.Module, file: Path) -> None:
    """Load a file that has one of the names of each tied weight, or all of them. Tensors of the model may be parts of
    one storage.

    Raises:
        RuntimeError: A weight is missing, is not the model's, or has two values for two names.
    """
    saved = load_file(file)
    model.load_state_dict(saved, strict=False)
    own = model.state_dict()
    loaded = {_place(own[name]) for name in saved if name in own}
    wrong = {name for name, tensor in own.items() if name not in saved and _place(tensor) not in loaded}
    for name, tensor in saved.items():
        if name not in own or not own[name].allclose(tensor.to(own[name]), 0, 0, True):
            wrong.add(name)
    if wrong:
        raise RuntimeError(f"missing, not the model's, or tied to one of another value: {', '.join(sorted(wrong))}")


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where the values of a tensor are: address, shape and strides, which tied weights have in common."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
