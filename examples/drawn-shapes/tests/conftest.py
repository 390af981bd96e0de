"""The fixtures of fastloop's kit for plugin authors."""

pytest_plugins = ["fastloop.testing"]
