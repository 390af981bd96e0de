"""fastloop's own implementations of hooks, which are part of every run. No package can add to them."""

from __future__ import annotations

from types import ModuleType

from fastloop import default_hooks, loop
from fastloop.checks import batch_norm, hook_results, launcher, optimizer_parts, resumed_run, sample_orders
from fastloop.data import sampler_order
from fastloop.export import model as exported_model
from fastloop.optimizers import combining, named

MODULES: tuple[ModuleType, ...] = (
    loop,
    default_hooks,
    batch_norm,
    exported_model,
    hook_results,
    launcher,
    named,
    optimizer_parts,
    resumed_run,
    sample_orders,
    sampler_order,
    combining,
)
"""In the order in which a run registers them: pluggy calls the last one first, among those with equal marks."""
