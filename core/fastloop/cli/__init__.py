"""The command line. Only commands that need torch import it.

One file a command: ``train``, ``plugins``, ``recipes``, ``schema``, ``doctor``. The other commands, such as ``export``,
are in ``fastloop_tools``, one folder each. The files around them::

    commands              # finds and loads commands: those here, of ``fastloop_tools``, and of other packages
    arguments             # arguments that several commands have
    launch                # starts the processes of ``--nproc``
    startup, ending       # the start of a process until its run is open, and its end
    messages              # the log of the main process; prints the error that ends a command, and exits with its code
    streams               # standard streams that are closed or full, or whose reader left
    usage                 # errors in the command line: unknown options, missing arguments
    summary, hook_timing  # tables at the end of a run
    tables                # prints tables and pages: in the width of a terminal, unwrapped into a pipe
    quick_checks          # ``--fast-dev-run`` and ``--overfit``
    recipe_schema         # the JSON Schema of recipes
    option_table          # the options of a plugin, for `plugins` and the docs
    numerics              # compares losses, to verify a numerics class
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from fastloop.cli.commands import Commands
from fastloop.cli.streams import secure_streams
from fastloop.runtime.delayed_imports import delay_imports

INSPECTING = ("doctor", "plugins", "recipes", "schema")
"""Commands that only show what is installed. Packages with a device for torch are not imported for them."""

app = typer.Typer(
    name="fastloop",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Rich reads "[default: ...]" in a help text as markup, and its panels leave little room for the text
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(requested: bool) -> None:
    """Print the version and exit."""
    if requested:
        from fastloop import __version__

        typer.echo(f"fastloop {__version__}")
        raise typer.Exit


@app.callback()
def options(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",  # `main` applies it before typer reads the command line
            help="Before the command: report errors and warnings as JSON on stderr, one a line, with code, place and "
            "remedy.",
        ),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """List plugins in a recipe, and get the fastest correct training your hardware can do."""


def command_of(arguments: list[str]) -> str | None:
    """The name of the command, which may follow the option ``--json``."""
    words = arguments[1:] if arguments[:1] == ["--json"] else arguments
    return words[0] if words else None


def wants_json(arguments: list[str]) -> bool:
    """Whether the option ``--json`` stands before the command."""
    for argument in arguments:
        if argument == "--json":
            return True
        if not argument.startswith("-"):
            return False
    return False


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 the run failed, 2 usage error, 75 stopped by a signal, 130
    interrupted."""
    arguments = sys.argv[1:]
    if os.environ.get("COLUMNS") == "0":  # of a terminal without a size: Rich would print tables of empty lines
        del os.environ["COLUMNS"]
    if wants_json(arguments):
        from fastloop.cli.messages import report_as_json

        report_as_json()
    command = command_of(arguments)
    if command == "train":
        from fastloop.cli.train import with_resume_value

        arguments = with_resume_value(arguments)
    if "torch" not in sys.modules and command in INSPECTING:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        try:
            if command is None or not command.startswith("-"):  # --version and --help read no file
                _check_current_folder()
                _check_docstrings()
            app(arguments)
        finally:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if type(error) is SystemExit:  # of typer, after a help, for example
            raise
        from fastloop.cli.messages import exit_with

        exit_with(error)


def _check_current_folder() -> None:
    """Refuse a current folder that was removed: libraries of torch end the process while they are loaded in it.

    Raises:
        UsageError: The folder was removed.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        from fastloop.errors import UsageError

        raise UsageError(
            "the current folder was removed.", code="no-current-folder", remedy="Go to another folder with `cd`."
        ) from None


def _check_docstrings() -> None:
    """Refuse ``python -OO``: plugins have their descriptions in docstrings, and transformers its arguments.

    Raises:
        UsageError: Python has removed the docstrings.
    """
    if sys.flags.optimize > 1:
        from fastloop.errors import UsageError

        raise UsageError(
            "Python has removed all docstrings, which transformers and descriptions of plugins need.",
            code="no-docstrings",
            remedy="Start Python without -OO and without PYTHONOPTIMIZE=2.",
        )


def process() -> None:
    """Run ``main`` as the entry point of a process. If torch is imported, exit with ``ending.leave``, so that torch
    does not abort."""
    code = 0
    delay_imports()
    secure_streams(is_log=command_of(sys.argv[1:]) == "train")
    try:
        main()
    except SystemExit as stop:
        if "torch" not in sys.modules or not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    except Exception:  # a bug in fastloop
        if "torch" not in sys.modules:
            raise
        import traceback

        from fastloop.recipe import secrets

        print(secrets.hide(traceback.format_exc()), end="", file=sys.stderr)
        code = 1
    from fastloop.cli import ending
    from fastloop.distributed import ranks

    if ranks.world_size() == 1:  # with more processes, a thread may wait for another process
        threading._shutdown()  # type: ignore[attr-defined] # join non-daemon threads
    ending.leave(code)
