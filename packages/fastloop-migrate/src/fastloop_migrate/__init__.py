"""The command ``fastloop import`` and the plugin ``transformers-callbacks`` of fastloop.

import_config, read       # the command, and the config that it reads
keys                      # the keys of other libraries
convert, data, preference # converts keys of training, of data and of preference tuning
transformers_callbacks    # the plugin
_trainer_arguments, _trainer_events   # the arguments and events that its callbacks expect
"""

from fastloop_migrate.transformers_callbacks import TransformersCallbacks

__all__ = ["TransformersCallbacks"]
