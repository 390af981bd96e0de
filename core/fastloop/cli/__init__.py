"""The command line, with one file per command. Only commands that need torch import it."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Annotated

import typer

from fastloop.cli import completion, doctor, launch, plan, plugins, recipes, schema, train
from fastloop.cli.commands import Commands
from fastloop.cli.messages import documentation, unreadable_package
from fastloop.cli.streams import secure_streams
from fastloop.distributed import ranks, signals
from fastloop.errors import DataError, FastloopError, PluginCrash, ProcessLost, UsageError, UserCodeError
from fastloop.recipe import secrets

ERROR_DELAY = 5.0
"""Seconds to wait before reporting an error that another process probably reports first."""

INSPECTING = ("doctor", "plugins", "recipes", "schema")
"""Commands that only show what is installed. Packages with a device for torch are not imported for them."""

app = typer.Typer(
    name="fastloop",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
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
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
    install_completion: Annotated[
        bool,
        typer.Option(
            "--install-completion",
            callback=completion.install,
            is_eager=True,
            help="Write the completion of commands, options and names for your shell (bash, zsh, fish).",
        ),
    ] = False,
) -> None:
    """List plugins in a recipe, and get the fastest correct training your hardware can do."""


for module in (train, plan, plugins, recipes, schema, doctor):
    name = module.__name__.rpartition(".")[2]
    app.command(name)(getattr(module, name))


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 the run failed, 2 usage error, 75 stopped by a signal, 130
    interrupted."""
    arguments = train.with_resume_value(sys.argv[1:])
    if "torch" not in sys.modules and arguments and arguments[0] in INSPECTING:
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        try:
            app(arguments)
        finally:
            sys.stdout.flush()
    except FastloopError as error:
        if isinstance(error, ProcessLost) or (ranks.rank() and isinstance(error, UsageError)):
            # another process failed first or reports the same error, and its exit ends this process
            time.sleep(ERROR_DELAY)
        if isinstance(error, PluginCrash | UserCodeError | DataError) and error.__cause__ is not None:
            print(secrets.hide("".join(traceback.format_exception(error.__cause__))), end="", file=sys.stderr)
        hint = " Its output has the reason. Continue with --resume." if isinstance(error, ProcessLost) else ""
        print(f"error: {secrets.hide(str(error))}{hint}", file=sys.stderr)
        if sys.stderr.isatty() and (page := documentation(str(error))):
            print(f"docs: {page}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:
            raise
        # not of a plugin: those are explained
        print(f"error: {secrets.hide(str(error.filename))}: {error.strerror}.", file=sys.stderr)
        sys.exit(1)
    except (TypeError, ValueError):
        if (problem := unreadable_package()) is None:
            raise
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    except signals.Stopped as stop:
        if ranks.rank() == 0:
            print(f"stopped by {stop}", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        if ranks.rank() == 0:
            print("interrupted", file=sys.stderr)
        sys.exit(signals.EXIT_INTERRUPTED)


def process() -> None:
    """Run ``main`` as the entry point of a process. If torch is imported, exit with ``launch.leave``, so that torch
    does not abort."""
    code = 0
    secure_streams(is_log=sys.argv[1:2] == ["train"])
    try:
        main()
    except SystemExit as stop:
        if "torch" not in sys.modules or not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    except Exception:  # a bug in fastloop
        if "torch" not in sys.modules:
            raise
        print(secrets.hide(traceback.format_exc()), end="", file=sys.stderr)
        code = 1
    if ranks.world_size() == 1:  # with more processes, a thread may wait for another process
        threading._shutdown()  # type: ignore[attr-defined] # join non-daemon threads
    launch.leave(code)
