"""``fastloop plan --untrusted``: the code, files and URLs of a recipe from a stranger, without importing any of that code."""
