"""Models of transformers: found, checked, named, and loaded."""
