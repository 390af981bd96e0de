"""Strategies for several processes."""
