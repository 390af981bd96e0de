"""Rows of data: one reader per format. The names in ``__all__`` are public: docs/data.md describes them."""

from fastloop_plugins.rows.file import BadRow, Block, File
from fastloop_plugins.rows.lines import LineFormat
from fastloop_plugins.rows.options import Read

__all__ = ["BadRow", "Block", "File", "LineFormat", "Read"]
