"""Trials of a recipe: variants, their runs in processes of their own, records, and paired statistics.

Measured runs, for bench and profile: ``worker``, ``measure``, ``pairs``. Trained runs, for sweeps and
searches: ``runs`` and ``record`` (``sweep.json``). Both use ``statistics`` and ``tables``.
"""
