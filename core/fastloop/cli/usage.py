"""Errors in a command line: an unknown option, a missing argument, a value of another type.

typer raises them as errors of click. Here they get a code, so they read like other errors, also with ``--json``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from fastloop.errors import UsageError, did_you_mean

CLICK = sys.modules[typer.BadParameter.__module__]
"""The errors of click. typer exports only one of them, and newer releases bring their own copy of click."""


@contextmanager
def usage_errors(context: Any = None) -> Iterator[None]:
    """Raise a ``UsageError`` instead of an error of click.

    The help that a command without arguments shows is an error of click, too. It stays as it is.

    Args:
        context: The context of the group of commands, for errors that have none; None: before there is one.
    """
    try:
        yield
    except CLICK.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # releases before 8.2 have no such class
            raise
        raise convert(error, name_command(error.ctx, context)) from None


def name_command(context: Any, group: Any) -> str:
    """The words of the command, such as ``fastloop new plugin``.

    Args:
        context: The context of the command, which some errors lack.
        group: The context of the group that calls it; None: an error in the arguments before the command.
    """
    if context is not None:
        return str(context.command_path)
    if group is None:
        return "fastloop"
    return f"{group.command_path} {group.invoked_subcommand}"


def convert(error: Any, command: str) -> UsageError:
    """An error of click as an error of fastloop, with the command as its place."""
    remedy = f"`{command} --help` lists its arguments and options."
    if isinstance(error, CLICK.NoSuchOption):
        suggestion = did_you_mean(error.option_name, options_of(error.ctx)) if error.ctx else ""
        return UsageError(
            f"there is no option {error.option_name}.",
            code="unknown-option",
            place=command,
            remedy=f"{suggestion} {remedy}",
        )
    if isinstance(error, CLICK.MissingParameter) and error.param is not None:
        text = f"the {error.param.param_type_name} {name_of(error.param)} is missing."
        return UsageError(text, code="missing-value", place=command, remedy=remedy)
    text = as_sentence(error.message)
    if isinstance(error, CLICK.BadParameter) and error.param is not None:
        return UsageError(text, code="invalid-value", place=f"{command}: {name_of(error.param)}", remedy=remedy)
    return UsageError(text, code="invalid-usage", place=command, remedy=remedy)


def options_of(context: Any) -> list[str]:
    """The long options of the command of a context."""
    options = []
    for parameter in context.command.params:
        for name in [*parameter.opts, *parameter.secondary_opts]:
            if name.startswith("--"):
                options.append(name)
    return options


def name_of(parameter: Any) -> str:
    """A parameter as the help shows it: ``RECIPE`` for an argument, ``--nproc`` for an option."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return str(parameter.opts[0])


def as_sentence(message: str) -> str:
    """A message of click behind a place: ``Missing command`` -> ``missing command.``"""
    return message[:1].lower() + message[1:].rstrip(".") + "."
