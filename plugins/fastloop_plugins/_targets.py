"""The target that losses and metrics ignore."""

from __future__ import annotations

IGNORED = -100
"""Target of a token or a word without a loss, such as padding: the default of ``ignore_index`` in torch, and the label
of padding in transformers."""
