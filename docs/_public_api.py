"""The public API as text: one line for each name that docs/stability.md promises. `make api-snapshot` writes it.

    python docs/_public_api.py            # accept the current API: write tests/core/public_api.txt
    python docs/_public_api.py --check    # write nothing; exit with 1 and the differences

A test compares the file with the code, so a change of the API is a decision. The lines of the run folder come from a
short training.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import logging
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parent))
from _api import RULES, is_internal, members
from _sources import argument, hooks, kind, leaves, ours
from torch.nn.functional import cross_entropy

import fastloop
import fastloop.testing
from fastloop import Trainer
from fastloop.checkpoint.state_form import check_form
from fastloop.cli.option_table import describe
from fastloop.cli.plugins import hooks_of
from fastloop.cli.recipe_schema import recipe_schema
from fastloop.distributed.tensors import total_norm
from fastloop.evaluation_results import evaluating
from fastloop.plugins.declared_options import options_of
from fastloop.recipe import Train
from fastloop.runtime.random_states import preserve_random_states, random_states, restore_random_states
from fastloop_plugins import text as text_toolkit
from fastloop_plugins import toolkit
from fastloop_tools import toolkit as command_toolkit

FILE = Path(__file__).parents[1] / "tests" / "core" / "public_api.txt"
ACCEPT = (
    "If the change is intended: run `make api-snapshot` and commit tests/core/public_api.txt, add a line to "
    "CHANGELOG.md, and follow docs/stability.md, which states how a name is deprecated before it changes or goes."
)
NOTHING = "(none)"
FUNCTIONS = (check_form, evaluating, preserve_random_states, random_states, restore_random_states, total_norm)
"""Public functions for plugins: docs/loop.md and docs/write-a-plugin.md describe them."""


def current() -> dict[str, str]:
    """Name -> its signature, type or default, as the code has it."""
    return dict(sorted([*hook_lines(), *python_lines(), *recipe_lines(), *command_lines(), *run_folder_lines()]))


def read(text: str) -> dict[str, str]:
    """A stored snapshot."""
    return dict(line.split(": ", 1) for line in text.splitlines())


def render(names: dict[str, str]) -> str:
    """A snapshot to store."""
    return "".join(f"{name}: {value}\n" for name, value in names.items())


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """A message for each name that was added, removed or changed."""
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [f"{name}\n    old: {old.get(name, NOTHING)}\n    new: {new.get(name, NOTHING)}" for name in names]


# -- Python ------------------------------------------------------------------------------------------------------------


def hook_lines() -> Iterator[tuple[str, str]]:
    """Hooks with their arguments, and how results are combined."""
    for name, spec in hooks().items():
        yield f"hook {name}", f"{signature(spec)} [{kind(name, spec).partition(',')[0]}]"


def python_lines() -> Iterator[tuple[str, str]]:
    """Exported names of ``fastloop`` and ``fastloop.testing``, the classes of docs/api.md with their public members,
    and the toolkits of text tasks, plugins and commands."""
    named = {f"fastloop.{name}": getattr(fastloop, name) for name in fastloop.__all__}
    named |= {f"fastloop.testing.{name}": getattr(fastloop.testing, name) for name in fastloop.testing.__all__}
    for module in (text_toolkit, toolkit, command_toolkit):
        named |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    named |= {f"{cls.__module__}.{cls.__name__}": cls for cls in RULES if cls not in named.values()}
    named |= {f"{function.__module__}.{function.__name__}": function for function in FUNCTIONS}
    for name, value in named.items():
        function = (
            getattr(value, "__wrapped__", None) or getattr(value, "_get_wrapped_function", lambda found=value: found)()
        )
        if inspect.isclass(value):
            yield name, f"class({', '.join(base.__name__ for base in value.__bases__ if base is not object)})"
            constructor = vars(value).get("__init__")
            if inspect.isfunction(constructor) and constructor.__code__.co_filename != "<string>":  # not a dataclass's
                yield f"{name}.__init__", signature(constructor)
            for member in (member for member in members(value) if not is_internal(value, member.name)):
                if not member.name.startswith("test_"):
                    yield f"{name}.{member.name}", member.type + default_of(value, member.name)
        elif inspect.isfunction(function):
            yield name, signature(function)
        else:
            yield name, f"Literal{list(get_args(value))}" if get_origin(value) is Literal else type(value).__name__


def default_of(cls: type, name: str) -> str:
    """`` = default`` for a class attribute with a plain value."""
    value = vars(cls).get(name, Any)
    return f" = {value!r}" if isinstance(value, bool | int | float | str | tuple | None) else ""


def signature(function: Any) -> str:
    """A function's arguments and result, as its source has them, on one line."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else 'Any'}"


# -- recipes and commands ----------------------------------------------------------------------------------------------


def recipe_lines() -> Iterator[tuple[str, str]]:
    """Keys of recipes, and plugins with their options."""
    schema, problems = recipe_schema()
    assert not problems, problems
    for section in schema["properties"]:
        yield f"recipe {section}", "section"
    for option in describe(Train):
        yield f"recipe train.{option.name}", f"{option.type} = {option.default}"
    for name, cls in ours().items():
        yield f"plugin {name}", f"slot {cls.slot}, {cls.numerics}, hooks {', '.join(hooks_of(cls))}"
        for option in describe(options_of(cls)):
            yield f"plugin {name}.{option.name}", f"{option.type} = {option.default}"
        for section, keys in cls.sections.items():
            for option in describe(keys):
                yield f"recipe {section}.{option.name} of {name}", f"{option.type} = {option.default}"


def command_lines() -> Iterator[tuple[str, str]]:
    """Commands with their arguments and options."""
    for name, command in leaves():
        yield f"command {name}", "command"
        for parameter in command.params:
            repeated = " (repeatable)" * (parameter.nargs == -1 or bool(getattr(parameter, "multiple", False)))
            yield f"command {name} {argument(parameter)}", f"{parameter.default!r}{repeated}"


# -- the run folder ----------------------------------------------------------------------------------------------------


def run_folder_lines() -> Iterator[tuple[str, str]]:
    """Files of a run folder, keys of ``summary.json`` and of ``metrics.jsonl``, from a short training."""
    logging.getLogger("fastloop").setLevel(logging.WARNING)  # else the Trainer shows its log
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        model = fastloop.testing.tiny_model()
        data, held_out = fastloop.testing.tiny_data(), fastloop.testing.tiny_data(32, seed=1)
        plugins = ["log", {"progress": False}, {"checkpoint-best": {"monitor": "loss"}}]
        settings = {"epochs": 2, "batch_size": 8, "device": "cpu", "output": output}
        Trainer(model, data, held_out, held_out, plugins=plugins, loss=cross_entropy, **settings).fit()
        for path in output.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                yield f"run folder {re.sub(r'[0-9]+', 'N', path.relative_to(output).as_posix())}", "file"
        for key, value in json.loads((output / "summary.json").read_text(encoding="utf-8")).items():
            yield f"summary.json {key}", type(value).__name__
        for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            for key, value in json.loads(line).items():
                yield f"metrics.jsonl {key}", type(value).__name__


def main() -> int:
    """Write the snapshot, or compare it; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the public API to tests/core/public_api.txt.")
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; exit with 1 if the API differs from the file."
    )
    new = current()
    if parser.parse_args().check:
        changes = differences(read(FILE.read_text(encoding="utf-8")), new)
        print("\n".join([*changes, ACCEPT] if changes else ["the public API is that of the snapshot"]))
        return int(bool(changes))
    FILE.write_text(render(new), encoding="utf-8")
    print(f"{len(new)} names written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
