"""The Python API, for code that already has a model and data: ``fastloop.Trainer``."""

import sys
import warnings
from importlib import import_module

if "ipykernel" in sys.modules:
    # In a notebook without ipywidgets, the first import of tqdm.auto warns of it. fastloop's bar needs no widgets.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import_module("tqdm.auto")
