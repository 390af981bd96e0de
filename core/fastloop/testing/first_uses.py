"""Does once, for all processes that are forked later, what fastloop and libraries do at their first use.

transformers compiles the 1,000 patterns of its rules for weights when a process first saves or loads a model. That took
0.1 of the 0.4 CPU seconds of a small training. Modules that each training imports took another 0.02.
"""

from __future__ import annotations

from contextlib import suppress

import fastloop.cli.summary
import fastloop.cli.train
import fastloop.core_modules  # noqa: F401
from fastloop.cli.ending import keep_operators

with suppress(ImportError):  # the rules are no public API of transformers
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("bert")  # type: ignore[no-untyped-call]

keep_operators()
