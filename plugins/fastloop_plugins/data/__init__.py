"""Plugins that load, order and pack samples."""
