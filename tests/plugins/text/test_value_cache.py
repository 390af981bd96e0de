"""ValueCache: numbers that a task computes from its model, in the folder of token-cache.

Modules:
    plugins/fastloop_plugins/text/value_cache.py
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from fastloop.testing import assert_problem
from fastloop_plugins._cache import tokens_kept_in
from fastloop_plugins.text import ValueCache

FACTS = {"model weights": "1a", "precision": "bf16", "train split": "2b"}
VALUES = torch.tensor([[7, -1], [2**62, 3]])


def cache() -> ValueCache:
    with tokens_kept_in(Path("cache")):
        return ValueCache("reference")


def test_values_are_read_by_the_same_facts_alone(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    assert cache().read(FACTS) is None
    assert cache().explain_miss(FACTS) == "cache has none of an earlier run"
    cache().write(FACTS, VALUES)
    found = cache().read(FACTS)
    assert found is not None
    assert torch.equal(found, VALUES)
    assert "reference: read from cache/reference-" in caplog.text
    assert cache().read({**FACTS, "precision": "no"}) is None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({**FACTS, "precision": "no"}, "precision"),
        ({**FACTS, "precision": "no", "train split": "3c"}, "precision, train split"),
        ({"model weights": "1a", "precision": "bf16"}, "train split"),
        ({**FACTS, "test split": "4d"}, "test split"),
    ],
)
def test_a_miss_names_the_facts_that_differ_from_the_most_similar_entry(facts, expected):
    cache().write(dict.fromkeys(FACTS, "other"), VALUES)
    cache().write(FACTS, VALUES)
    assert cache().read(facts) is None
    text, _, differing = cache().explain_miss(facts).partition(" differ in ")
    assert differing == expected
    assert text.startswith("those in cache/reference-")


def test_damaged_values_are_computed_again(caplog):
    cache().write(FACTS, VALUES)
    (entry,) = Path("cache").iterdir()
    (entry / "values.safetensors").write_bytes(b"cut")
    assert cache().read(FACTS) is None
    assert_problem(caplog, f"damaged-cache reference: {entry}")
    cache().write(FACTS, VALUES)
    (entry / "facts.json").write_text("{")
    assert cache().explain_miss({**FACTS, "precision": "no"}) == "cache has none of an earlier run"


def test_without_a_folder_nothing_is_kept():
    own = ValueCache("reference")
    own.write(FACTS, VALUES)
    assert own.read(FACTS) is None
    assert own.explain_miss(FACTS) == "token-cache, which would keep them for later runs, is off"
