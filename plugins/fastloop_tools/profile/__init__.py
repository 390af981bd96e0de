"""Find the bottlenecks of a run: ``observe`` profiles a few steps, ``suggestions`` collects plugins' speedup estimates.

This file imports nothing: ``fastloop.plugins.plugin`` refers to ``StepProfile`` and ``SpeedupEstimate``, and must
import fast.
"""
