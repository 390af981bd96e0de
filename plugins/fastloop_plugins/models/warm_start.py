"""Warm start: load the initial weights of a model from a file (``model.weights``), and log which tensors matched."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop.recipe import Recipe

log = logging.getLogger("fastloop")

HELP = "Initial weights: a .safetensors or .pt file, a folder of .safetensors files, or a run folder."
STRICT_HELP = "Whether a tensor of the model or of weights without a counterpart is an error."
NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save the weights in a .pt file."""
PREFIXES = ("module.", "_orig_mod.")
"""Start of all names, if the weights of a DDP or compiled model were saved."""
LISTED = 5
"""Names that a message shows."""


def weight_files(recipe: Recipe) -> list[Path]:
    """The files that ``model.weights`` names; none without the key, and none in inference, which has the trained
    weights.

    Raises:
        RecipeError: There is no such file.
    """
    name = recipe.model.get("weights")
    if name is None or (recipe.inference is not None and recipe.inference.model is not None):
        return []
    path = recipe.find(name)
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.safetensors")) or sorted(path.glob("model/*.safetensors"))
    if not found:
        problem = (
            "holds no .safetensors file, and neither does its folder model"
            if path.is_dir()
            else "no such file or folder"
        )
        raise RecipeError(
            f"{problem}.",
            code="file-missing",
            place=f"{recipe.where}: model.weights: {path}",
            expected="a .safetensors or .pt file, or a run folder",
        )
    return found


def load_weights(model: nn.Module, recipe: Recipe, new: Iterable[str] | None = ()) -> set[str]:
    """Copy the tensors of ``model.weights`` that have the name and shape of one of the model, and log the others.
    Without the key, or for a model on the meta device, which receives its weights from another process, change nothing.

    Args:
        new: Names of tensors that have random values, because the pretrained model lacks them; None: the model has no
            pretrained values at all.

    Returns:
        The names of ``new`` that still have random values: a value of ``run.new_weights``. Empty if ``new`` is None and
        there is no ``model.weights``: the model is trained from scratch.

    Raises:
        RecipeError: A file cannot be read, no tensor matches, or with ``model.weights_strict``, one has no counterpart.
    """
    files = weight_files(recipe)
    if not files or any(parameter.is_meta for parameter in model.parameters()):
        return set(new or ())
    where = f"{recipe.where}: model.weights: {recipe.model['weights']}"
    found = {name: tensor for file in files for name, tensor in _read(file, where).items()}
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    own: dict[str, Tensor] = model.state_dict()
    matched = {name: tensor for name, tensor in found.items() if name in own and tensor.shape == own[name].shape}
    if not matched:
        raise RecipeError(
            f"no tensor matches one of the model. The file has {_list(found)}; the model has {_list(own)}.",
            code="weights-differ",
            place=where,
        )
    tied = {tensor.data_ptr() for name, tensor in own.items() if name in matched and tensor.numel()}
    problems = {
        "not in the file": [
            name for name, tensor in own.items() if name not in found and tensor.data_ptr() not in tied
        ],
        "of another shape": [
            f"{name} {tuple(own[name].shape)}, there {tuple(tensor.shape)}"
            for name, tensor in found.items()
            if name in own and name not in matched
        ],
        "not in the model": [name for name in found if name not in own],
    }
    notes = "".join(f"; {len(names)} {problem}: {_list(names)}" for problem, names in problems.items() if names)
    if notes and recipe.model.get("weights_strict"):
        raise RecipeError(
            f"{len(matched)} of {len(own)} tensors match{notes}.",
            code="weights-differ",
            place=where,
            remedy="Correct it, or set model.weights_strict: false.",
        )
    model.load_state_dict(matched, strict=False)
    text = f"{len(matched)} of {len(own)} tensors loaded{notes}"
    if notes:
        log.warning(Problem(f"{text}.", code="weights-differ", place=where))
    else:
        log.info("%s: %s", where, text)
    loaded = {name for name, tensor in own.items() if name in matched or tensor.data_ptr() in tied}
    return {*(own if new is None else new)} - loaded


def _read(file: Path, where: str) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU. Runs no code of a .pt file."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        content: Any = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise RecipeError(
            f"{file} cannot be read: {' '.join(str(error).split()):.300}", code="file-unreadable", place=where
        ) from None
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = (
        {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not tensors:
        raise RecipeError(
            f"{file} holds no tensors by name, such as a state_dict has them. It holds a {type(content).__name__}.",
            code="wrong-format",
            place=where,
        )
    return tensors


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:LISTED]) + ", ..." * (len(names) > LISTED)
