"""Completion for bash, zsh and fish: ``fastloop --install-completion`` writes a script that starts no Python.

The script holds the commands, their options, the shipped recipes and the installed plugins, as they are when it is
written. Write it again after you install plugins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from fastloop.errors import UsageError

HOME_FILES = {
    "bash": (("XDG_DATA_HOME", ".local/share"), "bash-completion/completions/fastloop"),
    "zsh": (("ZDOTDIR", ""), ".zfunc/_fastloop"),
    "fish": (("XDG_CONFIG_HOME", ".config"), "fish/completions/fastloop.fish"),
}
"""Shell -> the variable of its folder and that folder within the home folder, and the file. bash (with the package
bash-completion) and fish read theirs without configuration."""

BEFORE_PLUGINS = ("--with", "--without")
"""Options whose value is a list of plugins."""


def install() -> None:
    """Write the script of the user's shell, print its path, and exit."""
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in HOME_FILES:
        raise UsageError(
            f"--install-completion: found SHELL={os.environ.get('SHELL', '')!r}. Expected bash, zsh or fish: set SHELL."
        )
    (variable, folder), file = HOME_FILES[shell]
    path = Path(os.environ.get(variable) or Path.home() / folder, file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script(shell), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--install-completion: {path} cannot be written: {error.strerror}.") from None
    typer.echo(f"wrote {path}")
    if shell == "zsh":
        typer.echo(f"In .zshrc, before compinit: fpath=({path.parent} $fpath)")
    raise typer.Exit


def script(shell: str) -> str:
    """The script of a shell."""
    from fastloop.plugins.installed import installed
    from fastloop.recipe import shipped_recipes

    commands = {name: words(command) for name, command in leaves()}
    recipes = list(shipped_recipes())
    for name, command in leaves():
        if any(parameter.metavar == "RECIPE" for parameter in command.params):
            commands[name] = [*commands[name], *recipes]
    commands["recipes"] = [*commands["recipes"], *recipes]
    commands["plugins"] = [*commands["plugins"], *installed()]
    made: str = WRITERS[shell](commands, list(installed()))
    return made


def leaves() -> list[tuple[str, Any]]:
    """The commands by name. Those of other packages have no options: they are not imported."""
    from fastloop.cli import app

    group = typer.main.get_command(app)
    context: Any = None
    names = group.list_commands(context)  # type: ignore[attr-defined]
    return [(name, group.get_command(context, name)) for name in names]  # type: ignore[attr-defined]


def words(command: Any) -> list[str]:
    """The options of a command, or the commands of a group."""
    options = [flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")]
    return [*getattr(command, "commands", {}), *options, "--help"]


def bash(commands: dict[str, list[str]], plugins: list[str]) -> str:
    """A function for ``complete``. Files are completed where no word matches."""
    cases = "\n".join(f'    {name}) words="{" ".join(found)}" ;;' for name, found in commands.items())
    return f"""_fastloop() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=""
  case ${{COMP_WORDS[COMP_CWORD-1]}} in
    {"|".join(BEFORE_PLUGINS)}) COMPREPLY=($(compgen -W "{" ".join(plugins)}" -- "$word")); return ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(commands)} --help --version --install-completion"
  else case ${{COMP_WORDS[1]}} in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _fastloop fastloop
"""


def zsh(commands: dict[str, list[str]], plugins: list[str]) -> str:
    """An autoloaded function."""
    cases = "\n".join(f"  {name}) compadd -- {' '.join(found)} ;;" for name, found in commands.items())
    return f"""#compdef fastloop
case $words[CURRENT-1] in
  {"|".join(BEFORE_PLUGINS)}) compadd -- {" ".join(plugins)}; return ;;
esac
if (( CURRENT == 2 )); then compadd -- {" ".join(commands)} --help --version --install-completion; return; fi
case $words[2] in
{cases}
esac
_files
"""


def fish(commands: dict[str, list[str]], plugins: list[str]) -> str:
    """A line for each command."""
    after_plugins = " ".join(["__fish_prev_arg_in", *BEFORE_PLUGINS])
    lines = [
        f"complete -c fastloop -n __fish_use_subcommand -f -a '{' '.join(commands)} --help --version'",
        f"complete -c fastloop -n '{after_plugins}' -f -a '{' '.join(plugins)}'",
    ]
    for name, found in commands.items():
        condition = f"__fish_seen_subcommand_from {name}; and not {after_plugins}"
        lines.append(f"complete -c fastloop -n '{condition}' -a '{' '.join(found)}'")
    return "\n".join(lines) + "\n"


WRITERS: dict[str, Callable[[dict[str, list[str]], list[str]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
