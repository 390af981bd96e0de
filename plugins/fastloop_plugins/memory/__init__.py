"""Plugins for memory: allocator, activations, out-of-memory errors.

_out_of_memory            # of ``auto_micro_batch``
"""
