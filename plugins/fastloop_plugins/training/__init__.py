"""Plugins for schedules, weight averaging, adapters and early stopping."""
