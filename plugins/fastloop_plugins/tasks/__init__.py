"""Tasks: each defines model, data, loss and metrics."""
