"""Guards against bad numbers and hanging processes."""
