"""Tasks: what is trained on which data."""
