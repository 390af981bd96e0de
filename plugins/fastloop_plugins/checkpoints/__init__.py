"""Plugins that select checkpoints to keep, and control how they are written."""
