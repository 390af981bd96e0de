"""Trials of a recipe: variants, their runs in processes of their own, records, and paired statistics.

Measured runs, for bench and profile: ``worker``, ``measure``, ``pairs``, ``profile_observer``, ``timeline``. Trained
runs, for sweeps: ``runs`` and ``record`` (``sweep.json``). Both use ``statistics``.
"""
