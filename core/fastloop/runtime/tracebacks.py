"""Which line of the user's own code an error came out of."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

CORE = Path(__file__).parents[1]
STANDARD = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
INSTALLED = {"site-packages", "dist-packages"}
"""Folders that packages are installed into. Code of a package in development lies elsewhere, and counts as the user's."""
_IN_TEXT = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
"""A frame, as a worker process prints its traceback into the error's message."""


def user_line(error: BaseException, ours: Iterable[type] = ()) -> str | None:
    """Where in the user's code, called by ours, an error arose: ``file.py:12 in forward``. None: nowhere in it.

    The innermost frame that is in no library decides: it is the user's, or ours.

    Args:
        ours: Classes whose files, or packages, are not the user's: a plugin's.
    """
    own = [CORE, *filter(None, map(_home, (base for cls in ours for base in cls.__mro__)))]
    frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(found["file"], int(found["line"]), found["name"]) for found in _IN_TEXT.finditer(str(error))]
    if not any(_within(Path(file), own) for file, _, _ in frames):
        return None
    for file, line, name in reversed(frames):
        if not _is_library(file):
            path = Path(file)
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return None if _within(path, own) else f"{shown}:{line} in {name}"
    return None


def _within(file: Path, places: Iterable[Path]) -> bool:
    return any(file == place or place in file.parents for place in places)


def _is_library(file: str) -> bool:
    """Whether a file is of Python, of an installed package, or generated."""
    if file.startswith("<"):
        return not file.startswith(("<stdin>", "<ipython"))
    path = Path(file)
    return _within(path, STANDARD) or bool(INSTALLED & set(path.parts)) or any("torchinductor" in part for part in path.parts)


def _home(cls: type) -> Path | None:
    """The folder of a class's package, or its file where that is a module by itself."""
    top = sys.modules.get(cls.__module__.partition(".")[0])
    if hasattr(top, "__path__") and (file := getattr(top, "__file__", None)):
        return Path(file).parent
    try:
        return Path(inspect.getfile(cls))
    except (TypeError, OSError):  # built in, or typed in
        return None
