"""The parts of the text of ``fastloop plan`` as JSON values: the key ``plan`` of ``fastloop plan --json``."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastloop.plugins.plugin import Plugin
from fastloop.recipe import secrets
from fastloop.runtime import hardware
from fastloop_tools.plan.code_files import code_files
from fastloop_tools.plan.show import Plan, changed_options, changed_settings, loss_order, numerics_of, read_batch


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The parts of the text, by their names there.

    ``code`` are the files whose code runs, and ``plugins`` the plugins in call order, as ``--verbose`` shows them.
    ``batch`` has the fields of ``StepBatch``. ``loss`` are the plugins that compute it, the outermost first. In
    ``length``, null stands for no limit.

    Raises:
        UsageError: The batch or the processes do not divide.
    """
    recipe = plan.recipe
    machine = hardware.this_machine(recipe.train.device)
    return {
        "code": [str(file) for file in code_files(recipe)],
        "plugins": [plugin_to_dict(plugin, plan) for plugin in plan.plugins],
        "recipe": recipe.where,
        "device": {"type": machine.device, "name": machine.name, "dtypes": list(machine.dtypes)},
        "batch": dataclasses.asdict(read_batch(plan)),
        "loss": loss_order(plan),
        "length": {"epochs": recipe.train.epochs, "max_steps": recipe.train.max_steps},
        "output": recipe.output,
    }


def plugin_to_dict(plugin: Plugin, plan: Plan) -> dict[str, Any]:
    """A plugin in detail. ``options`` and ``settings`` are those that it or the recipe has set."""
    return {
        "name": plugin.name,
        "reference": plan.recipe.references.get(plugin.name, plugin.name),
        "slot": plugin.slot,
        "numerics": numerics_of(plugin),
        "reason": plan.plugins.reasons[plugin.name],
        "description": secrets.hide(plugin.description),
        "options": {name: to_json(value) for name, value in changed_options(plugin).items()},
        "settings": {name: to_json(value) for name, value in changed_settings(plugin, plan.settings).items()},
    }


def to_json(value: Any) -> Any:
    """A value of an option or a setting in JSON: null for a function, and the text of another object."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): to_json(item) for name, item in value.items()}
    return None if callable(value) else str(value)
