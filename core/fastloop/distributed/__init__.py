"""Several processes: starting them, stopping them, Accelerate."""
