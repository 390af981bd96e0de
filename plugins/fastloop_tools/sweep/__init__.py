"""``fastloop sweep``: trains a grid of settings with several seeds, and compares the results."""
