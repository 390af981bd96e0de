"""Logs, progress, traces."""
