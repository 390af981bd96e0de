"""``fastloop plan --device-memory``: estimates the memory and the traffic of each strategy."""
