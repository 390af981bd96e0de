"""Helpers for plugins of other packages. The names in ``__all__`` are public: docs/write-a-plugin.md lists them.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop.cli.numerics import DropoutRates, switch_dropout_off
    from fastloop.errors import did_you_mean
    from fastloop.metric_modes import metric_modes
    from fastloop.probing import has_values
    from fastloop.problem import clause, counted, typed_clause
    from fastloop.recipe.references import import_object
    from fastloop.runtime.json_text import without_nan
    from fastloop.runtime.platform_support import cores, processors
    from fastloop_plugins._cache import private_cache
    from fastloop_plugins._foreign_load import ForeignLoad
    from fastloop_plugins._task_traits import recipe_traits, require_trait
    from fastloop_plugins.data._varlen import computing_dtype, head_size
    from fastloop_plugins.models.adapters import importing_bitsandbytes
    from fastloop_plugins.models.wrapped import BERT_LIKE, model_type, transformers_model

PLACES = {
    "BERT_LIKE": "fastloop_plugins.models.wrapped",
    "DropoutRates": "fastloop.cli.numerics",
    "ForeignLoad": "fastloop_plugins._foreign_load",
    "clause": "fastloop.problem",
    "computing_dtype": "fastloop_plugins.data._varlen",
    "cores": "fastloop.runtime.platform_support",
    "counted": "fastloop.problem",
    "did_you_mean": "fastloop.errors",
    "has_values": "fastloop.probing",
    "head_size": "fastloop_plugins.data._varlen",
    "import_object": "fastloop.recipe.references",
    "importing_bitsandbytes": "fastloop_plugins.models.adapters",
    "metric_modes": "fastloop.metric_modes",
    "model_type": "fastloop_plugins.models.wrapped",
    "private_cache": "fastloop_plugins._cache",
    "processors": "fastloop.runtime.platform_support",
    "recipe_traits": "fastloop_plugins._task_traits",
    "require_trait": "fastloop_plugins._task_traits",
    "switch_dropout_off": "fastloop.cli.numerics",
    "transformers_model": "fastloop_plugins.models.wrapped",
    "typed_clause": "fastloop.problem",
    "without_nan": "fastloop.runtime.json_text",
}
"""Public name -> its module, which is imported at the first use."""

__all__ = [
    "BERT_LIKE",
    "DropoutRates",
    "ForeignLoad",
    "clause",
    "computing_dtype",
    "cores",
    "counted",
    "did_you_mean",
    "has_values",
    "head_size",
    "import_object",
    "importing_bitsandbytes",
    "metric_modes",
    "model_type",
    "private_cache",
    "processors",
    "recipe_traits",
    "require_trait",
    "switch_dropout_off",
    "transformers_model",
    "typed_clause",
    "without_nan",
]


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
