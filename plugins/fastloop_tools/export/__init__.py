"""``fastloop export``: write a trained model in the form that other programs load."""
