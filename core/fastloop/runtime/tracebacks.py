"""Find the line of user code that raised an error, and show the part of a traceback that is user code."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

CORE = Path(__file__).parent.parent
STANDARD = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages. Packages in development are elsewhere, and count as user code."""
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
"""A frame of a worker's traceback, which is part of the error's message."""


def user_line(error: BaseException, ours: Iterable[type] = ()) -> str | None:
    """The line of user code that raised an error: ``file.py:12 in forward``. None: the error has another source.

    The innermost frame outside of libraries decides whether user code or fastloop raised the error.

    Args:
        ours: Classes of plugins, whose files and packages are not user code.
    """
    own = [CORE]
    for cls in ours:
        own += filter(None, map(_source, cls.__mro__))
    frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(str(error))]
    if not any(_within(Path(file), own) for file, _, _ in frames):
        return None
    for file, line, name in reversed(frames):
        if not _is_library(file):
            path = Path(file)
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return None if _within(path, own) else f"{shown}:{line} in {name}"
    return None


def user_traceback(error: BaseException) -> str:
    """The traceback of an error, from the first frame on that is neither fastloop's core nor Python's library. Empty if
    it has no such frame.

    For frames ``[lifecycle.py, loop.py, warmth.py, torch/functional.py]``, it has the last two.
    """
    shown = traceback.TracebackException.from_exception(error)
    for index, frame in enumerate(shown.stack):
        path = Path(frame.filename)
        is_python = _within(path, STANDARD) and not INSTALLED & set(path.parts)
        is_generated = frame.filename.startswith("<")
        if not is_python and not is_generated and not _within(path, [CORE]):
            shown.stack = traceback.StackSummary.from_list(shown.stack[index:])
            return "".join(shown.format())
    return ""


def _within(file: Path, paths: Iterable[Path]) -> bool:
    return any(file == path or path in file.parents for path in paths)


def _is_library(file: str) -> bool:
    """Whether a file belongs to Python or an installed package, or is generated."""
    if file.startswith("<"):
        return not file.startswith(("<stdin>", "<ipython"))
    path = Path(file)
    return (
        _within(path, STANDARD)
        or bool(INSTALLED & set(path.parts))
        or any("torchinductor" in part for part in path.parts)
    )


def _source(cls: type) -> Path | None:
    """The folder of a class's package, or the file of its module."""
    top = sys.modules.get(cls.__module__.partition(".")[0])
    file = getattr(top, "__file__", None)
    if hasattr(top, "__path__") and file:
        return Path(file).parent
    try:
        return Path(inspect.getfile(cls))
    except (TypeError, OSError):  # built in, or defined interactively
        return None
