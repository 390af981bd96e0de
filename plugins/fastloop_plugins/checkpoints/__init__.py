"""Which checkpoints are kept, and how they are written."""
