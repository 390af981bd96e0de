"""``python -m fastloop`` is the command line."""

from fastloop.cli import process

process()
