"""Strategies for training in several processes."""
