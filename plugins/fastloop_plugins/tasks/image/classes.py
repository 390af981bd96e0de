"""The class of a folder of images: its name, or one that differs only by case, spaces or invisible characters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from fastloop import Problem, RecipeError
from fastloop_plugins.text.label_names import written_label
from fastloop_plugins.text.label_warnings import alike_classes, describe_alike, find_alike

logger = logging.getLogger("fastloop")


def warn_about_alike_folders(classes: Sequence[str], folder: Path) -> None:
    """Log a warning about classes of train that are probably one.

    Args:
        folder: That of the split.
    """
    groups = alike_classes(classes)
    if groups:
        remedy = "If they are equal, move their images into one folder."
        logger.warning(Problem(describe_alike(groups), code="doubtful-labels", place=str(folder), remedy=remedy))


def class_of_train(name: str, classes: Sequence[str], folder: Path) -> int:
    """The id of the class of a folder of any split, which must have the name of a folder of train.

    Args:
        folder: That of the split, for messages.

    Raises:
        RecipeError: There is no such class.
    """
    if name in classes:
        return classes.index(name)
    alike = find_alike(name, classes)
    remedy = ""
    if alike is not None:
        remedy = f"If it is the class {written_label(alike)}, rename its folder, {written_label(name)}, to that. "
    remedy += "Add images of it to train, or remove the folder."
    raise _unknown_class("in train", name, classes, folder, remedy)


def class_of_model(name: str, classes: Sequence[str], folder: Path) -> int:
    """The id of the class of a folder in a trained model. As labels of texts, the name may differ from that of the
    class by case, spaces or characters that cannot be seen, if no two classes do.

    Args:
        folder: That of the split, for messages.

    Raises:
        RecipeError: There is no such class.
    """
    if name in classes:
        return classes.index(name)
    alike = find_alike(name, classes)
    if alike is not None and not alike_classes(classes):
        return classes.index(str(alike))
    raise _unknown_class("in the model", name, classes, folder, "Rename or remove the folder.")


def _unknown_class(where: str, name: str, classes: Sequence[str], folder: Path, remedy: str) -> RecipeError:
    """The error for a folder whose class is not known.

    Args:
        where: Where the class is missing: ``in train``.
    """
    return RecipeError(
        f"the class {name!r} is not {where}, which has: {', '.join(classes)}.",
        code="unknown-label",
        place=str(folder / name),
        remedy=remedy,
    )
