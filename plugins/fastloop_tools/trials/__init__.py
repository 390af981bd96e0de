"""Trials of a recipe: variants, their runs in processes of their own, records, and paired statistics.

Measured runs, for bench, tune and profile: ``worker``, ``measure``, ``server``, ``pairs``, ``numerics``, ``results``.
Trained runs, for sweeps and searches: ``runs``, ``record`` (``sweep.json``), ``points``. Both use ``statistics``.
"""
