"""Images of a task: read, decoded, batched, and their models."""
