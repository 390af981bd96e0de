"""Checks that every run makes: implementations of hooks, beside those of its plugins."""
