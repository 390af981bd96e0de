"""The Python API, for code that already has a model and data: ``fastloop.Trainer``."""
