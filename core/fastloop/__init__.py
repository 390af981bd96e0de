"""fastloop: list plugins in a recipe, and get the fastest correct training your hardware can do, with proof.

    from fastloop import Trainer
    Trainer(model, train_loader, eval_loader, plugins=["amp", "compile"], epochs=3).fit()

Importing this package imports nothing. Each name is loaded on its first use, and torch only with names that need it.

To read the core, begin with ``hookspecs``, and read ``loop``, ``run`` and ``lifecycle`` beside it. The files beside
this one::

    hookspecs                 # every hook, in the order in which it fires
    core_modules, default_hooks   # the modules that implement hooks for every run, and small implementations
    lifecycle, run            # a run: built, trained, exported and closed; the argument ``run`` of hooks
    built_model               # the model that a task has built: checked, and put in train mode
    loop, step_totals         # an epoch, a step and an evaluation
    unstepped                 # the parameters that the optimizer of a run does not step
    schedule                  # the steps and epochs after which the loop evaluates, saves and stops
    splits                    # train, validation and test: their names in keys, logs and messages
    state                     # counters, batches, and requests of plugins to stop, evaluate or save at another time
    settings                  # the settings that plugins return in ``configure``
    strategy                  # the base class of strategies for several processes
    scalars, log_points       # logged values
    evaluation_results, metric_states   # metrics of an evaluation, on one process and on several
    shared_metric_states                # which metrics share their states
    metric_modes, undefined_metrics     # which values of a metric are better, and which say nothing
    speedup_estimates, memory_estimates   # the speedups and the memory that plugins estimate, and what they recommend
    options                   # declares and checks the options of plugins and of recipe sections
    errors, problem           # the errors that users see, and their fields
    no_code, probing          # ``--no-code``, and forward passes on trial

Each folder lists its files in its ``__init__``::

    recipe                    # recipes: typed settings from YAML files and overrides
    plugins                   # plugins: found, resolved, ordered, and called
    data                      # batches from datasets, and the order of samples
    optimizers                # the optimizer of a recipe, and several optimizers with their schedulers
    distributed               # several processes, signals and exit codes
    checkpoint                # checkpoints, the run folder, and resuming
    export                    # the exported model and its README
    checks                    # checks that every run makes
    cli                       # the command line
    runtime                   # clock, files, hardware and random states of a process
    testing                   # helpers for tests of plugins and packages
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop.errors import CheckpointError, FastloopError, PluginCrash, PluginError, RecipeError, UsageError
    from fastloop.hookspecs import hookspec
    from fastloop.memory_estimates import Layout, MemoryEstimate
    from fastloop.metric_modes import MetricMode
    from fastloop.options import option
    from fastloop.plugins.manager import PluginSet
    from fastloop.plugins.plugin import Device, Dtype, Package, Plugin, Trait, When, hookimpl
    from fastloop.problem import Problem
    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop.runtime.hardware import Machine
    from fastloop.settings import Settings
    from fastloop.speedup_estimates import Recommendation, SpeedupEstimate, StepProfile
    from fastloop.state import Batch, Output, State
    from fastloop.strategy import Strategy
    from fastloop_tools.trainer.trainer import Trainer

    __version__: str

__all__ = [
    "Batch",
    "CheckpointError",
    "Device",
    "Dtype",
    "FastloopError",
    "Layout",
    "Machine",
    "MemoryEstimate",
    "MetricMode",
    "Output",
    "Package",
    "Plugin",
    "PluginCrash",
    "PluginError",
    "PluginSet",
    "Problem",
    "Recipe",
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


MODULES = {
    "errors": ("CheckpointError", "FastloopError", "PluginCrash", "PluginError", "RecipeError", "UsageError"),
    "hookspecs": ("hookspec",),
    "memory_estimates": ("Layout", "MemoryEstimate"),
    "metric_modes": ("MetricMode",),
    "options": ("option",),
    "plugins.manager": ("PluginSet",),
    "plugins.plugin": ("Device", "Dtype", "Package", "Plugin", "Trait", "When", "hookimpl"),
    "problem": ("Problem",),
    "recipe": ("Recipe",),
    "run": ("Run",),
    "runtime.hardware": ("Machine",),
    "settings": ("Settings",),
    "speedup_estimates": ("Recommendation", "SpeedupEstimate", "StepProfile"),
    "state": ("Batch", "Output", "State"),
    "strategy": ("Strategy",),
}
"""Module -> its names that this package has."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        from fastloop.plugins.packages import DISTRIBUTION

        return version(DISTRIBUTION)
    if name == "Trainer":  # a tool that uses the core, like the commands
        from fastloop_tools.trainer.trainer import Trainer

        return Trainer
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"fastloop.{module}"), name)
    raise AttributeError(f"module 'fastloop' has no attribute {name!r}")
