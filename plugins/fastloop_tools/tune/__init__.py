"""``fastloop tune``: finds the fastest set of plugins for a recipe on this machine, by measuring."""
