"""The long form of the tests, ``FASTLOOP_RELIABILITY=1 make test-all``: every parameter value, and tests that repeat
with a larger set-up what a cheaper one shows."""

from __future__ import annotations

import os

import pytest

LONG = "FASTLOOP_RELIABILITY" in os.environ
"""Whether tests run in their long form."""

long_form_only = pytest.mark.skipif(not LONG, reason="runs in the long form: FASTLOOP_RELIABILITY=1 make test-all")
"""Mark of a test, or of a parameter value, that is skipped otherwise."""
