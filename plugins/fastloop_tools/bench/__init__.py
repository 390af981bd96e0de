"""The ablation: what each plugin of a recipe wins on this machine, measured. See docs/decisions/0011-how-an-ablation-is-measured.md.

``plan`` makes the list of variants, ``ablation`` measures them in order, ``report`` and ``chart`` show the results. The processes that
measure, the statistics and the check of numerics are in ``fastloop_tools.measure``.
"""
