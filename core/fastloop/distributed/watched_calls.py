"""Calls into C++ that may block forever, such as those of torch's store. They run in a thread, so that the main thread
handles signals and can give up."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

Result = TypeVar("Result")

POLL_SECONDS = 0.1
"""Seconds between two checks of a call."""


def call_watched(function: Callable[[], Result], check: Callable[[], None]) -> Result:
    """Call a function in a thread, and return its result.

    Args:
        check: Called again and again meanwhile. If it raises, the thread is left behind: nothing can end it.
    """
    future = start_call(function)
    while not wait([future], POLL_SECONDS).done:
        check()
    return future.result()


def start_call(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a thread that does not keep the process alive."""
    future: Future[Result] = Future()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="fastloop-connection", daemon=True).start()
    return future
