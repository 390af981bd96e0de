"""The modules of the core that implement hooks, for every run. No package can add to them."""

from __future__ import annotations

from types import ModuleType

from fastloop import default_hooks, loop
from fastloop.checks import batch_norm, hook_results, launcher, model_state, optimizer_parts, resumed_run, sample_orders
from fastloop.data import custom_sampler
from fastloop.export import model as exported_model
from fastloop.optimizers import combining, named

MODULES: tuple[ModuleType, ...] = (
    loop,  # train_step, evaluate
    default_hooks,  # first hooks that need no file of their own
    batch_norm,  # check_run, recover
    exported_model,  # export_model
    hook_results,  # checks the results of plugins' hooks
    launcher,  # check_recipe
    named,  # build_optimizer: the one that train.optimizer names
    model_state,  # check_run
    optimizer_parts,  # check_run
    resumed_run,  # check_run
    sample_orders,  # check_run, before_epoch
    custom_sampler,  # wraps build_sampler
    combining,  # wraps build_optimizer and build_scheduler
)
"""In the order in which a run registers them: pluggy calls the last one first, among those with equal marks."""
