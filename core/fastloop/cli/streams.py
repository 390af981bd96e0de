"""The standard streams of a command: closed ones, a reader that left, full disks, an encoding without characters."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Output(io.FileIO):
    """A standard stream that discards what follows an error.

    Args:
        raises: Whether an error is raised once. One of a reader that has left (``fastloop plugins | head -1``) never
            is.
    """

    def __init__(self, number: int, raises: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.raises = raises
        self.discards = False

    def write(self, data: Any) -> int:
        """Write, and return the number of bytes.

        Raises:
            OSError: The stream cannot be written; later writes are discarded.
        """
        try:
            return super().write(data)
        except OSError as error:
            self.discards = True
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.raises and not isinstance(error, BrokenPipeError):
                raise OSError(error.errno, error.strerror, "the standard output") from None
            return len(data)


def secure_streams(is_log: bool) -> None:
    """Open closed streams (``>&-``) on the null device, and make the others accept every character, also after their
    reader has left.

    A closed stream's number would go to the next file that is opened, and libraries would write their messages into
    that file.

    Args:
        is_log: Whether the standard output is a log, as in ``fastloop train``: the run folder has it, too, and the
            command continues if it cannot be written. Otherwise it is the result, and the command fails.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the stream's own
            os.set_inheritable(null, True)
            # open until the process ends
            setattr(sys, name, open(null, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif number and type(stream) is io.TextIOWrapper:
            stream.flush()
            buffer = io.BufferedWriter(_Output(stream.fileno(), raises=name == "stdout" and not is_log))
            text = io.TextIOWrapper(
                buffer, stream.encoding, "backslashreplace", None, stream.line_buffering, stream.write_through
            )
            setattr(sys, name, text)


def has_reader() -> bool:
    """Whether what is written to the standard output still arrives, so that a command may stop when its reader has
    left."""
    return not getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "discards", False)
