"""A limit of time for a template from others, which may loop for hours."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastloop import RecipeError

SECONDS = 120.0
"""Seconds that one conversation may take: a long one takes a few."""


class TimeIsUp(Exception):
    """Ends the code of a thread that runs for too long."""


@contextmanager
def limit_time(where: Callable[[], str]) -> Iterator[None]:
    """End the Python code of this context after ``SECONDS``, in any thread. A call of compiled code ends first.

    Args:
        where: Returns the name of the row in messages.

    Raises:
        RecipeError: The code took longer.
    """
    thread, lock, seconds = threading.get_ident(), threading.Lock(), SECONDS
    is_over = False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsUp))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                is_over = True
            timer.cancel()
    except TimeIsUp:
        raise RecipeError(
            f"{where()}: the chat template took more than {seconds:g} seconds for this conversation, expected a part "
            "of one. Give another template: data.chat_template=FILE."
        ) from None
