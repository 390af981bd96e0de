"""Ablation: measure the speedup of each plugin of a recipe on this machine.

Each measurement is a process of its own, since allocators, compiler caches and peak memory keep traces of an earlier
run. The variants of a repeat share the seed and run close together, forwards and backwards in turn, because a machine
drifts. The compared value is the ratio inside a repeat; the reported one is the median with its bootstrap interval.
Compilation is a cost and not a speed: each variant has an empty cache.

``plan`` builds the list of variants, ``ablation`` measures them in order and checks their numerics, ``report`` shows
them. The measured processes and the statistics are in ``fastloop_tools.trials``.
"""
