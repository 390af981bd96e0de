"""``fastloop tune``: the fastest plugin set of a recipe on this machine, found by measuring."""
