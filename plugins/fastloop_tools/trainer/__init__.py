"""The Python API, for code that already has a model and data: ``fastloop.Trainer``.

trainer, arguments        # the class, and arguments that it does not have
runs                      # its runs: training, evaluation and prediction on one model
task                      # the plugin of these runs: the user's model, data, loss and metrics
user_loader, batch_list   # a loader, or a list of batches, of the user
optimizers                # an optimizer and a scheduler of the user
function_metric           # a metric that is a function of the user
"""

import sys
import warnings
from importlib import import_module

if "ipykernel" in sys.modules:
    # In a notebook without ipywidgets, the first import of tqdm.auto warns of it. fastloop's bar needs no widgets.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        import_module("tqdm.auto")
