"""``fastloop search``: searches the best settings with Optuna, by any number of workers that share a database."""
