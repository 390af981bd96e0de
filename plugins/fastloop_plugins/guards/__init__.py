"""Plugins that detect invalid numbers and hanging processes.

_numbers                  # of ``nan_guard``
_heartbeats               # of ``watchdog``
_updates, _parameters, _new_weights   # of ``optimizer_check``
_metric_problems          # of ``metric_check``
"""
