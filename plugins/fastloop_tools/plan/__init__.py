"""``fastloop plan``: what a recipe would run, its code, its samples and its memory, without training."""
