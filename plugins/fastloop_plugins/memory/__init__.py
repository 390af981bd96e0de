"""Plugins for memory.

activation_checkpointing  # computes activations again in backward
allocator                 # settings of the memory allocator
auto_micro_batch          # divides micro-batches that do not fit; _out_of_memory recognizes the errors
"""
