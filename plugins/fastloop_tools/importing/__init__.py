"""``fastloop import``: a recipe from a config of Axolotl, TRL or transformers."""
