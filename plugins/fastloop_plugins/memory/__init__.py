"""Plugins for memory: allocator, activations, out-of-memory errors."""
