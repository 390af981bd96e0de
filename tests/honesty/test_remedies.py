"""Each override, command and option that a message proposes exists: keys of recipes, commands, and their options.

``test_proposed_commands.py`` provokes messages, and runs their proposals.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from fastloop.cli import app
from fastloop.cli.commands import own
from fastloop.cli.recipe_schema import recipe_schema
from fastloop.problem import OVERRIDE, Problem, shell_word
from fastloop.recipe.overrides import parse_override

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
    """The problems of the sources that have a remedy or another proposal."""
    sys.path.insert(0, str(ROOT / "docs"))
    from _codes import messages

    sys.path.remove(str(ROOT / "docs"))
    return [message.problem for message in messages() if message.problem.remedy or message.problem.proposals]


@pytest.fixture(scope="module")
def commands() -> dict[str, set[str]]:
    """Command -> the options of it and of its members."""
    import typer

    group = typer.main.get_command(app)
    found: dict[str, set[str]] = {}
    for name in own():
        command = group.get_command(None, name)
        options = {"help"}
        for member in list(getattr(command, "commands", {}).values()) or [command]:
            for parameter in member.params:
                options |= {option.removeprefix("--") for option in [*parameter.opts, *parameter.secondary_opts]}
        found[name] = options
    return found


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
        for section, key, option in KEY.findall(f"{problem.remedy} {' '.join(problem.proposals)}"):
            if section == "plugins":
                known = keys.get(f"plugins.{key}", set())
                assert "{" in key or key.isupper() or "{" in option or option in known, problem.remedy
            else:
                assert "{" in key or key in keys[section] | OTHER_KEYS, problem.remedy


def test_their_overrides_are_words_of_a_command_line(remedies):
    """A shell divides a message's override as ``shlex`` does, and ``parse_override`` reads what is left."""
    overrides = 0
    for problem in remedies:
        for sentences in (problem.text, problem.expected, problem.remedy):
            for match in OVERRIDE.finditer(sentences):
                override = match[1] or match[3]
                if override is None:  # an option with a name: --with ema
                    continue
                overrides += 1
                word = shell_word(override)
                assert word in str(problem)
                assert shlex.split(word) == [override]
                assert parse_override(override, {}).text == override
    assert overrides > 30


def test_their_options_exist(remedies, commands):
    options = OTHER_OPTIONS.union({"json"}, *commands.values())
    for problem in remedies:
        for name in OPTION.findall(f"{problem.remedy} {problem.command}"):
            assert name in options, problem.remedy


def test_their_commands_have_their_options(remedies, commands):
    proposals = [proposal for problem in remedies for proposal in problem.proposals]
    proposed = [proposal for proposal in proposals if proposal.startswith("fastloop ")]
    assert len(proposed) > 10
    for proposal in proposed:
        name = proposal.split()[1]
        if not name.startswith("-"):
            assert name in commands, proposal
            assert {*OPTION.findall(proposal)} <= commands[name], proposal
    for problem in remedies:
        for name in COMMAND.findall(problem.remedy):
            assert name in commands, problem.remedy


def test_a_command_is_no_part_of_a_sentence(remedies):
    """A command that can be copied is between backquotes, or in the field ``command``."""
    for problem in remedies:
        unquoted = re.sub("`[^`]*`", "", f"{problem.text} {problem.remedy}")
        assert not re.search(
            r"(?<!-m )\bfastloop (train|plan|plugins|export|predict|evaluate|sweep) |\bpip install", unquoted
        ), problem
        assert not problem.remedy.rstrip().endswith(":") or problem.command, problem
