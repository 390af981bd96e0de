"""``fastloop lr-find``: suggest a learning rate by a range test."""
