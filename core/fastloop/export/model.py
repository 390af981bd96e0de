"""Export the trained model for use outside fastloop."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.checkpoint.store import save_tensors
from fastloop.export.card import ModelCard, is_local, is_own, is_unedited
from fastloop.export.earlier_files import find_exported, remove_unwritten
from fastloop.export.text_inputs import TextInputs
from fastloop.plugins.plugin import hookimpl
from fastloop.runtime import files
from fastloop.runtime.compiled_modules import without_compiled

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop.run import Run

logger = logging.getLogger("fastloop")


@hookimpl(trylast=True)
def export_model(run: Run, folder: Path) -> Path:
    """Export with the model's ``save_pretrained``, or write ``model.safetensors``."""
    return save_model(run, folder)


@hookimpl(wrapper=True, tryfirst=True, specname="export_model")
def finish_export(run: Run, folder: Path) -> Generator[None, Path, Path]:
    """Remove the files of an earlier export of fastloop that the new one has not written. Then write the README of the
    exported model, unless a user has written or edited one. It replaces the empty form of PEFT."""
    readme = folder / "README.md"
    has_readme = readme.is_file()
    page_of_user = None
    if has_readme and not is_unedited(readme):
        page_of_user = readme.read_bytes()
    earlier_files = {}
    if run.is_main and is_own(readme):  # other files may be a user's
        earlier_files = find_exported(folder)
    path = yield
    if not run.is_main or not folder.is_dir():
        return path
    remove_unwritten(folder, earlier_files)
    if page_of_user is not None:
        logger.info("%s stays, since fastloop has not written it, or it was edited", readme)
        readme.write_bytes(page_of_user)  # PEFT adds its form to a page
    else:
        files.write(readme, make_card(run, folder).render(folder))
    return path


def make_card(run: Run, folder: Path) -> ModelCard:
    """The README of the exported model."""
    model: Any = run.unwrap_model()
    if hasattr(model, "get_base_model"):  # an adapter that is not merged
        model = model.get_base_model()
    config = getattr(model, "config", None)
    labels: dict[Any, Any] = {}
    if type(model).__name__.endswith("Classification"):
        labels = getattr(config, "id2label", None) or {}
    name = run.recipe.model.get("name")
    base = None if name is None else str(name)
    return ModelCard(
        title=run.folder.name,
        name=str(folder),
        base=base,
        base_is_folder=base is not None and is_local(base, run.recipe.find(base)),
        task=run.plugins.in_slot("task"),
        architecture=type(model).__name__ if config is not None else None,
        labels={int(index): str(label) for index, label in labels.items()},
        texts=TextInputs.of_export(run.recipe.data, folder),
    )


def save_model(run: Run, folder: Path, weights: dict[str, Tensor] | None = None) -> Path:
    """Write the model with its ``save_pretrained``, so that ``from_pretrained`` can load it. Without that method, write
    ``model.safetensors``. Every process must call it; the main process writes.

    Args:
        weights: Write these, on the main process, instead of ``run.full_state_dict()``.

    Raises:
        OSError: The model cannot be written.
    """
    weights = run.full_state_dict() if weights is None else weights
    model = run.unwrap_model()
    if not run.is_main:
        return folder
    first_names: dict[int, str] = {}  # id of a parameter -> its first name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights:
            # a tied weight has several names, and strategies gather each apart: all get the tensor of the first name
            first_name = first_names.setdefault(id(parameter), name)
            weights[name] = weights[first_name]
    folder.mkdir(parents=True, exist_ok=True)
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        save_tensors(weights, folder / "model.safetensors")
    else:
        weights = {without_compiled(name): weight for name, weight in weights.items()}
        parameters = inspect.signature(save).parameters.values()
        takes_weights = any(one.name == "state_dict" or one.kind is one.VAR_KEYWORD for one in parameters)
        with _without_bars():
            if takes_weights:
                save(folder, state_dict=weights)
            else:
                save(folder)
    return folder


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, if it is imported. They would be drawn over the log of the run."""
    library: Any = sys.modules.get("transformers.utils.logging")
    if library is None or not library.is_progress_bar_enabled():
        yield
        return
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.enable_progress_bar()
