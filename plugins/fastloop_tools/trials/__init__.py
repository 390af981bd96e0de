"""Measures training runs in separate processes."""
