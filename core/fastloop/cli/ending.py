"""The end of a command's process."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING, NoReturn

from fastloop.distributed.signals import exit_code

if TYPE_CHECKING:
    from fastloop.run import Run


def end_process_group(run: Run, code: int = 0) -> int:
    """End the process group of this process, and with it the process if it is one of several.

    Returns:
        The exit code: that of the signal that stopped the run, otherwise ``code``.
    """
    if run.interrupted:
        code = exit_code(run.interrupted)
    run.processes.barrier()  # launchers end the other processes when one exits with a code other than 0
    run.processes.close()
    if run.world_size > 1:
        leave(code)
    return code


def leave(code: int) -> NoReturn:
    """Exit without finalizing the interpreter, because threads of torch may abort the process then."""
    keep_operators()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_operators() -> None:
    """Let the operators that torch has registered end with this process.

    Otherwise, torch removes each of 200 libraries of operators at the exit, which takes 40 ms.
    """
    remove = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for finalizer, details in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if details.func is remove:
            finalizer.atexit = False
