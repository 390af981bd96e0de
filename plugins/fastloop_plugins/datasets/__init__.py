"""Datasets that need no download."""
