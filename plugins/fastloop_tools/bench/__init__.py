"""Ablation: measure the speedup of each plugin of a recipe on this machine.

See docs/decisions/0011-how-an-ablation-is-measured.md.

``plan`` builds the list of variants, ``ablation`` measures them in order, ``report`` and ``chart`` show the results.
The measured processes, the statistics and the numerics check are in ``fastloop_tools.trials``.
"""
