"""Imports for the server of forked processes: a second of each that trains an adapter, compiles, or uses DeepSpeed."""

from __future__ import annotations

import logging

logging.disable(logging.WARNING)  # bitsandbytes, which peft imports, reports a kernel that is not installed
try:
    import peft  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401
finally:
    logging.disable(logging.NOTSET)
