"""The few errors a user can get, and how they are worded.

A message says where (file, key or plugin), what was found, what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FastloopError(Exception):
    """The run cannot go on. ``exit_code`` is what the command line returns."""

    exit_code = 1


class UsageError(FastloopError):
    """What was asked is wrong: a recipe, a plugin, an option, a path. WarningCollector before training starts."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe or an override holds something that cannot be."""


class PluginError(UsageError):
    """A plugin is missing, is written wrongly, or cannot be used with what else was asked."""


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint where one was looked for, not even a damaged one."""


class SaveError(FastloopError):
    """Something could not be written: the disk is full, a quota is used up, the folder is read-only. What was there before is whole."""


class DataError(FastloopError):
    """A batch could not be read while training. ``__cause__`` is what the dataset, the collator or a worker raised."""


class ProcessLost(FastloopError):
    """Another process of the run is gone, and with it the run. That process knows why."""


class PluginCrash(FastloopError):
    """A plugin raised while it ran; names the plugin, its distribution and the hook. ``__cause__`` is the exception.

    Attributes:
        plugin: The plugin's name.
    """

    def __init__(self, message: str, plugin: str = "") -> None:
        super().__init__(message)
        self.plugin = plugin


class UserCodeError(FastloopError):
    """Code of the user's own raised: a model, a loss, a metric, a dataset. Names the file and line; ``__cause__`` is the exception."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """' Did you mean 'lr'?' when a choice is near ``name``, else the sorted choices when few, else ''."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Expected one of: {', '.join(known)}." if 0 < len(known) <= 24 else ""
