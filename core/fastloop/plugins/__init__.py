"""Plugins: their base class and declarations, how a recipe is resolved to them, and the calls of their hooks."""
