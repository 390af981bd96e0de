"""Test helpers for plugin authors. To use the fixtures, add to ``conftest.py``:

    pytest_plugins = ["fastloop.testing"]

``tiny_run`` trains a tiny model with given plugins; ``hook_calls`` lists the hooks that fired; ``processes`` calls a
function in several real processes, and ``run_commands`` runs commands. ``expect_problem`` compares the fields of an
error. Three lines test a plugin's declarations:

    from fastloop.testing import Conformance

    class TestConformance(Conformance):
        plugin = "my-plugin"

Requires pytest: ``pip install 'fastloop-train[testing]'``.

tiny, runs, tasks         # trains a tiny model, or a recipe with plugins; small tasks to train
starting, first_uses, time_limits   # real processes and commands, and their imports; those that hang are ended
conformance, promises, studies   # the suite for a plugin, its checks, and the trainings that they compare
package_texts             # the texts of a plugin's package, compared with its class
differences, problems, settings   # comparisons of trainings, errors and global settings
"""

from __future__ import annotations

try:
    import pytest  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "pytest":
        raise
    raise ModuleNotFoundError(
        "fastloop.testing needs pytest, which is not installed. Install it: pip install 'fastloop-train[testing]'"
    ) from None

from fastloop.testing.conformance import Conformance
from fastloop.testing.conformance import pytest_collection_finish as pytest_collection_finish
from fastloop.testing.conformance import pytest_collection_modifyitems as pytest_collection_modifyitems
from fastloop.testing.conformance import pytest_configure as pytest_configure
from fastloop.testing.conformance import pytest_terminal_summary as pytest_terminal_summary
from fastloop.testing.problems import assert_problem, expect_problem, find_problems
from fastloop.testing.runs import Trained, train
from fastloop.testing.starting import ProcessResult, processes, run_commands, start
from fastloop.testing.studies import study_results
from fastloop.testing.tasks import IMAGES, LANGUAGE, TEXTS, VECTORS, with_dropout, write_texts
from fastloop.testing.tiny import Call, HookCalls, Recorder, TinyResult, hook_calls, tiny_data, tiny_model, tiny_run

__all__ = [
    "IMAGES",
    "LANGUAGE",
    "TEXTS",
    "VECTORS",
    "Call",
    "Conformance",
    "HookCalls",
    "ProcessResult",
    "Recorder",
    "TinyResult",
    "Trained",
    "assert_problem",
    "expect_problem",
    "find_problems",
    "hook_calls",
    "processes",
    "run_commands",
    "start",
    "study_results",
    "tiny_data",
    "tiny_model",
    "tiny_run",
    "train",
    "with_dropout",
    "write_texts",
]
