"""Schedules, averaging, adapters, early stopping."""
