"""``fastloop prepare``: tokenizes the data of a recipe ahead."""
