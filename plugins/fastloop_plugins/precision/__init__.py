"""Precision of the computation."""
