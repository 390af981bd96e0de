"""Fixtures of fastloop.testing."""

pytest_plugins = ["fastloop.testing"]
