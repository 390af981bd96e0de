"""``fastloop plan --untrusted``: the code, files and URLs of a stranger's recipe, without importing that code."""
