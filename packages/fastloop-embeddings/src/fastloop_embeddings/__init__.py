"""Text embeddings for fastloop: the task ``embedding``."""
