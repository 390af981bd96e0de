"""Plugins that detect invalid numbers and hanging processes.

nan_guard, _numbers       # losses and gradients that are not finite
watchdog, _heartbeats     # processes that hang
optimizer_check           # weights that do not change; its parts: _updates, _parameters, _new_weights
metric_check, _metric_problems   # metrics that fail, before the first step
"""
