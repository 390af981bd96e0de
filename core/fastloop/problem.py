"""Problem: the fields of an error or a warning, and the text that a user reads. The text is made only here.

An error has one: ``RecipeError("is listed twice.", code="listed-twice", place="recipe.yaml: plugins.ema").problem``.
A warning is one: ``log.warning(Problem("is damaged.", code="damaged-cache", place="cache/rows"))``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

LINE = re.compile(r"^(?P<file>.+?), (?:line|row) (?P<line>\d[\d,]*)")
"""A place in a file: ``train.csv, line 3``, but not ``train.csv``."""
KEY = re.compile(r"^(?P<file>(?:recipe|.+\.ya?ml)): (?P<key>[\w.\[\]/-]+)")
"""A place in a recipe: ``recipe.yaml: train.lr``, but not ``train.csv: text``."""
VALUE = r"""'[^']*'|"[^"]*"|\{[^{}`]*\}|\[(?:[^\[\]`]|\[[^\[\]`]*\])*\]|[^\s`]*[^\s`.,:;)]"""
"""A value in an override: in quotes, ``{'+': pos}``, ``[text, label]``, or a word without the end of the sentence:
``1e-3``, but not ``1e-3.``."""
SETTING = r"(?:output|(?:data|model|plugins|train)(?:\.[\w-]+)+)="
"""The key of an override: ``output=`` or ``data.label=``, but not ``label=``."""
UNQUOTED = (
    rf"(?<![\w.(`'\"-])(?P<unquoted>{SETTING}(?:{VALUE}))"
    r"|(?<![\w`-])(?P<option>--(?:with|without|split) [\w,./:-]*\w)"
)
"""An override, or an option that takes a name: in ``Set train.lr=1e-3.`` and in ``Add --with ema.``, but not in ``Add
--resume.``

An override just behind a parenthesis only names a setting: ``expected a number (data.label_type=number)``."""
IN_FACTS = re.compile(UNQUOTED)
"""A part of an explanation that a user can type: ``UNQUOTED``, but nothing between backquotes."""
IN_REMEDY = re.compile(rf"{UNQUOTED}|`(?P<typed>--[^`]+|[\w.-]+=[^`]*|\w+ (?!=)[^`]+)`|`[^`]*`")
"""A part of a remedy that a user can type. Options and commands are between backquotes: ``Run `fastloop plugins`.``
Names may be, too: a match of ```ema``` has no group."""
OVERRIDE = re.compile(rf"{UNQUOTED}|(?<=`)(?P<backquoted>{SETTING}[^`]*)(?=`)")
"""An override in a message, or an option that takes a name. An override between backquotes is one:
```data.label=[A, B]```, but a command is none: ```fastloop train a.yaml data.label=A```."""
SHELL_WORD = re.compile(r"(?:[\w@%+=:,./-]|\{\w*\})+")
"""A word that bash leaves as it is: ``train.lr=1e-3``. ``{}`` is one, and so is ``{name}``, which stands for a value in
the list of messages; ``{a,b}`` is not."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: ``1 step``, ``2 steps``, ``1,200 steps``.

    Args:
        noun: In the singular.
        plural: The plural, if it is not the noun with an ``s``, or ``es`` after an ``s``.
    """
    if number == 1:
        return f"1 {noun}"
    if not plural:
        plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {plural}"


def counted_of(number: int, total: int, nouns: str) -> str:
    """A number of a total, and the noun of the total: ``1 of 1 row``, ``1 of 9 rows``.

    Args:
        nouns: In the plural, which has an ``s``.
    """
    noun = nouns.removesuffix("s") if total == 1 else nouns
    return f"{number} of {total} {noun}"


def agree(number: int, singular: str, plural: str) -> str:
    """The word that agrees with a number, such as ``is`` for 1, else ``are``.

    ``f"{counted_of(count, total, 'rows')} {agree(count, 'is', 'are')} left out"`` gives ``1 of 9 rows is left out``.
    """
    return singular if number == 1 else plural


def join_names(names: Sequence[str]) -> str:
    """Names as a part of a sentence: ``a``, ``a and b``, ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def clause(error: BaseException) -> str:
    """The message of an error as a part of a sentence: its first line, without a full stop. An error without a message
    is named by its class.

    An example::

        RecipeError(f"cannot be read: {clause(error)}.", code="file-unreadable", place=str(path))

    A first line that ends with a colon is joined with the next one, as torch writes "Error(s) in loading state_dict for
    Linear:" above the keys.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    message = lines[0]
    if message.endswith(":") and len(lines) > 1:
        message = f"{message} {lines[1]}"
    return message.rstrip(" .:") or type(error).__name__


def typed_clause(error: BaseException) -> str:
    """The class of an error and its message as a part of a sentence: ``ValueError: no such device``. See ``clause``."""
    name = type(error).__name__
    message = clause(error)
    return name if message == name else f"{name}: {message}"


def shell_word(text: str) -> str:
    """An override as a word of a command line, in quotes if the shell would change it: ``train.lr=1e-3``, but
    ``'data.label=[A, B]'``. Double quotes hold single ones: ``"data.label_map={'a b': a}"``."""
    if SHELL_WORD.fullmatch(text):
        return text
    if "'" in text and not re.search(r'["$`\\!]', text):
        return f'"{text}"'
    return shlex.quote(text)


def quote_overrides(sentences: str) -> str:
    """Sentences whose overrides can be copied to a command line. See ``shell_word``."""

    def quote(match: re.Match[str]) -> str:
        override = match["unquoted"] or match["backquoted"]
        return shell_word(override) if override else match[0]

    return OVERRIDE.sub(quote, sentences)


class Fields(TypedDict, total=False):
    """The fields of a ``Problem`` beside its text, as keyword arguments."""

    code: str
    place: str
    found: str
    expected: str
    remedy: str
    command: str


@dataclass(frozen=True)
class Problem:
    """The fields of an error or a warning.

    ``str(problem)`` is the text: ``PLACE: TEXT Found FOUND, expected EXPECTED. REMEDY COMMAND``.

    Attributes:
        text: Whole sentences about the problem. It may be empty if ``found`` or ``expected`` is given.
        code: The kind of problem, in lower case with hyphens: ``unknown-option``. It does not change between releases,
            so programs and tests compare it.
        place: Where the problem is: ``recipe.yaml: train.lr``, ``train.csv, line 3``, ``--resume runs/a``.
        found: The value that was found, without a full stop.
        expected: The values that are possible, without a full stop.
        remedy: Sentences about the change that solves the problem. An override in them, such as
            ``data.label_type=class``, works as it is, and so do options with a name, ``--with ema``, and commands
            between backquotes: "Run `fastloop plugins`." The text puts an override in quotes where the shell needs
            them: ``'data.label=[A, B]'``.
        command: A command that the remedy introduces, such as "Install it:". It ends the text, without a full stop, so
            that it can be copied.
    """

    text: str = ""
    code: str = ""
    place: str = ""
    found: str = ""
    expected: str = ""
    remedy: str = ""
    command: str = ""

    def __str__(self) -> str:
        facts = []
        if self.found:
            facts.append(f"found {self.found}")
        if self.expected:
            facts.append(f"expected {quote_overrides(self.expected)}")
        sentence = ", ".join(facts)
        if sentence:
            sentence += "."
        if self.text:
            sentence = sentence[:1].upper() + sentence[1:]
        text = quote_overrides(self.text.strip())
        parts = [text, sentence, quote_overrides(self.remedy.strip()), self.command]
        body = " ".join(part for part in parts if part)
        return f"{self.place}: {body}" if self.place else body

    @property
    def proposals(self) -> list[str]:
        """The overrides, options and commands of the message. An override has no quotes for the shell."""
        matches = [*IN_FACTS.finditer(f"{self.text} {self.expected}"), *IN_REMEDY.finditer(self.remedy)]
        proposals = []
        for match in matches:
            proposals += [part for part in match.groups() if part]
        if self.command:
            proposals.append(self.command)
        return proposals

    def to_json(self) -> dict[str, Any]:
        """The fields for programs. ``message`` is the whole text; ``file``, ``key`` and ``line`` are parts of the
        place, or None."""
        in_file = LINE.match(self.place)
        in_recipe = KEY.match(self.place)
        either = in_file or in_recipe
        return {
            "code": self.code,
            "message": str(self),
            "place": self.place,
            "file": either["file"] if either else None,
            "key": in_recipe["key"] if in_recipe else None,
            "line": int(in_file["line"].replace(",", "")) if in_file else None,
            "text": self.text,
            "found": self.found,
            "expected": self.expected,
            "remedy": self.remedy,
            "command": self.command,
            "proposals": self.proposals,
        }


def with_remedy(problem: Problem, remedy: str) -> Problem:
    """A problem with a remedy after its own one. The text ends with a full stop."""
    text = problem.text
    if not problem.remedy and text and not text.endswith("."):
        text = f"{text}."
    remedies = f"{problem.remedy} {remedy}".strip()
    return replace(problem, text=text, remedy=remedies)
