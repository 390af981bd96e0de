"""Losses, metrics and predictions that tasks share."""
