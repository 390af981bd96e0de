"""Faster operations: attention, losses, optimizers, compilation. Those for CPUs are in ``packages/fastloop-cpu``.

_compiling                # of ``compile``
_recorded_step            # of ``step_graph``
"""
