"""Plugins that log, show progress and record traces."""
