"""``fastloop profile``: finds the bottlenecks of a run, and the plugins that estimate a speedup for them."""
