"""Plugins that detect invalid numbers and hanging processes."""
