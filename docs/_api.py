"""The API reference of docs/api.md: types from annotations, meanings from docstrings. ``_sources.py`` writes it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastloop.checkpoint.pending_save import CheckpointSaver
from fastloop.data import Loaders
from fastloop.distributed.processes import Processes
from fastloop.plugins.plugin import Plugin
from fastloop.run import Run
from fastloop.schedule import Schedule
from fastloop.settings import Settings
from fastloop.state import Batch, Output, State
from fastloop.strategy import Strategy
from fastloop_plugins.text.batches import Ragged

SINCE: dict[str, str] = {}
"""``Class.member`` -> the version that added it. Everything else has been there since 0.1."""
LOADER = "no: the loader fills it in"
CORE = "no: the core calls it"
"""The rule of methods that the page leaves out."""
ON_CLASS = "yes, on your class"

RULES: dict[type, dict[str, str]] = {
    Run: {
        "": "no",
        "model": "return another in `before_prepare` or `after_prepare`",
        "optimizer": "return one in `build_optimizer` or `Strategy.prepare`",
        "scheduler": "return one in `build_scheduler`",
        "metrics": "return them in `build_metrics`",
        "datasets": "return them in `build_datasets`",
        "loaders": "by `set_micro_batch_size` alone",
        "settings": "return changes in `configure`",
        "state": "the fields that [State](#state) marks",
        "to_device()": CORE,
        "accumulate_gradients()": "in `train_step`",
        "apply_gradients()": "in `train_step`",
    },
    State: {
        "": "no",
        "best": "yes, a plugin that keeps the best checkpoint",
        "unreadable": "a task adds the rows that it left out",
        "evaluate_requested": "by `request_evaluate()`",
        "save_requested": "by `request_save()`",
        "stop_reason": "by `request_stop()`",
        "count_step()": CORE,
        "skip_samples()": CORE,
        "count_unreadable()": CORE,
        "restore()": CORE,
    },
    Batch: {
        "": "yes, in your collator",
        "ids": LOADER,
        "worker": LOADER,
        "is_last_micro_batch": LOADER,
        "unreadable": LOADER,
        "stream_digest": LOADER,
        "drawn": LOADER,
        "pin_memory()": CORE,
    },
    Output: {"": "yes, in `compute_loss` and in a wrapper of it"},
    Settings: {"": "return it in `configure`", "writers": "no", "WORKERS": "no", "READING": "no"},
    Plugin: {
        "": ON_CLASS,
        "fallback_hooks": "yes, on your class or in `__init__`",
        "on_error": "no: the recipe sets it",
        "where": "no",
        "log": "no",
        "description": "no: it is the first sentence of the docstring",
        "auto_enable()": "override it",
        "declare_traits()": "override it",
        "estimate_speedup()": "override it",
    },
    Ragged: {"": "yes, in your collator"},
    Strategy: {"": "override it", "sets_precision": ON_CLASS, "shares_buffers": ON_CLASS},
    Processes: {"": "no", "close()": CORE, "explain_lost_connection()": CORE},
    Schedule: {"": "no"},
    CheckpointSaver: {"": "no", "start()": CORE},
    Loaders: {"": "no", "set_datasets()": CORE, "build()": CORE, "copy_train()": CORE, "close()": CORE},
}
"""Class -> whether a plugin may change an attribute or call a method; ``""`` is the rule of the other attributes. It
may call the other methods."""


@dataclass
class Member:
    """An attribute or, with ``()`` in its name, a method."""

    name: str
    type: str
    meaning: str


def api_reference() -> str:
    """Every class of the page."""
    text = []
    for cls, rules in RULES.items():
        found = members(cls)
        if unknown := {name for name in rules if name} - {member.name for member in found}:
            sys.exit(
                f"docs/_api.py: RULES[{cls.__name__}] names {', '.join(sorted(unknown))}, which the class does "
                "not have."
            )
        attributes = [member for member in found if not member.name.endswith("()")]
        methods = [member for member in found if member.name.endswith("()") and not is_internal(cls, member.name)]
        text += [f"## {cls.__name__}\n", f"`from {importable(cls)} import {cls.__name__}`. {introduction(cls)}\n"]
        for verb, default, found in (("change", rules[""], attributes), ("call", "yes", methods)):
            text += entries_of(cls, verb, [(member, rules.get(member.name, default)) for member in found])
    return "\n".join(text)


def is_internal(cls: type, member: str) -> bool:
    """Whether only the core calls a method: it is no part of the API."""
    return RULES.get(cls, {}).get(member) == CORE


def entries_of(cls: type, verb: str, found: list[tuple[Member, str]]) -> list[str]:
    """A list of members, and above it the most common rule. The other rules stand in their entries."""
    if not found:
        return []
    common = Counter(rule for _, rule in found).most_common(1)[0][0]
    made = [entry(cls, member, "" if rule == common else f" {verb.capitalize()}: {rule}.") for member, rule in found]
    return [f"{verb.capitalize()}: {common}.\n", *made, ""]


def entry(cls: type, member: Member, rule: str) -> str:
    """A member as an entry of a list, with the first sentence of its meaning, and the rule that differs from others."""
    if not member.meaning:
        sys.exit(
            f"docs/_api.py: {cls.__module__}.{cls.__name__}.{member.name} has no meaning. Describe it in the class's "
            "docstring."
        )
    since = SINCE.get(f"{cls.__name__}.{member.name}")
    added = f" Since {since}." if since else ""
    shown = f"{member.name.removesuffix('()')}{'' if member.name.endswith('()') else ': '}{member.type}"
    everywhere = " Every process must call it." * ("Every process must call it." in member.meaning)
    return f"- `{shown}` {re.split(r'(?<=[.]) (?=[A-Z`])', member.meaning)[0]}{everywhere}{added}{rule}"


def importable(cls: type) -> str:
    """The shortest module that a plugin imports the class from."""
    import fastloop

    return "fastloop" if cls.__name__ in fastloop.__all__ else cls.__module__


def introduction(cls: type) -> str:
    """The docstring up to its first section or example."""
    return prose(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0])


def prose(doc: str) -> str:
    """The text of a docstring in one line, without arguments, with the errors that it raises."""
    parts = re.split(r"(?m)^(Args|Attributes|Returns|Raises|Yields):\n", doc)
    raised = "".join(
        f" Raises {' '.join(text.split())}"
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
        if title == "Raises"
    )
    return (" ".join(parts[0].split()) + raised).strip()


def described(cls: type) -> dict[str, str]:
    """Name -> meaning, from the section ``Attributes`` of the class's docstring."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.split(r"(?m)^    (\w+): ", section)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


def members(cls: type) -> list[Member]:
    """The public attributes and methods that a class defines, in the order of its code."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    meanings, types, methods = described(cls), {}, []
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        doc = (
            following.value.value
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            else ""
        )
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            types[node.target.id] = re.sub(r"^ClassVar\[(.*)\]$", r"\1", ast.unparse(node.annotation))
            meanings.setdefault(node.target.id, prose(str(doc)))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            types[node.targets[0].id] = type(getattr(cls, node.targets[0].id)).__name__
            meanings.setdefault(node.targets[0].id, prose(str(doc)))
        elif isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if node.name in ("__init__", "__post_init__"):
                types = assigned(cls, node, types)
            elif decorators & {"property", "cached_property"}:
                types[node.name] = ast.unparse(node.returns) if node.returns else "Any"
                meanings.setdefault(node.name, prose(ast.get_docstring(node) or ""))
            else:
                methods.append(Member(f"{node.name}()", signature(node), prose(ast.get_docstring(node) or "")))
    found = [*(Member(name, found, meanings.get(name, "")) for name, found in types.items()), *methods]
    return [member for member in found if not member.name.startswith("_")]


def signature(node: ast.FunctionDef) -> str:
    """Arguments and result of a method as it is called."""
    result = ast.unparse(node.returns) if node.returns else "Any"
    if "contextmanager" in {ast.unparse(decorator) for decorator in node.decorator_list}:
        result = re.sub(r"^Iterator\[(.*)\]$", r"AbstractContextManager[\1]", result)
    arguments = ast.arguments(**{**vars(node.args), "args": node.args.args[1:]})
    return f"({ast.unparse(arguments)}) -> {result}"


def assigned(cls: type, init: ast.FunctionDef, known: dict[str, str]) -> dict[str, str]:
    """Attribute -> type: the known ones, and those that ``__init__`` assigns, annotated or from an argument or an
    object of a class."""
    arguments = {argument.arg: ast.unparse(argument.annotation) for argument in init.args.args if argument.annotation}
    types = dict(known)
    for node in ast.walk(init):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            types[node.target.attr] = ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            for name, found in pairs:
                if isinstance(name, ast.Attribute) and not name.attr.startswith("_") and name.attr not in types:
                    types[name.attr] = type_of(cls, found, arguments)
    return types


def type_of(cls: type, value: ast.expr, arguments: dict[str, str]) -> str:
    """The type of an expression in ``__init__``."""
    match value:
        case ast.Name(id=name) if name in arguments:
            return arguments[name]
        case ast.Call(func=ast.Name(id=name)):
            return name
        case ast.Constant(value=constant):
            return type(constant).__name__
        case ast.Compare():
            return "bool"
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if owner in arguments:
            found: Any = getattr(vars(sys.modules[cls.__module__])[arguments[owner]], attribute)
            getter = found.func if isinstance(found, cached_property) else found.fget
            return str(inspect.signature(getter).return_annotation)
    sys.exit(
        f"docs/_api.py: the type of {ast.unparse(value)!r} in {cls.__module__}.{cls.__name__} is not known. Annotate "
        "the attribute."
    )
