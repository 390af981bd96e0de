"""The codes of errors and warnings, each with a message, as the sources have them."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import fastloop
from fastloop import errors
from fastloop.problem import Problem, counted

CHECKOUT = Path(fastloop.__file__).parents[2]
FOLDERS = ("core", "plugins", "packages")
"""Folders of the sources, the most general messages first."""
MOST_FILES = 4
"""Number of files that an entry lists. A code with more of them, such as ``wrong-type``, is a general one."""
VALUE = re.compile(r"\{[^{}]*\}")
FIELDS = ("code", "place", "found", "expected", "remedy", "command")


@dataclass(frozen=True)
class Message:
    """A message in the sources.

    Attributes:
        file: Its file, below the folder of the code.
        problem: Its fields. Values that are known in a run are names in braces: ``{where}``.
    """

    file: str
    problem: Problem


def messages() -> list[Message]:
    """The messages with a code, in the order of files and lines."""
    found = []
    for file, call in calls():
        problem = problem_of(call)
        if problem is not None:
            found.append(Message(file, problem))
    return found


def calls() -> list[tuple[str, ast.Call]]:
    """The calls in the sources, each with its file, in the order of files and lines. Tests have no messages."""
    paths = []
    for folder in FOLDERS:
        paths += sorted((CHECKOUT / folder).rglob("*.py"))
    found = []
    for path in paths:
        file = path.relative_to(CHECKOUT).as_posix()
        if "/tests/" in file:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        in_file = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        in_file.sort(key=lambda call: call.lineno)
        found += [(file, call) for call in in_file]
    return found


def problem_of(call: ast.Call) -> Problem | None:
    """The problem that a call makes; None: it has no argument ``code``, or one that is known in a run."""
    code = next((word.value for word in call.keywords if word.arg == "code"), None)
    if not isinstance(code, ast.Constant):
        return None
    fields = {word.arg: show(word.value) for word in call.keywords if word.arg in FIELDS}
    texts = list(call.args)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "error":  # of a plugin: the key comes first
        fields["place"] = f"{{where}}.{show(texts[0])}"
        texts = texts[1:]
    text = show(texts[0]) if texts else ""
    return Problem(text, **fields)


def show(node: ast.expr) -> str:
    """A value as text, such as ``{name}`` for a variable and for ``repr(self.name)``."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(show(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return show(node.value)
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("str", "repr"):
        return show(node.args[0])
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "did_you_mean":
        return "Did you mean ...?"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("counted", "agree"):
        return show_plural(node)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "counted_of":
        number, total, nouns = map(show, node.args)
        return f"{number} of {total} {nouns}"
    if isinstance(node, ast.Name | ast.Attribute):
        return f"{{{ast.unparse(node).rpartition('.')[2]}}}"
    return "{...}"


def show_plural(call: ast.Call) -> str:
    """A call of ``counted`` or ``agree`` with a number that is known in a run: ``{rows} steps`` or ``are``."""
    values = [argument.value for argument in call.args[1:] if isinstance(argument, ast.Constant)]
    words = [str(value) for value in values]
    if ast.unparse(call.func) == "agree":
        return words[-1]
    plural = counted(2, *words).removeprefix("2 ")
    return f"{show(call.args[0])} {plural}"


def count_words(problem: Problem) -> int:
    """The number of words outside of braces."""
    return len(VALUE.sub("", str(problem)).split())


def class_codes() -> dict[str, Problem]:
    """The codes of errors that are raised without one, as other packages may do, with the meaning of the class."""
    problems = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.FastloopError):
            meaning, _, _ = inspect.getdoc(kind).partition(". ")
            problems[kind.code] = Problem(f"{meaning.removesuffix('.')}.", code=kind.code)
    return problems


def code_list() -> str:
    """Each code with an example of its messages, and the files with its messages."""
    messages_of: dict[str, list[Message]] = {}
    files: dict[str, list[str]] = {}
    for message in messages():
        code = message.problem.code
        messages_of.setdefault(code, []).append(message)
        files.setdefault(code, [])
        if message.file not in files[code]:
            files[code].append(message.file)
    examples = class_codes()
    for code, candidates in messages_of.items():
        examples[code] = choose_example(candidates)
    lines = []
    for code in sorted(examples):
        text = " ".join(str(examples[code]).split())
        lines.append(f"- `{code}`{list_files(files.get(code, []))}\n\n        {text}\n")
    return "\n".join(lines)


def choose_example(candidates: list[Message]) -> Problem:
    """The message with the most words of its own, among those of the most general place: the modules of
    ``core/fastloop`` stand before the folders in it, and these before plugins, tools and packages. So the example of
    ``unknown-option`` is the message for any option, not that of one plugin."""
    most_general = min(generality(message.file) for message in candidates)
    general = [message.problem for message in candidates if generality(message.file) == most_general]
    return max(general, key=count_words)


def generality(file: str) -> tuple[int, int]:
    """The position of a file by generality, lower for more general ones: ``core/fastloop/options.py`` has (0, 2), and
    ``plugins/fastloop_plugins/models/hub.py`` has (1, 3)."""
    folders = file.split("/")[:-1]
    return FOLDERS.index(folders[0]), len(folders)


def list_files(files: list[str]) -> str:
    """The files with messages of a code, to follow the code. Empty without a file."""
    if not files:
        return ""
    listed = ", ".join(f"`{file}`" for file in files[:MOST_FILES])
    further = len(files) - MOST_FILES
    if further > 0:
        listed += f" and {counted(further, 'other file')}"
    return f", in {listed}"
