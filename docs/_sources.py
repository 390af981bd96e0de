"""Write the reference parts of docs/ from the code: `make docs-sources`.

They are committed, so that they can be read on a code host.

    python docs/_sources.py            # write
    python docs/_sources.py --check    # write nothing; exit with 1 if a part is out of date

A page holds a part between ``<!-- made: NAME -->`` and ``<!-- end: NAME -->``. The pages of plugins are written whole.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).parent))
from _api import api_reference
from _codes import code_list
from _stub import STUB, hook_types, is_implemented

from fastloop import hookspecs
from fastloop.cli import app
from fastloop.cli.commands import Commands, own
from fastloop.cli.option_table import OptionInfo, describe
from fastloop.cli.plugins import hooks_of, is_wrapper, requirement
from fastloop.cli.recipe_schema import recipe_schema, summary
from fastloop.plugins.declared_options import options_of
from fastloop.plugins.installed import defaults, installed, is_own, load
from fastloop.plugins.packages import PLUGINS
from fastloop.plugins.plugin import Plugin, When
from fastloop.recipe import Train
from fastloop_plugins import toolkit
from fastloop_plugins.rows.drop import Condition
from fastloop_plugins.rows.formats import describe_formats
from fastloop_plugins.text.sources import Source
from fastloop_tools import toolkit as command_toolkit

DOCS = Path(__file__).parent
SCHEMA = STUB.parents[2] / "recipes" / "recipe.schema.json"
PART = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
CHECKOUT = STUB.parents[2]
"""The folder of the code. The pages may be a copy elsewhere."""
WHOLE = "<!-- {} -->\n"
"""First line of a page that is written whole."""


@cache
def ours() -> dict[str, type[Plugin]]:
    """The plugins of fastloop's own distribution, by name."""
    return {name: load(name) for name, point in installed().items() if is_own(point)}


def option_list(rows: list[OptionInfo]) -> str:
    """The keys of a dataclass, each with its type, its default and its meaning."""
    return "".join(f"- `{row.name}: {value(row)}` {row.help}\n" for row in rows)


def value(row: OptionInfo) -> str:
    """Type and default of a key. A default of null is not shown."""
    if row.default == "(required)":
        return f"{row.type}, required"
    return row.type.removesuffix(" | null") if row.default == "null" else f"{row.type} = {row.default}"


# -- the loop and its hooks --------------------------------------------------------------------------------------------


PHASES = {
    "environment": "configure",
    "build_datasets": "build",
    "before_fit": "train",
    "before_evaluate": "evaluate",
    "save_state": "state",
}
"""First hook of a phase -> the phase."""


EVERY = "every plugin, in order"
"""The kind of most hooks, which the page does not show."""


def hooks() -> dict[str, Any]:
    """Every hook's specification, in order."""
    return {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")}


def annotated_loop() -> str:
    """The module docstring of ``hookspecs``."""
    return inspect.cleandoc(hookspecs.__doc__ or "") + "\n"


def kind(name: str, spec: Any) -> str:
    """How the results of several plugins are combined."""
    if spec.fastloop_spec["firstresult"]:
        return "first result wins" + (", fastloop's own last" if is_implemented(name) else "")
    return "chain" if (spec.__doc__ or "").startswith("Chain.") else EVERY


def all_hooks() -> str:
    """One section for each hook, grouped by phase."""
    text = []
    for name, spec in hooks().items():
        if name in PHASES:
            text.append(f"## Phase: {PHASES[name]}\n")
        arguments = ", ".join(
            key if key == "run" else f"{key}: {argument.annotation}"
            for key, argument in inspect.signature(spec).parameters.items()
        )
        returns = f" -> {result}" if (result := inspect.signature(spec).return_annotation) != "None" else ""
        example = next((f"Example: [`{plugin}`](plugins/{plugin}.md){how}." for plugin, how in implementers(name)), "")
        combined = kind(name, spec).replace("first result wins", "*first*").replace("chain", "*chain*")
        description = re.sub(r"^(Chain|First)([.;] ?)", "", inspect.cleandoc(spec.__doc__))
        text += [
            f"### `{name}`\n",
            f"    {name}({arguments}){returns}\n",
            f"{description[0].upper()}{description[1:]}\n",
            f"Kind: {combined}. " * (combined != EVERY) + example + "\n",
        ]
    return "\n".join(text)


def implementers(hook: str) -> Iterator[tuple[str, str]]:
    """Our plugins that implement a hook, and whether they wrap it."""
    for name, cls in ours().items():
        if hook in hooks_of(cls):
            yield name, " (wraps it)" * is_wrapper(cls, hook)


# -- plugins -----------------------------------------------------------------------------------------------------------


FIRST = re.compile(r": |\. |, (?:so that|and|which|the|instead of|pretrained|in forward|with|for|at) ")
"""Where the list of plugins ends a summary: the plugin's page has all of it."""


def plugin_lists() -> str:
    """Our plugins by subpackage, one line each."""
    groups: dict[str, list[str]] = {}
    for name, cls in ours().items():
        package, folder = cls.__module__.split(".")[:2]
        group = folder.capitalize()
        if package not in ("fastloop_plugins", "fastloop_tools"):  # the plugin of a command is in its folder
            group = f"Package {PLUGINS[name].distribution}"
        numerics = "" if cls.slot == "task" else f" ({cls.numerics})"
        first = FIRST.split(summary(cls).rstrip("."))[0]
        groups.setdefault(group, []).append(f"- [`{name}`]({name}.md){numerics} {first}.")
    text = []
    for group, rows in sorted(groups.items()):
        text += [f"## {group}\n", *rows, ""]
    return "\n".join(text)


def plugin_page(name: str, cls: type[Plugin]) -> str:
    """The page of a plugin: its module's docstring, what it declares, its options."""
    module = inspect.getmodule(cls)
    assert module is not None
    conditional = dict.fromkeys(requirement(item.need) for item in cls.requirements if isinstance(item, When))
    default = name in defaults()
    facts = {
        "slot": f"`{cls.slot}`" if cls.slot else "",
        "numerics": cls.numerics if cls.slot != "task" else "",
        "only observes": "has the option [`on_error`](index.md)" if cls.read_only else "",
        "on by default": "when it applies" if default else "",
        "requires": references(cls.requires),
        "conflicts with": "; ".join(f"{references((other,))}: {why}" for other, why in cls.conflicts.items()),
        "package": package_of(name),
        "needs": "; ".join(requirement(item) for item in cls.requirements if not isinstance(item, When)),
        "some options need": "; ".join(conditional),
        "adds metrics": ", ".join(f"`{metric}`" for metric in cls.adds_metrics),
    }
    options = describe(options_of(cls))
    sections = " and ".join(f"[`{section}`](../recipe.md#{section})" for section in cls.sections)
    return "\n".join(
        [
            WHOLE.format(Path(inspect.getfile(module)).relative_to(CHECKOUT).as_posix()),
            f"# {name}\n",
            f"{inspect.cleandoc(module.__doc__ or '')}\n",
            *(f"- {key}: {text}" for key, text in facts.items() if text),
            *(["\n## Options\n", option_list(options).rstrip()] if options else []),
            *([f"\nKeys of the recipe: {sections}."] if sections else []),
            "",
        ]
    )


def package_of(name: str) -> str:
    """How to install the package of a plugin that is not in fastloop's main distribution."""
    return f"`{PLUGINS[name].distribution}`: `{PLUGINS[name].install}`" if name in PLUGINS else ""


def helpers(module: Any) -> str:
    """The public names of a module of helpers, each with its arguments and the first sentence of its docstring."""
    lines = []
    for name in module.__all__:
        found = getattr(module, name)
        if callable(found):
            meaning = inspect.cleandoc(found.__doc__ or "").partition("\n\n")[0]
            shown = f"{name}{inspect.signature(found)}".replace("'", "")
        else:
            meaning = constant_meaning(inspect.getsource(sys.modules[module.PLACES[name]]), name)
            shown = name
        lines.append(f"- `{shown}` {' '.join(meaning.split())}\n")
    return "".join(lines)


def constant_meaning(source: str, name: str) -> str:
    """The docstring of a constant: the text below its assignment in the source of its module."""
    statements = ast.parse(source).body
    for statement, below in itertools.pairwise(statements):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            assert isinstance(below, ast.Expr)
            return str(ast.literal_eval(below.value))
    raise ValueError(f"{name} has no docstring")


def references(names: tuple[str, ...]) -> str:
    """Links to the plugins, or the slots, that another plugin names."""
    return ", ".join(
        f"[`{name}`]({name}.md)" if name in ours() else f"the slot `{name.removeprefix('slot:')}`" for name in names
    )


# -- recipes and commands ----------------------------------------------------------------------------------------------


def formats() -> str:
    """The formats of data files."""
    lines = [("files", "a row is", "values", "compressed", "row group of a stream"), ["---"] * 5, *describe_formats()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def recipe_keys() -> str:
    """The keys of every section of a recipe."""
    made, problems = recipe_schema()
    assert not problems, problems
    text = []
    for name, section in made["properties"].items():
        text.append(f"## `{name}`\n")
        text.append((section.get("description") or made["$defs"][name]["description"]) + "\n")
        if name == "train":
            text.append(option_list(describe(Train)))
        readers: dict[tuple[str, ...], list[OptionInfo]] = {}
        for row, tasks in keys_of_tasks(name):
            readers.setdefault(tuple(tasks), []).append(row)
        for tasks, rows in readers.items():
            text += [f"For {', '.join(f'[`{task}`](plugins/{task}.md)' for task in tasks)}:\n", option_list(rows)]
    return "\n".join(text)


def keys_of_tasks(section: str) -> list[tuple[OptionInfo, list[str]]]:
    """The different keys of a section, and the tasks that read each."""
    found: dict[str, tuple[OptionInfo, list[str]]] = {}
    for task, cls in ours().items():
        for row in describe(cls.sections[section]) if section in cls.sections else ():
            found.setdefault(repr(row), (row, []))[1].append(task)
    return list(found.values())


def leaves(group: Any = None, name: str = "fastloop") -> Iterator[tuple[str, Any]]:
    """Every command by its full name, also those of groups."""
    group = group or typer.main.get_command(app)
    for word in own() if isinstance(group, Commands) else group.commands:
        command = group.get_command(None, word)
        if hasattr(command, "commands"):
            yield from leaves(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def argument(parameter: Any) -> str:
    """The form of an argument or an option on the command line."""
    if parameter.param_type_name == "argument":
        shown: str = parameter.metavar or parameter.name.upper()
        return (shown if parameter.required else f"[{shown}]") + "..." * (parameter.nargs != 1)
    names = ", ".join(parameter.opts)
    if parameter.default is True:
        names += f" / {', '.join(parameter.secondary_opts)}"  # --numerics / --no-numerics
    return f"{names} {parameter.metavar or ''}".rstrip()


def described(parameter: Any) -> str:
    """An argument or an option with its default and its meaning, as an entry of a list."""
    default = ""
    if parameter.default is True:
        default = f" (`{', '.join(parameter.opts)}`)"
    elif parameter.default not in (None, "", False):
        default = f" (`{parameter.default}`)"
    return f"- `{argument(parameter)}`{default} {parameter.help or ''}"


def commands() -> str:
    """The first sentence of every command, its arguments and options. Those of several commands come first, once."""
    counts = Counter(described(parameter) for _, command in leaves() for parameter in command.params)
    shared: dict[str, str] = {}  # an option with several meanings: the most frequent one
    for entry, count in counts.most_common():
        if count > 1:
            shared.setdefault(entry.split("`")[1], entry)
    text = ["Arguments and options of several commands, with a default in brackets:\n", *shared.values(), ""]
    for name, command in leaves():
        entries = [described(parameter) for parameter in command.params]
        usage = [argument(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
        text += [
            f"## {name}\n",
            f"    {' '.join([name, *usage])}\n",
            " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split()) + "\n",
        ]
        also = [code for entry in entries if shared.get(code := entry.split("`")[1]) == entry and code not in usage]
        text += [entry for entry in entries if entry not in shared.values()]
        text += [f"- as above: {', '.join(f'`{code.split()[0]}`' for code in also)}"] * bool(also) + [""]
    return "\n".join(text)


PARTS: dict[str, Callable[[], str]] = {
    "annotated-loop": annotated_loop,
    "hooks": all_hooks,
    "plugins": plugin_lists,
    "recipe": recipe_keys,
    "codes": code_list,
    "commands": commands,
    "formats": formats,
    "conditions": lambda: option_list(describe(Condition)),
    "sources": lambda: option_list(describe(Source)),
    "api": api_reference,
    "toolkit": lambda: helpers(toolkit),
    "command-toolkit": lambda: helpers(command_toolkit),
}


# -- writing -----------------------------------------------------------------------------------------------------------


def sources() -> dict[Path, str]:
    """File -> its text as the code has it: the pages that hold a part, those of plugins, the stub of
    ``run.hooks``, and the JSON Schema of recipes."""
    schema, problems = recipe_schema(others=False)
    assert not problems, problems
    pages = {STUB: hook_types(), SCHEMA: json.dumps(schema, indent=1) + "\n"} | {
        DOCS / "plugins" / f"{name}.md": plugin_page(name, cls) for name, cls in ours().items()
    }
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path not in pages and PART.search(text):
            pages[path] = PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]().strip()}\n\n{part[3]}", text)
    return pages


def outdated() -> dict[Path, str | None]:
    """Page that differs from the code -> its new text; None: the page of a plugin that there is no more."""
    expected = sources()
    changes: dict[Path, str | None] = {
        path: text for path, text in expected.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    return changes | {path: None for path in (DOCS / "plugins").glob("*.md") if path not in expected}


def main() -> int:
    """Write the pages, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the reference parts of docs/ from the code.")
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 if a part is out of date.")
    check = parser.parse_args().check
    changes = outdated()
    for path, text in sorted(changes.items()):
        name = path.relative_to(DOCS.parent).as_posix()
        if check:
            print(
                f"{name}: differs from the code that it is made from. Run `make docs-sources`, and commit the result."
            )
        elif text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    if not check:
        print(f"{len(changes)} pages written")
    return int(check and bool(changes))


if __name__ == "__main__":
    sys.exit(main())
