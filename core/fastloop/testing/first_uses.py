"""Does once, for all processes that are forked later, what fastloop and libraries do at their first use.

transformers compiles the 1,000 patterns of its rules for weights when a process first saves or loads a model. That took
0.1 of the 0.4 CPU seconds of a small training. Modules that each training imports, and the checks of the options of
plugins, took another tenth.
"""

from __future__ import annotations

from contextlib import suppress

import fastloop.cli.summary
import fastloop.cli.train
import fastloop.core_modules  # noqa: F401
from fastloop.cli.ending import keep_operators
from fastloop.errors import PluginError
from fastloop.plugins.installed import installed, is_own, load

with suppress(ImportError):  # the rules are no public API of transformers
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("bert")  # type: ignore[no-untyped-call]

for name, point in installed().items():
    if is_own(point):
        with suppress(PluginError):  # a process that uses the plugin reports it
            load(name)
keep_operators()
