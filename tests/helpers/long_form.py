"""``LONG``: whether tests run in their long form, ``FASTLOOP_RELIABILITY=1 make test-all``: every parameter value."""

from __future__ import annotations

import os

LONG = "FASTLOOP_RELIABILITY" in os.environ
