"""The errors that users see.

A message states the place of the problem (file, key or plugin), the found and the expected value, and the remedy. These
are the fields of a ``Problem``, which makes the text::

    raise RecipeError(
        code="wrong-type",
        place=f"{where}: output",
        found=repr(output),
        expected="the path of a folder",
        remedy="Leave it out, or give `output=runs/a`.",
    )
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from fastloop.problem import Fields, Problem, with_remedy

if TYPE_CHECKING:
    from fastloop.state import Output


class FastloopError(Exception):
    """The run cannot continue. ``exit_code`` is the exit code of the command line.

    Args:
        text: Whole sentences, or the whole message of an error without other fields.
        fields: See ``Problem``: ``code``, ``place``, ``found``, ``expected`` and ``remedy``. Without ``code``, the
            error has that of its class.

    Attributes:
        problem: The fields. ``str(error)`` is their text.
    """

    exit_code = 1
    code: ClassVar[str] = "run-failed"
    """The code of errors that are raised without one."""

    def __init__(self, text: str = "", **fields: Unpack[Fields]) -> None:
        fields["code"] = fields.get("code") or self.code
        self.problem = Problem(text, **fields)
        super().__init__(str(self.problem))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all attributes, whatever arguments a class takes: an error crosses processes with its fields."""
        return _unpickled, (type(self), self.args, vars(self))


def _unpickled(cls: type[FastloopError], args: tuple[Any, ...], attributes: dict[str, Any]) -> FastloopError:
    """An error from another process."""
    error = cls.__new__(cls, *args)
    vars(error).update(attributes)
    return error


def add_remedy(error: FastloopError, remedy: str) -> None:
    """Add sentences to the remedy and the message of an error: of what its caller knows."""
    error.problem = with_remedy(error.problem, remedy)
    error.args = (str(error.problem),)


class UsageError(FastloopError):
    """A recipe, plugin, option or path is wrong. Raised before training starts."""

    exit_code = 2
    code = "invalid-usage"


class RecipeError(UsageError):
    """A recipe or an override is invalid."""

    code = "invalid-recipe"


class PluginError(UsageError):
    """A plugin is missing, has an invalid declaration, or does not work with the rest of the recipe."""

    code = "invalid-plugin"


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, or belongs to another run."""

    code = "invalid-checkpoint"


class NoCheckpoint(CheckpointError):
    """The path holds no checkpoint, not even a damaged one."""

    code = "no-checkpoint"


class SaveError(FastloopError):
    """A file could not be written (full disk, quota, read-only folder). Earlier files are intact."""

    code = "save-failed"


class DataError(FastloopError):
    """A batch could not be read. ``__cause__`` is the exception of the dataset, the collator or a worker."""

    code = "reading-failed"


class ProcessLost(FastloopError):
    """The connection to another process of the run broke. The log of that process has the reason."""

    code = "process-lost"


class ProcessesDisagree(UsageError):
    """The processes of a run differ in a fact that must be the same on each, such as the samples that they read. Raised
    on every process."""

    code = "processes-disagree"


class MetricError(UsageError):
    """A metric failed in an evaluation, or its value is not one number. ``__cause__`` is the metric's exception, if it
    raised one.

    Attributes:
        output: The newest batch's ``Output``; None: the evaluation had no batch.
        values: Name -> value of each metric, if one of them is not a number; otherwise empty.
    """

    code = "metric-failed"

    def __init__(self, text: str, output: Output | None, values: Mapping[str, Any], **fields: Unpack[Fields]) -> None:
        super().__init__(text, **fields)
        self.output = output
        self.values = values


class PluginCrash(FastloopError):
    """A plugin's hook raised. Names the plugin, its distribution and the hook; ``__cause__`` is the exception.

    Attributes:
        plugin: The plugin's name.
    """

    code = "plugin-crashed"

    def __init__(self, text: str, plugin: str = "", **fields: Unpack[Fields]) -> None:
        super().__init__(text, **fields)
        self.plugin = plugin


class UserCodeError(FastloopError):
    """User code raised: a model, loss, metric or dataset. Names the file and line; ``__cause__`` is the exception."""

    code = "user-code-failed"


def causes(error: BaseException, implicit: bool = False) -> Iterator[BaseException]:
    """Yield an error, the ``__cause__`` of it, that of the cause, and so on to the first one.

    Args:
        implicit: Whether an error that was raised while another one was handled has that as its cause, unless ``from``
            names one.
    """
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        context = cause.__context__ if implicit and not cause.__suppress_context__ else None
        cause = context if cause.__cause__ is None else cause.__cause__


def first_cause(error: BaseException) -> BaseException:
    """The last error of ``causes``."""
    *_, first = causes(error)
    return first


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A suggestion such as ``" Did you mean 'lr'?"``. Without a close match: all choices if there are at most 24, else
    an empty string."""
    choices = sorted(choices)
    close_match = find_close_match(name, choices)
    if close_match is not None:
        return f" Did you mean {close_match!r}?"
    return f" Expected one of: {', '.join(choices)}." if 0 < len(choices) <= 24 else ""


def find_close_match(name: str, choices: Iterable[str], similarity: float = 0.6) -> str | None:
    """The choice that is most similar to a name; None: none is.

    Args:
        similarity: The least similarity of a match: difflib's ratio, in [0, 1], of 1 for equal names.
    """
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=similarity)
    return matches[0] if matches else None
