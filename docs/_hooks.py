"""Pages that are made from the code while the site is built, so that they cannot be out of date. mkdocs.yml names this file.

A page says ``<!-- made: NAME -->`` where a part goes that a function of ``PARTS`` makes. Each plugin has a page that is made whole.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from fastloop import defaults, hookspecs
from fastloop.cli import app
from fastloop.cli.commands import Commands
from fastloop.cli.recipe_schema import recipe_schema, summary
from fastloop.options import OptionInfo, describe
from fastloop.plugin import DEFAULTS, Device, Dtype, Observer, Package, Plugin, When
from fastloop.recipe import Train
from fastloop.registry import installed, load

DOCS = Path(__file__).parent
MARK = re.compile(r"<!-- made: ([\w-]+) -->")
CELL = re.compile(r"(`[^`]*`)|\|")
"""In a table's cell, a bar is escaped; in code it is not."""


@cache
def ours() -> dict[str, type[Plugin]]:
    """The plugins of fastloop's own distribution, by name."""
    return {name: load(name) for name, point in installed().items() if point.dist is not None and point.dist.name == "fastloop"}


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    """A table; ``head`` is its columns' titles with ``|`` between."""
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *([CELL.sub(lambda part: part[1] or "\\|", cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def option_table(rows: list[OptionInfo]) -> str:
    """The keys of a dataclass."""
    cells = [(f"`{row.name}`", f"`{row.type}`", "" if row.default == "(required)" else f"`{row.default}`", row.help) for row in rows]
    return table("key|type|default|what it does", cells)


# -- the loop and its hooks --------------------------------------------------------------------------------------------


def hooks() -> dict[str, Any]:
    """Every hook's specification, in order."""
    return {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")}


def annotated_loop() -> str:
    """The contract's own words."""
    return inspect.cleandoc(hookspecs.__doc__ or "")


def kind(name: str, spec: Any) -> str:
    """How the plugins' answers are put together."""
    if spec.fastloop_spec["firstresult"]:
        return "first result wins" + (", the core's own last" if hasattr(defaults, name) else "")
    return {"Draft": "draft", "Chain": "chain"}.get((spec.__doc__ or "").partition(".")[0], "every plugin, in order")


def all_hooks() -> str:
    """A section a hook, under its phase."""
    phases = re.split(r"(?m)^# -- (\w+) -+$", inspect.getsource(hookspecs))[1:]
    text = []
    for phase, source in zip(phases[::2], phases[1::2], strict=True):
        text.append(f"## {phase.capitalize()}\n")
        for name in re.findall(r"(?m)^def (\w+)", source):
            spec = hooks()[name]
            arguments = ", ".join(f"{key}: {argument.annotation}" for key, argument in inspect.signature(spec).parameters.items())
            answered = [f"[`{plugin}`](plugins/{plugin}.md){how}" for plugin, how in implementers(name)]
            text += [
                f"### `{name}` {{ #{name} }}\n",
                f"    {name}({arguments}) -> {inspect.signature(spec).return_annotation}\n",
                f"{re.sub(r'^(Draft|Chain|First)([.;] ?)', '', inspect.cleandoc(spec.__doc__))}\n",
                f"Phase: {phase}. Kind: {kind(name, spec)}. Plugins of ours: {', '.join(answered) or 'none'}.\n",
            ]
    return "\n".join(text)


def implementers(hook: str) -> Iterator[tuple[str, str]]:
    """Plugins of ours that answer a hook, and whether they wrap it."""
    for name, cls in ours().items():
        if marks := getattr(getattr(cls, hook, None), "fastloop_impl", None):
            yield name, " (wraps it)" if marks["wrapper"] or marks["hookwrapper"] else ""


# -- plugins -----------------------------------------------------------------------------------------------------------


def plugin_table() -> str:
    """All plugins, a line each."""
    rows = [(f"[`{name}`]({name}.md)", cls.slot or "", cls.numerics, summary(cls)) for name, cls in ours().items()]
    return table("plugin|slot|numbers|what it is", rows)


def plugin_page(name: str, cls: type[Plugin]) -> str:
    """A plugin's page: its module's words, what it declares, its options."""
    module = inspect.getmodule(cls)
    assert module is not None
    answered = [f"[`{hook}`](../loop.md#{hook})" for hook in hooks() if hasattr(getattr(cls, hook, None), "fastloop_impl")]
    default = name in {point.name for point in importlib.metadata.entry_points(group=DEFAULTS)}
    facts = [
        ("slot", f"`{cls.slot}`" if cls.slot else ""),
        ("numbers", f"{cls.numerics}" if cls.slot != "task" else ""),
        ("in a run", cls.description),
        ("on by default", "when it applies: `fastloop plan` says why" if default else ""),
        ("hooks", ", ".join(answered)),
        ("requires", references(cls.requires)),
        ("excludes", "; ".join(f"{references((other,))}: {why}" for other, why in cls.conflicts.items())),
        ("called after", references(cls.runs_after)),
        ("called before", references(cls.runs_before)),
        ("requirements", "; ".join(need(item) for item in cls.requirements if not isinstance(item, When))),
        ("needs with some options", "; ".join(dict.fromkeys(need(item.need) for item in cls.requirements if isinstance(item, When)))),
        ("adds metrics", ", ".join(f"`{metric}`" for metric in cls.adds_metrics)),
        ("source", f"`{module.__name__}`"),
    ]
    text = [f"# {name}\n", inspect.cleandoc(module.__doc__ or ""), "", table("|", [(key, value) for key, value in facts if value])]
    options = describe(cls.Config) + (describe(Observer) if cls.read_only else [])
    text += ["## Options\n", option_table(options) if options else "None.\n"]
    for section, keys in cls.sections.items():
        text += [f"## The section `{section}`\n", option_table(describe(keys))]
    return "\n".join(text)


def references(names: tuple[str, ...]) -> str:
    """Plugins that are named by another, or ``slot:NAME``, with links."""
    return ", ".join(f"[`{name}`]({name}.md)" if name in ours() else f"the slot `{name.removeprefix('slot:')}`" for name in names)


def need(item: Any) -> str:
    """A need in a few words."""
    match item:
        case Package():
            extra = f": `pip install '{item.of}[{item.extra}]'`" if item.extra else ""
            return f"the package `{item.distribution}{item.version}`{extra}"
        case Device():
            return f"a device of type {' or '.join(item.kinds)}"
        case Dtype():
            return f"a device that computes in {item.name}"
    return inspect.cleandoc(type(item).__doc__ or "").partition("\n")[0].rstrip(".")


# -- recipes and commands ----------------------------------------------------------------------------------------------


def recipe_keys() -> str:
    """What the schema says of every section."""
    made, problems = recipe_schema()
    assert not problems, problems
    text = []
    for name, section in made["properties"].items():
        text.append(f"## `{name}`\n")
        text.append((section.get("description") or made["$defs"][name]["description"]) + "\n")
        if name == "train":
            text.append(option_table(describe(Train)))
        readers: dict[type, list[str]] = {}
        for task, cls in ours().items():
            if name in cls.sections:
                readers.setdefault(cls.sections[name], []).append(f"[`{task}`](plugins/{task}.md)")
        for keys, tasks in readers.items():
            text += [f"For {' and '.join(tasks)}:\n", option_table(describe(keys))]
    return "\n".join(text)


def leaves(group: Any = None, name: str = "fastloop") -> Iterator[tuple[str, Any]]:
    """Every command by its whole name, those of groups too."""
    group = group or typer.main.get_command(app)
    for word in group.ours() if isinstance(group, Commands) else group.commands:
        command = group.get_command(None, word)
        if hasattr(command, "commands"):
            yield from leaves(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def argument(parameter: Any) -> str:
    """What is written for an argument or an option."""
    if parameter.param_type_name == "argument":
        shown: str = parameter.metavar or parameter.name.upper()
        return shown if parameter.required or shown.startswith("[") else f"[{shown}]"
    return f"{', '.join(parameter.opts)} {parameter.metavar or ''}".rstrip()


def commands() -> str:
    """Every command with its arguments and options."""
    text = []
    for name, command in leaves():
        rows = []
        for parameter in command.params:
            default = "" if parameter.default in (None, "", False) else f"`{parameter.default}`"
            rows.append((f"`{argument(parameter)}`", default, parameter.help or ""))
        usage = [argument(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
        text += [f"## {name}\n", f"    {' '.join([name, '[OPTIONS]', *usage])}\n", f"{inspect.cleandoc(command.help or '')}\n"]
        text.append(table("argument|default|what it does", rows))
    return "\n".join(text)


PARTS: dict[str, Callable[[], str]] = {
    "annotated-loop": annotated_loop,
    "hooks": all_hooks,
    "plugins": plugin_table,
    "recipe": recipe_keys,
    "commands": commands,
}


@cache
def made_pages() -> dict[str, str]:
    """Path -> text of the pages that are made whole."""
    return {f"plugins/{name}.md": plugin_page(name, cls) for name, cls in ours().items()}


# -- what mkdocs calls -------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Put the pages of a folder into the navigation, where it names the folder."""

    def filled(entry: Any) -> Any:
        if isinstance(entry, list):
            return [filled(item) for item in entry]
        if isinstance(entry, dict):
            return {title: filled(value) for title, value in entry.items()}
        if not entry.endswith("/"):
            return entry
        pages = {path.relative_to(DOCS).as_posix() for path in (DOCS / entry).glob("*.md")} | made_pages().keys()
        return sorted((page for page in pages if page.startswith(entry)), key=lambda page: (not page.endswith("/index.md"), page))

    config.nav = filled(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made whole."""
    from mkdocs.structure.files import File

    for path, text in made_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in the parts that are made."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), markdown)
