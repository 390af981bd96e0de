"""The script that trains, which the processes that it spawns import."""

from __future__ import annotations

import multiprocessing
import os
import sys

EXIT_IMPORTED = 78
"""Exit code of a process that would have trained while it imported the script of its parent."""
ADVICE = (
    "A process that is started by spawn or forkserver imports the script that started it, so the script must not train "
    'when it is imported. Put its code that trains under: if __name__ == "__main__":'
)


def stop_in_spawned_process() -> None:
    """End this process, if it was spawned and still imports the script of its parent.

    Otherwise it would train a second time, in the same run folder. Its parent explains the exit code.
    """
    process = multiprocessing.current_process()
    # private: multiprocessing sets it during the import, and refuses to start a process then
    if getattr(process, "_inheriting", False):
        print(f"{process.name}: {ADVICE}", file=sys.stderr, flush=True)
        os._exit(EXIT_IMPORTED)  # the fork server gives another code to SystemExit
