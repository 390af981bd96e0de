"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop import no_code

if TYPE_CHECKING:
    from fastloop.recipe import Recipe


def _recipe_names(incomplete: str) -> list[str]:
    """The shipped recipes that begin with ``incomplete``, for the completion of a shell. If there is none, it offers
    files."""
    from fastloop.recipe import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def _plugin_names(incomplete: str) -> list[str]:
    """Continuations of a list of installed plugins such as ``amp,em``, for the completion of a shell."""
    from fastloop.plugins.installed import installed

    complete, comma, last = incomplete.rpartition(",")
    return [complete + comma + name for name in installed() if name.startswith(last)]


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or the name of a shipped one (`fastloop recipes`).",
        autocompletion=_recipe_names,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as train.lr=1e-4 or plugins.amp.dtype=fp16."),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="A,B", help="Plugins to add. May be repeated.", autocompletion=_plugin_names),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="A,B",
        help="Plugins to leave out, default ones included. May be repeated.",
        autocompletion=_plugin_names,
    ),
]


def _forbid_code(context: typer.Context, is_given: bool) -> bool:
    """Refuse code of recipes until the command ends."""
    if is_given and not context.resilient_parsing:
        context.with_resource(no_code.forbidding())
    return is_given


NoCode = Annotated[
    bool,
    typer.Option(
        no_code.OPTION,
        callback=_forbid_code,
        help="Refuse a recipe that runs code of its own, and name each plugin of another package that runs.",
    ),
]
"""The option ``--no-code``. A command only declares it: it applies to all code that a recipe names."""


def names(listed: str | Sequence[str] | None) -> list[str]:
    """Split ``"a, b"`` into ``["a", "b"]``. A repeated option gives the names of all values, in order and without
    duplicates."""
    texts = [listed] if isinstance(listed, str) else listed or ()
    unique: dict[str, None] = {}  # in order
    for text in texts:
        for name in text.split(","):
            if name.strip():
                unique[name.strip()] = None
    return list(unique)


@dataclass(frozen=True)
class RecipeArguments:
    """The arguments of a command that name a recipe and change it.

    Attributes:
        recipe: The recipe's file or name.
        overrides: KEY=VALUE.
        with_plugins: Plugins of ``--with``.
        without_plugins: Plugins of ``--without``.
    """

    recipe: str
    overrides: Sequence[str] = ()
    with_plugins: Sequence[str] = ()
    without_plugins: Sequence[str] = ()

    @classmethod
    def read(
        cls, recipe: str, overrides: list[str] | None, with_: list[str] | None, without: list[str] | None
    ) -> RecipeArguments:
        """The arguments as typer gives them."""
        return cls(recipe, list(overrides or ()), names(with_), names(without))

    def load(self) -> Recipe:
        """The recipe with these changes.

        Raises:
            UsageError: See ``load_recipe``.
        """
        from fastloop.recipe import load_recipe

        return load_recipe(self.recipe, self.overrides, self.with_plugins, self.without_plugins)

    def words(self) -> list[str]:
        """The arguments as words of a command line."""
        return [self.recipe, *self.overrides, *self.plugin_words()]

    def plugin_words(self) -> list[str]:
        """``--with``, ``--without`` and ``--no-code`` as words of a command line."""
        words = []
        if self.with_plugins:
            words += ["--with", ",".join(self.with_plugins)]
        if self.without_plugins:
            words += ["--without", ",".join(self.without_plugins)]
        return words + no_code.words()


def choice(option: str, values: Sequence[str], help: str) -> Any:
    """An option that accepts only ``values``. The error for another value names the option and suggests a value."""

    def parse(text: str) -> str:
        from fastloop.errors import UsageError, did_you_mean

        if text not in values:
            suggestion = did_you_mean(text, values).partition(" Expected")[0]
            raise UsageError(
                f"found {text!r}, expected one of: {', '.join(values)}.",
                code="unknown-choice",
                place=option,
                remedy=suggestion,
            )
        return text

    return typer.Option(option, parser=parse, metavar="|".join(values), help=help)


def output_file(option: str, help: str, kind: type = str, stdout: bool = False) -> Any:
    """An option for a file to write, checked before the command begins. Empty: no file.

    Args:
        kind: Type of the value: str or Path.
        stdout: Whether ``-`` stands for stdout. The help text then has a note of it.
    """

    def parse(text: str) -> Any:
        means_stdout = text == "-" and stdout
        if text and not means_stdout:
            check_output_file(option, text, stdout)
        return kind(text)

    if stdout:
        help += " -: stdout."
    return typer.Option(option, parser=parse, metavar="FILE", help=help)


def check_output_file(option: str, text: str, stdout: bool = False) -> None:
    """Check that a file can be written, before a command begins.

    Args:
        option: The option that names it, for messages.
        text: Its path.
        stdout: Whether ``-`` stands for stdout.

    Raises:
        UsageError: It cannot be written, or is no file.
        SaveError: The disk is full.
    """
    import tempfile
    from pathlib import Path

    from fastloop.errors import UsageError
    from fastloop.runtime.files import refuse_full_disk

    path = Path(text)
    if text == "-":
        raise UsageError(f"{option} -: this command writes to a file only.", code="no-stdout", remedy="Name one.")
    try:
        if path.is_dir():
            raise UsageError(code="not-a-file", place=f"{option} {text}", found="a folder", expected="a file")
        folder = path.parent.resolve()
        is_system_folder = folder == Path("/dev") or str(folder).startswith(("/proc/", "/sys/"))
        # /dev/stdout may lead to a file, and would be replaced itself
        if is_system_folder or (path.exists() and not path.is_file()):
            raise UsageError(
                "found a device, pipe or socket, expected a file.",
                code="not-a-file",
                place=f"{option} {text}",
                remedy="For stdout, give -." if stdout else "Write a file, and copy it from there.",
            )
        if not path.parent.is_dir():
            raise UsageError(code="folder-missing", place=f"{option} {text}", expected="a file in an existing folder")
        # permission bits are not enough: a file system may be read-only
        tempfile.TemporaryFile(dir=path.parent).close()
    except (OSError, ValueError) as error:  # a ValueError: a null byte
        refuse_full_disk(error, path)
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot be written: {why}.",
            code="file-not-writable",
            place=f"{option} {text[:100]}",
            remedy="Give another file.",
        ) from None


ACCEPTED = "bitwise,reassociated,reduced-precision"
"""Numerics classes that `bench --select` accepts by default."""


def numerics_classes(listed: str) -> list[str]:
    """Parse a list of numerics classes.

    Raises:
        UsageError: The list is empty, or a class does not exist.
    """
    from typing import get_args

    from fastloop.errors import UsageError, did_you_mean
    from fastloop.plugins.plugin import Numerics

    if not names(listed):
        raise UsageError(
            "names no numerics class.",
            code="missing-value",
            place="--accept",
            expected=f"some of: {', '.join(get_args(Numerics))}",
        )
    for name in names(listed):
        if name not in get_args(Numerics):
            raise UsageError(
                f"there is no numerics class {name!r}.",
                code="unknown-choice",
                place="--accept",
                remedy=did_you_mean(name, get_args(Numerics)),
            )
    return names(listed)
