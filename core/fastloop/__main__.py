"""``python -m fastloop`` is the command line."""

from fastloop.cli import main

main()
