"""Each override, command and option that a remedy proposes exists: keys of recipes, commands, and their options."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fastloop.cli import app
from fastloop.cli.commands import own
from fastloop.cli.recipe_schema import recipe_schema
from fastloop.problem import Problem

ROOT = Path(__file__).parents[2]
KEY = re.compile(r"\b(data|model|plugins|train)\.([\w{}-]+)(?:\.([\w{}-]+))?(?:\.[\w{}-]+)*=")
COMMAND = re.compile(r"`fastloop ([a-z]+)")
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]+)\b")
OTHER_OPTIONS = {"shm-size", "yes"}
"""Options of docker and pip, which remedies name, too."""
OTHER_KEYS = {"columns"}
"""Keys of tasks in packages of the project, which may not be installed here."""


@pytest.fixture(scope="module")
def remedies() -> list[Problem]:
    """The problems of the sources that have a remedy."""
    sys.path.insert(0, str(ROOT / "docs"))
    from _codes import messages

    sys.path.remove(str(ROOT / "docs"))
    return [message.problem for message in messages() if message.problem.remedy]


@pytest.fixture(scope="module")
def keys() -> dict[str, set[str]]:
    """Section, or ``plugins.NAME`` -> its keys, of all tasks together."""
    definitions = recipe_schema()[0]["$defs"]
    found: dict[str, set[str]] = {}
    for name, schema in definitions.items():
        section = name if name.startswith("plugins.") else name.partition(".")[0]
        found.setdefault(section, set()).update(schema.get("properties", {}))
    return found


def test_there_are_remedies(remedies):
    assert len(remedies) > 400
    assert sum(bool(problem.proposals) for problem in remedies) > 20


def test_their_keys_are_keys_of_recipes(remedies, keys):
    for problem in remedies:
        for section, key, option in KEY.findall(problem.remedy):
            if section == "plugins":
                known = keys.get(f"plugins.{key}", set())
                assert "{" in key or "{" in option or option in known, problem.remedy
            else:
                assert "{" in key or key in keys[section] | OTHER_KEYS, problem.remedy


def test_their_commands_and_options_exist(remedies):
    import typer

    group = typer.main.get_command(app)
    commands = {name: group.get_command(None, name) for name in own()}
    options = set(OTHER_OPTIONS)
    for command in commands.values():
        members = list(getattr(command, "commands", {}).values()) or [command]
        for member in members:
            for parameter in member.params:
                options |= {name.removeprefix("--") for name in [*parameter.opts, *parameter.secondary_opts]}
    for problem in remedies:
        for name in COMMAND.findall(problem.remedy):
            assert name in commands, problem.remedy
        for name in OPTION.findall(problem.remedy):
            assert name in options | {"help", "json"}, problem.remedy
