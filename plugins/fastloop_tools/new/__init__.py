"""``fastloop new``: write a package to begin with."""
