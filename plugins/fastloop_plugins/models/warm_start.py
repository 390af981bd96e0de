"""Warm start: load the initial weights of a model from a file (``model.weights``), and log which tensors matched."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError
from fastloop.probing import has_values
from fastloop.recipe.paths import nothing_at
from fastloop.runtime.compiled_modules import COMPILED
from fastloop.runtime.step_folders import MANIFEST, checkpoints
from fastloop_plugins._names import list_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop.recipe import Recipe

log = logging.getLogger("fastloop")

HELP = "Initial weights: a .safetensors or .pt file, a folder of .safetensors files, a checkpoint, or a run folder."
STRICT_HELP = "Whether a tensor of the model or of weights without a counterpart is an error."
NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save the weights in a .pt file."""
PREFIXES = ("module.", f"{COMPILED}.")
"""Start of all names, if the weights of a DDP or compiled model were saved."""
LISTED = 5
"""Names that a message shows."""


def weight_files(recipe: Recipe) -> list[Path]:
    """The files that ``model.weights`` names; none without the key, and none in inference, which has the trained
    weights.

    A checkpoint also has ``state.safetensors``, the tensors of the optimizer, which are no weights.

    Raises:
        RecipeError: There is no such file, or a checkpoint has its weights in shards.
    """
    name = recipe.model.get("weights")
    if name is None or (recipe.inference is not None and recipe.inference.model is not None):
        return []
    path = recipe.find(name)
    if path.is_file():
        return [path]
    where = f"{recipe.where}: model.weights: {path}"
    if (path / MANIFEST).is_file():
        if (path / "sharded").is_dir():
            raise RecipeError(
                "is a checkpoint whose weights are divided among processes.",
                code="wrong-format",
                place=where,
                remedy="Name the folder of the run, which holds the exported model after training.",
            )
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("model/*.safetensors"))
    if not files:
        problem = f"{nothing_at(path, 'file or folder')}."
        remedy = ""
        if path.is_dir():
            problem = "holds no .safetensors file, and neither does its folder model."
            saved = checkpoints(path)
            if saved:
                remedy = f"The run has not ended: name its newest checkpoint, model.weights={saved[-1]}."
        raise RecipeError(
            problem,
            code="file-missing",
            place=where,
            expected="a .safetensors or .pt file, a checkpoint, or a run folder",
            remedy=remedy,
        )
    return files


def load_weights(model: nn.Module, recipe: Recipe, new: Iterable[str] | None = ()) -> set[str]:
    """Copy the tensors of ``model.weights`` that have the name and shape of one of the model, and log the others.
    Without the key, or for a model on the meta device, which receives its weights from another process, change nothing.

    Args:
        new: Names of tensors that have random values, because the pretrained model lacks them; None: the model has no
            pretrained values at all.

    Returns:
        The names of ``new`` that still have random values, for ``run.new_weights``. Empty if ``new`` is None and
        there is no ``model.weights``: the model is trained from scratch.

    Raises:
        RecipeError: A file cannot be read, no tensor matches, or with ``model.weights_strict``, one has no counterpart.
    """
    files = weight_files(recipe)
    if not files or not has_values(model):
        return set(new or ())
    where = f"{recipe.where}: model.weights: {recipe.model['weights']}"
    saved = _read_all(files, where)
    own: dict[str, Tensor] = model.state_dict()
    matched = {name: tensor for name, tensor in saved.items() if name in own and tensor.shape == own[name].shape}
    if not matched:
        raise RecipeError(
            f"no tensor matches one of the model. The file has {list_names(list(saved), LISTED)}; the model has "
            f"{list_names(list(own), LISTED)}.",
            code="weights-differ",
            place=where,
        )
    # a tied weight has several names, and a file may have one of them
    loaded_places = {own[name].data_ptr() for name in matched if own[name].numel()}
    notes = _describe_differences(own, saved, matched, loaded_places)
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
    loaded = {name for name, tensor in own.items() if name in matched or tensor.data_ptr() in loaded_places}
    if new is None:
        return set(own) - loaded
    return set(new) - loaded


def _describe_differences(
    own: Mapping[str, Tensor], saved: Mapping[str, Tensor], matched: Mapping[str, Tensor], loaded_places: set[int]
) -> str:
    """Tensors without a counterpart, as the end of a sentence; empty if each has one.

    Args:
        own: The tensors of the model.
        saved: Those of the files.
        matched: Those of ``saved`` with the name and the shape of one of the model.
        loaded_places: Addresses of the model's tensors that get values.
    """
    missing = [name for name, tensor in own.items() if name not in saved and tensor.data_ptr() not in loaded_places]
    reshaped = []
    for name, tensor in saved.items():
        if name in own and name not in matched:
            reshaped.append(f"{name} {tuple(own[name].shape)}, there {tuple(tensor.shape)}")
    unknown = [name for name in saved if name not in own]
    notes = ""
    for problem, names in (("not in the file", missing), ("of another shape", reshaped), ("not in the model", unknown)):
        if names:
            notes += f"; {len(names)} {problem}: {list_names(names, LISTED)}"
    return notes


def _read_all(files: Iterable[Path], where: str) -> dict[str, Tensor]:
    """The tensors of several files, by the names that they have in the model.

    Raises:
        RecipeError: A file cannot be read, or two have other values for one name, as after two exports to a folder.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        read = _read(file, where)
        for name, tensor in read.items():
            if name in tensors and not _have_same_values(tensors[name], tensor):
                raise RecipeError(
                    f"{file} has other values for {name} than a file before it.",
                    code="weights-differ",
                    place=where,
                    remedy="Remove the files of an earlier export, or name one file.",
                )
        tensors |= read
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _have_same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same shape and values, maybe of different dtypes; NaN is equal to NaN."""
    import torch

    if first.shape != second.shape:
        return False
    dtype = torch.promote_types(first.dtype, second.dtype)
    is_same = torch.isclose(first.to(dtype), second.to(dtype), rtol=0.0, atol=0.0, equal_nan=True)
    return bool(is_same.all())


def _read(file: Path, where: str) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU. Runs no code of a .pt file."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    content: Any
    try:
        if file.suffix == ".safetensors":
            content = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise RecipeError(
            f"{file} cannot be read: {' '.join(str(error).split()):.300}", code="file-unreadable", place=where
        ) from None
    for key in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = {}
    if isinstance(content, Mapping):
        tensors = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise RecipeError(
            f"{file} holds no tensors by name, such as a state_dict has them. It holds a {type(content).__name__}.",
            code="wrong-format",
            place=where,
        )
    return tensors
