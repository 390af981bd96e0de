"""Checks of the options of ``data`` for labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import RecipeError

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData

SEVERAL_NUMBERS = (
    "Train a run for each column. For one model with several numbers, use a model and a dataset of your own: the "
    "plugin 'module' with loss: mse_loss, or Trainer."
)
"""The remedy for several columns of numbers."""


def check_label_options(data: TextData, labelled: bool) -> None:
    """Check that the options for labels fit each other and the task.

    Args:
        labelled: Whether the task reads labels.

    Raises:
        RecipeError: An option is missing, or the task does not read it.
    """
    if labelled and data.options.label is None:
        raise RecipeError(
            "missing.",
            code="missing-value",
            place=f"{data.where}.label",
            remedy="Name the column of labels, such as data.label=label.",
        )
    if not labelled and data.options.label is not None:
        raise RecipeError(
            f"{data.subject} has no labels.",
            code="unknown-option",
            place=f"{data.where}.label",
            remedy="Remove it, or use the plugin text-classification.",
        )
    if not labelled and len(data.columns) > 1:
        raise RecipeError(
            f"found {data.columns}, and {data.subject} reads one column.",
            code="wrong-type",
            place=f"{data.where}.text",
            remedy="Name one.",
        )
    for key in ("label_offset", "label_map", "label_type"):
        if not labelled and getattr(data.options, key):
            raise RecipeError(
                f"{data.subject} has no labels.",
                code="unknown-option",
                place=f"{data.where}.{key}",
                remedy="Remove it.",
            )
        if key != "label_type" and data.label_type != "class" and getattr(data.options, key):
            raise RecipeError(
                f"is for data.label_type=class, and it is {data.label_type}.",
                code="unknown-option",
                place=f"{data.where}.{key}",
                remedy="Remove it.",
            )
    if data.several and data.label_type != "classes":
        raise RecipeError(
            code="wrong-type",
            place=f"{data.where}.label",
            found=str(data.labels),
            expected=f"one column, for data.label_type={data.label_type}",
            remedy=SEVERAL_NUMBERS if data.label_type == "number" else "",
        )
    if data.several and len(data.labels) < 2:
        raise RecipeError(
            code="wrong-type",
            place=f"{data.where}.label",
            found=str(data.labels),
            expected="two columns of 0 and 1 or more",
        )
