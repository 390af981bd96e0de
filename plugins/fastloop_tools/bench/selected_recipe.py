"""Writes the recipe of ``fastloop bench --select`` as YAML, with the measured speedup of each line as a comment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from fastloop.problem import counted
from fastloop.recipe import Recipe, Train, anchored
from fastloop_tools.bench.selection import ONCE, EditSelection, Trial
from fastloop_tools.shared.recipe_text import recipe_text


def factor(selection: EditSelection) -> str:
    """The result of the last check as text."""
    ratios = selection.check["ratios"]
    pairs = "one pair" if len(ratios) == 1 else f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs"
    return f"{median(ratios):.2f} times as fast as given ({pairs})"


def selected_recipe(selection: EditSelection, last: str, folder: Path) -> str:
    """The fastest recipe as YAML, for a file in ``folder``. ``last``: the last line of its comment."""
    remarks = {}
    for trial in selection.trials:
        if trial.kept:
            key = trial.edit.partition("=")[0] if trial.edit.startswith(("data.", "train.", "model.")) else trial.plugin
            remarks[key] = f"{measured(trial)}; {trial.numerics}"
    name = selection.given.source.stem if selection.given.source else "recipe"
    numerics = selection.check["numerics"]
    head = [
        f"{name}, the fastest edits on this machine: {factor(selection)}.",
        f"Losses, {numerics['class']}: {numerics['verdict']}.",
        last,
    ]
    best = selection.best
    source = selection.best.source
    if source is not None and source.parent.resolve() != folder.resolve():
        parts = {name: getattr(best, name) for name in ("model", "data", "plugins", "references")}
        best = dataclasses.replace(best, **{name: anchored(part, source.parent) for name, part in parts.items()})
    return text(best, head, remarks)


def measured(trial: Trial) -> str:
    """The speedup of an edit that was kept, as text."""
    text = f"x {median(trial.ratios):.2f}"
    if len(trial.ratios) == 1:
        text += ", one pair"
    if trial.once > ONCE and trial.pays_after is not None:
        text += f", pays after {counted(trial.pays_after, 'step')}"
    return text


def text(recipe: Recipe, head: list[str], remarks: Mapping[str, str]) -> str:
    """The recipe as YAML, with a comment at the top, and remarks after the lines of plugins and keys, by plugin name,
    ``train.KEY`` or ``data.KEY``."""
    usual = {field.name: field.default for field in dataclasses.fields(Train)}
    train = {key: value for key, value in dataclasses.asdict(recipe.train).items() if value != usual[key]}
    sections = {"model": recipe.model, "data": recipe.data, "train": train}
    tree: dict[str, Any] = {name: values for name, values in sections.items() if values}
    tree["plugins"] = [{name: options} for name, options in recipe.listed(recipe.plugins).items()]
    tree["output"] = recipe.output
    remarks = {recipe.references.get(name, name): remark for name, remark in remarks.items()}
    return recipe_text(tree, head, remarks)
