"""``fastloop new``: creates a package from a template."""
