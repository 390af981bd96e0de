"""fastloop: list plugins in a recipe, and get the fastest correct training your hardware can do, with proof.

    from fastloop import Trainer
    Trainer(model, train_loader, eval_loader, plugins=["amp", "compile"], epochs=3).fit()

Importing this package does not import torch. Names that need torch are loaded on first use.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastloop.errors import CheckpointError, FastloopError, PluginCrash, PluginError, RecipeError, UsageError
from fastloop.estimates import Recommendation, SpeedupEstimate, StepProfile
from fastloop.hookspecs import hookspec
from fastloop.options import option
from fastloop.plugins.plugin import DISTRIBUTION, Device, Dtype, Package, Plugin, Trait, When, hookimpl
from fastloop.settings import Settings
from fastloop.state import Batch, Output, State
from fastloop.strategy import Strategy

if TYPE_CHECKING:
    from fastloop.run import Run
    from fastloop_tools.trainer.trainer import Trainer

__version__ = version(DISTRIBUTION)

__all__ = [
    "Batch",
    "CheckpointError",
    "Device",
    "Dtype",
    "FastloopError",
    "Output",
    "Package",
    "Plugin",
    "PluginCrash",
    "PluginError",
    "RecipeError",
    "Recommendation",
    "Run",
    "Settings",
    "SpeedupEstimate",
    "State",
    "StepProfile",
    "Strategy",
    "Trainer",
    "Trait",
    "UsageError",
    "When",
    "hookimpl",
    "hookspec",
    "option",
]


def __getattr__(name: str) -> Any:
    if name == "Run":
        from fastloop.run import Run

        return Run
    if name == "Trainer":  # a tool that uses the core, like the commands
        from fastloop.plugins.installed import entry_points

        return entry_points("fastloop.api")[name].load()
    raise AttributeError(f"module 'fastloop' has no attribute {name!r}")
