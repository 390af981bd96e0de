"""The plugins that fastloop enables by default: each whose ``auto_enable`` returns a reason for the recipe."""

from __future__ import annotations

DEFAULT_PLUGINS = (
    "causal-lm",
    "ddp",
    "image-classification",
    "log",
    "metric-check",
    "module",
    "muon-optimizer",
    "optimizer-check",
    "parameter-groups",
    "progress",
    "seq2seq",
    "speed-check",
    "text-classification",
    "token-classification",
)
"""Names of plugins of this package, in the order in which they are tried."""
