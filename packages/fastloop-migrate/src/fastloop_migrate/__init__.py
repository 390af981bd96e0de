"""The command ``fastloop import`` and the plugin ``transformers-callbacks`` of fastloop.

import_config, read       # the command, and the config that it reads
keys                      # the keys of other libraries
convert, data, preference # converts keys of training, of data and of preference tuning
transformers_callbacks    # the plugin
_trainer_arguments, _trainer_events   # the arguments and events that its callbacks expect
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop_migrate.transformers_callbacks import TransformersCallbacks

__all__ = ["TransformersCallbacks"]


def __getattr__(name: str) -> Any:
    if name == "TransformersCallbacks":  # the command imports the package, and needs no plugin
        from fastloop_migrate.transformers_callbacks import TransformersCallbacks

        return TransformersCallbacks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
