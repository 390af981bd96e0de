"""Renders a chat template of others safely: its errors name the row, and its code ends after a time.

jinja's sandbox forbids access to Python's objects. It limits no time: a loop in a template may take hours.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastloop_plugins.rows.table import RowError

FAILURES = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)
"""Errors of Python that a template may raise, beside those of jinja."""
SECONDS = 120.0
"""Seconds that one conversation may take: a long one takes a few."""


class TimeIsUp(Exception):
    """Ends the code of a thread that runs for too long."""


@contextmanager
def limited_rendering(hint: str = "") -> Iterator[None]:
    """Raise errors of a template as a ``RowError``, and end its Python code after ``SECONDS``, in any thread.

    A call of compiled code ends first.

    Args:
        hint: A remedy, in case the template rejects the conversation.
    """
    import jinja2

    seconds = SECONDS
    try:
        with _interrupted_after(seconds):
            yield
    except RowError:
        raise
    except TimeIsUp:
        raise RowError(
            f"the chat template took more than {seconds:g} seconds for this conversation, expected a part of one. Give "
            "another template: data.chat_template=FILE."
        ) from None
    except (jinja2.TemplateError, *FAILURES) as error:
        problem = f"the chat template rejects the conversation: {error or type(error).__name__}."
        raise RowError(f"{problem} {hint}".rstrip()) from None


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise ``TimeIsUp`` in this thread if the block takes longer, and never after the block."""
    thread = threading.get_ident()
    lock = threading.Lock()
    is_over = False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsUp))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()
