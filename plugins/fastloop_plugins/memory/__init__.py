"""Memory: allocator, activations, out-of-memory errors."""
