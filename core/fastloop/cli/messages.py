"""Messages on the console: the log of ``fastloop``, and the error that ends a command."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NoReturn

from fastloop.distributed import ranks, signals
from fastloop.errors import DataError, FastloopError, PluginCrash, ProcessLost, UsageError, UserCodeError
from fastloop.plugins.packages import DISTRIBUTION
from fastloop.problem import Problem, clause, with_remedy
from fastloop.recipe import secrets
from fastloop.runtime.files import CLOSE_FILES, TOO_MANY_FILES, full_disk, reached_open_files

SUBJECT = re.compile(
    r"\b(?:(data|model|train)(?:\.(?!(?:csv|tsv|jsonl?|parquet|tar|txt|yaml|py)\b)\w|:)|(plugins?|slot|optimizer|Trainer)\b)"
)
"""The part of a recipe, or of fastloop, that an error is about. Names of files do not count."""
PAGES = {
    "data": "checks/data.md",
    "model": "checks/tasks.md",
    "train": "recipe.md",
    "plugins": "checks/plugins.md",
    "plugin": "checks/plugins.md",
    "slot": "checks/plugins.md",
    "optimizer": "checks/parameters.md",
    "Trainer": "checks/python.md",
}
"""Subject -> the page of docs/ that explains what is checked."""

UNDECODED = re.compile("[\udc80-\udcff]")
"""A byte of a command line that Python could not decode."""
USE_UTF8 = (
    "Python's encoding of file names here is not UTF-8: set the environment variable PYTHONUTF8=1, or a locale such as "
    "LC_ALL=C.UTF-8."
)
"""The remedy for paths with characters that the encoding of file names lacks."""

JSON_VARIABLE = "FASTLOOP_JSON"
"""Environment variable: 1 in the processes of `fastloop --json COMMAND`."""
ERROR_DELAY = 5.0
"""Seconds to wait before reporting an error that another process probably reports first."""


def documentation(message: str) -> str | None:
    """The address of the page on the first subject of an error message; None: there is no page on it.

    It is below the documentation's address in the package's metadata, or else in docs/ of the repository.
    """
    subject = SUBJECT.search(message)
    if subject is None:
        return None
    urls = importlib.metadata.metadata(DISTRIBUTION).get_all("Project-URL") or ()
    start = next((url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")), "docs/index.md")
    return start.removesuffix("index.md") + PAGES[subject[1] or subject[2]]


class Messages(logging.Handler):
    """Prints to rich's console, above a live display."""

    def format(self, record: logging.LogRecord) -> str:
        """The message and its traceback, without secrets."""
        return secrets.hide(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message. Warnings have a prefix."""
        import rich

        if record.levelno >= logging.WARNING and reports_json():
            problem = record.msg if isinstance(record.msg, Problem) else Problem(record.getMessage(), code="warning")
            print_json("warning", problem)
            return
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        text = prefix + self.format(record)
        if isinstance(record.msg, Problem):
            text = with_code(text, record.msg)
        rich.get_console().print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


class FirstOfEachText(logging.Filter):
    """Lets the first message of each text pass, and drops those that repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text in self._texts:
            return False
        self._texts.add(text)
        return True


class OfWarnings(logging.Filter):
    """Lets warnings and errors pass, and drops other messages."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


class OfMissingProcess(logging.Filter):
    """Lets the warning pass that another process is missing, and drops other messages."""

    def filter(self, record: logging.LogRecord) -> bool:
        return isinstance(record.msg, Problem) and record.msg.code == "process-missing"


@contextmanager
def filtered_messages(messages_filter: logging.Filter) -> Iterator[None]:
    """Show only the messages that a filter lets pass."""
    handlers = [handler for handler in logging.getLogger("fastloop").handlers if isinstance(handler, Messages)]
    for handler in handlers:
        handler.addFilter(messages_filter)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(messages_filter)


def without_repeated_messages() -> AbstractContextManager[None]:
    """Show each message once, in a command that builds the same run again."""
    return filtered_messages(FirstOfEachText())


def only_warnings() -> AbstractContextManager[None]:
    """Show warnings alone, in a command that builds the run of a training without training it."""
    return filtered_messages(OfWarnings())


def report_as_json() -> None:
    """From now on, this process and those that it starts report errors and warnings as JSON."""
    os.environ[JSON_VARIABLE] = "1"


def reports_json() -> bool:
    """Whether this process reports errors and warnings as JSON."""
    return os.environ.get(JSON_VARIABLE) == "1"


def print_json(level: Literal["error", "warning"], problem: Problem) -> None:
    """Print the fields of an error or a warning to stderr, as one line of JSON, without secrets."""
    print(secrets.hide(json.dumps({"level": level} | problem.to_json())), file=sys.stderr, flush=True)


def with_code(text: str, problem: Problem) -> str:
    """A text with the code of its problem. A command at its end stays alone on its line, so that it can be copied."""
    if not problem.code:
        return text
    separator = "\n" if problem.command else " "
    return f"{text}{separator}[{problem.code}]"


def print_error(problem: Problem) -> None:
    """Print an error to stderr, without secrets: ``error: TEXT [CODE]``, or as JSON."""
    if reports_json():
        print_json("error", problem)
        return
    print(with_code(f"error: {secrets.hide(str(problem))}", problem), file=sys.stderr)
    if sys.stderr.isatty():
        page = documentation(str(problem))
        if page:
            print(f"docs: {page}", file=sys.stderr)


def show_messages() -> None:
    """Show log messages from now on. With several processes, only the main process shows them; the others only report
    that it is missing. Repeated calls have no effect."""
    logger = logging.getLogger("fastloop")
    if not any(isinstance(handler, Messages) for handler in logger.handlers):
        handler = Messages()
        if ranks.rank():
            handler.addFilter(OfMissingProcess())
        logger.addHandler(handler)
    if not ranks.rank():
        logger.setLevel(logging.INFO)
    logger.propagate = False


def unreadable_package() -> Problem | None:
    """The problem of an installed package whose metadata Python cannot read, or None. Python, torch and transformers
    fail on it."""
    for distribution in importlib.metadata.distributions():
        try:
            _ = distribution.metadata, distribution.entry_points
        except (TypeError, ValueError) as error:
            folder = getattr(distribution, "_path", "?")
            return Problem(
                f"the metadata of this package cannot be read: {clause(error)}.",
                code="broken-package",
                place=str(folder),
                remedy="Install the package again, or remove this folder.",
            )
    return None


def has_undecoded_path(problem: Problem) -> bool:
    """Whether a problem is about a path that Python cannot encode or has decoded wrongly, because its encoding of file
    names is not UTF-8."""
    text = str(problem)
    if sys.getfilesystemencoding() == "utf-8" or text.isascii():
        return False
    in_override = problem.code == "invalid-yaml" and UNDECODED.search(text) is not None
    return in_override or problem.code.startswith(("file-", "folder-", "not-a-"))


def exit_with(error: BaseException) -> NoReturn:
    """Report an error that ended a command, and exit with its code. Raises an error that is a bug."""
    is_limited = reached_open_files(error)
    if is_limited and not isinstance(error, PluginCrash | UserCodeError | DataError):
        print_error(TOO_MANY_FILES)
        sys.exit(1)
    if isinstance(error, FastloopError):
        if isinstance(error, ProcessLost) or (ranks.rank() and isinstance(error, UsageError)):
            # another process failed first or reports the same error, and its exit ends this process
            time.sleep(ERROR_DELAY)
        if isinstance(error, PluginCrash | UserCodeError | DataError) and error.__cause__ is not None:
            print(secrets.hide("".join(traceback.format_exception(error.__cause__))), end="", file=sys.stderr)
        problem = error.problem
        if is_limited:
            problem = with_remedy(problem, CLOSE_FILES)
        if has_undecoded_path(problem):
            problem = with_remedy(problem, USE_UTF8)
        print_error(problem)
        sys.exit(error.exit_code)
    if isinstance(error, OSError):  # not of a plugin: those are explained
        full = full_disk(error)
        if full is not None:
            print_error(full.problem)
            sys.exit(full.exit_code)
        if error.filename is not None:
            print_error(Problem(f"{error.strerror or clause(error)}.", code="file-failed", place=str(error.filename)))
            sys.exit(1)
    if isinstance(error, TypeError | ValueError):
        package = unreadable_package()
        if package is not None:
            print_error(package)
            sys.exit(UsageError.exit_code)
    if isinstance(error, KeyboardInterrupt | signals.StoppedAtOnce) and ranks.rank() == 0:
        print(f"stopped by {error}" if isinstance(error, signals.StoppedAtOnce) else "interrupted", file=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        sys.exit(signals.EXIT_INTERRUPTED)
    raise error
