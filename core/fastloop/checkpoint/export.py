"""Export the trained model for use outside fastloop."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import load_model as load_tensors

from fastloop.checkpoint.store import save_tensors
from fastloop.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop.run import Run


def save_model(run: Run, folder: Path, weights: dict[str, Tensor] | None = None) -> Path:
    """Write the model with its ``save_pretrained``, so that ``from_pretrained`` can load it. Without that method, write
    ``model.safetensors``. Every process must call it; the main process writes.

    Args:
        weights: Write these, on the main process, instead of ``run.full_state_dict()``.

    Raises:
        OSError: The model cannot be written.
    """
    weights, model = run.full_state_dict() if weights is None else weights, run.unwrap_model()
    if not run.is_main:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        save_tensors(weights, folder / "model.safetensors")
    else:
        parameters = inspect.signature(save).parameters.values()
        takes_weights = any(one.name == "state_dict" or one.kind is one.VAR_KEYWORD for one in parameters)
        save(folder, **({"state_dict": weights} if takes_weights else {}))
    return folder


def load_model(model: nn.Module, folder: Path, where: str) -> None:
    """Load the weights that ``save_model`` wrote. Does nothing if ``from_pretrained`` made the model from the same
    folder.

    Args:
        where: The recipe, for messages.

    Raises:
        RecipeError: The folder has no weights, or they are not this model's.
    """
    if getattr(model, "name_or_path", None) == str(folder):
        return
    try:
        pretrained: Any = getattr(type(model), "from_pretrained", None)
        if pretrained is not None:
            model.load_state_dict(pretrained(folder).state_dict())
        else:
            _load_file(model, folder / "model.safetensors")
    except (OSError, RuntimeError, SafetensorError) as error:
        lines = str(error).strip().splitlines()
        # torch's first line names the model
        problem = lines[isinstance(error, RuntimeError) and len(lines) > 1].strip().rstrip(".:")
        raise RecipeError(
            f"{folder}: its weights are not those of {type(model).__name__}, the model of {where}: {problem}."
        ) from None


def _load_file(model: nn.Module, file: Path) -> None:
    """Load a file that has one of the names of each tied weight, or all of them.

    Raises:
        RuntimeError: A weight is missing, is not the model's, or has two values for two names.
    """
    missing, own = load_tensors(model, file, strict=False)[0], model.state_dict()
    differs = {
        name
        for name, saved in load_file(file).items()
        if name not in own or not own[name].allclose(saved.to(own[name]), 0, 0, True)
    }
    if missing or differs:
        raise RuntimeError(
            f"missing, not the model's, or tied to one of another value: {', '.join(sorted({*missing, *differs}))}"
        )
