"""Match the classes of a dataset with those of a checkpoint, and decide whether the checkpoint's head is kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError
from fastloop_plugins._names import list_names

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("fastloop")

CLASSIFIER = "ForSequenceClassification"
"""How the names of transformers' text classifiers end."""


@dataclass(frozen=True)
class LabelOrder:
    """The numbering of a run's classes.

    Attributes:
        names: Class names in the order of the model's ids.
        ids: The data's id -> the model's id.
        keeps_head: Whether the checkpoint's head, if it has one, is for these classes.
    """

    names: list[str]
    ids: list[int]
    keeps_head: bool


def label_order(
    classes: Sequence[str], config: Any, name: str, head: str = CLASSIFIER, key: str = "data.label"
) -> LabelOrder:
    """Compare the data's classes with a checkpoint's.

    Names that match, exactly or except for case and outer spaces, get the checkpoint's ids. Numbers 0 to n-1 in the
    data are the ids of the checkpoint's n classes. Otherwise the data's numbering is kept, with a new head.

    Args:
        classes: The data's class names in the order of its ids; numbers as text if it has no names.
        config: The checkpoint's configuration, as loaded.
        name: The checkpoint, for messages.
        head: How transformers' classes for the task end.
        key: The option that names the column of labels, for messages.
    """
    as_given = list(range(len(classes)))
    if _has_another_head(config, head):
        return LabelOrder(list(classes), as_given, keeps_head=False)
    theirs = [config.id2label.get(index) for index in range(len(config.id2label))]
    unnamed = theirs == [f"LABEL_{index}" for index in range(len(theirs))]  # transformers' own names
    numbers = list(classes) == [str(index) for index in as_given]
    for fold in (str, _folded):
        ours = [fold(label) for label in classes]
        known = [fold(label) for label in theirs]
        if len(set(ours)) == len(ours) and sorted(ours) == sorted(known):
            ids = [known.index(label) for label in ours]
            names = [classes[ids.index(index)] for index in as_given]
            if fold is _folded or ids != as_given:
                loosely = " except for case and spaces" if fold is _folded else ""
                logger.info(
                    "%s: the names match those of %s%s, and get its ids: %s", key, name, loosely, _listed(names)
                )
            return LabelOrder(names, ids, keeps_head=True)
    if numbers and len(theirs) == len(classes):
        if unnamed and not config.architectures:
            return LabelOrder(list(classes), as_given, keeps_head=True)
        logger.info("%s: the labels are numbers, and used as the ids of %s: %s", key, name, _listed(theirs))
        return LabelOrder(theirs, as_given, keeps_head=True)
    return LabelOrder(list(classes), as_given, keeps_head=False)


def _folded(label: Any) -> str:
    return str(label).strip().casefold()


def _has_another_head(config: Any, head: str) -> bool:
    """Whether the checkpoint's configuration names a head for another task, or no head."""
    names = config.architectures or ()
    return bool(names) and not any(name.endswith(head) for name in names)


def _listed(names: Sequence[Any]) -> str:
    return list_names([f"{index} = {name}" for index, name in enumerate(names)], 8)


def name_classes(config: Any, names: Sequence[str]) -> dict[int, str]:
    """Set the classes of a transformers configuration. Returns its ``id2label`` from before."""
    theirs = dict(config.id2label or {})
    # most configurations derive it from id2label, and PVT's has it as an option of its own
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    return theirs


def start_head_fresh(
    model: Any, missing: set[str], theirs: Mapping[int, str], order: LabelOrder, where: str, head: str = CLASSIFIER
) -> set[str]:
    """Reinitialize all weights outside the base model if the checkpoint had a head. Draws from torch's global random
    generator.

    Args:
        model: A transformers model, as returned by ``from_pretrained``.
        missing: Names of weights that the checkpoint does not have.
        theirs: The checkpoint's ``id2label``.
        head: As in ``label_order``.

    Returns:
        The names of the weights that the checkpoint has and that are reinitialized.

    Raises:
        RecipeError: The model does not define which of its modules is the base model.
    """
    base: nn.Module = model.base_model
    if base is model and _has_another_head(model.config, head):
        return set()
    differ = f"its classes are {_listed(list(theirs.values()))}, and the data's are {_listed(order.names)}"
    if base is model:
        raise RecipeError(
            f"{differ}. {type(model).__name__} does not define its base model, so its head cannot be reinitialized.",
            code="labels-differ",
            place=where,
            remedy="Rename the labels in the data, or use another model.",
        )
    modules = [child for child in model.children() if child is not base]
    prefix = f"{model.base_model_prefix}."
    of_head = {name for name, _ in model.named_parameters() if not name.startswith(prefix)}
    loaded = of_head - missing
    if not loaded:
        return set()
    for child in modules:
        for part in child.modules():
            part._is_hf_initialized = False
        for parameter in child.parameters():
            parameter._is_hf_initialized = False
    model.init_weights()
    listed = list_names(sorted(loaded), 4)
    logger.warning(Problem(f"{differ}: the head is reinitialized ({listed}).", code="head-reinitialized", place=where))
    return loaded
