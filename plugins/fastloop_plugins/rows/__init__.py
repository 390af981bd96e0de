"""Rows of data: one reader per format. The names in ``__all__`` are public: docs/write-a-task.md describes them.

From a file to rows::

    source                    # the option that names the source, and the function that returns it
    suffixes                  # the formats and the compressions of files, by suffix
    paths, contents           # the files that ``data.files`` names, and their true format
    remote                    # files at URLs, whose requests are repeated
    options, limits           # ``data.read``, ``splits`` and ``limit``; the memory that a file may take
    file, formats             # the base class of readers, and the format of each suffix
    csv, json, text, conll    # formats of lines, which ``lines`` opens
    parquet, arrow            # formats of columns
    features                  # the names of classes that the features of ``datasets`` define
    table, column             # the rows of one source in memory, or in a temporary file
    unreadable                # the rows of a source that cannot be read; samples: the plugin ``skip-unreadable``
    drop                      # rows that are left out
    held_out, split_rows      # rows held out for validation or drawn by a limit; the rows of a split
    message_roles             # roles of messages, such as ``user`` and ``assistant``
    index, order              # row groups of a stream, and the order of its rows
    content_hashes            # whether a file has changed, for caches
    kept_results              # entries of a cache for results that depend on files

The names of splits are in ``fastloop.splits``.
"""

from fastloop_plugins.rows.file import BadRow, Block, File
from fastloop_plugins.rows.lines import LineFormat
from fastloop_plugins.rows.options import Read

__all__ = ["BadRow", "Block", "File", "LineFormat", "Read"]
