"""Read YAML as plain data: mappings, lists, text and numbers, without tags, equal keys or expanding aliases.

YAML 1.1 reads some unquoted words as a value that its writer did not spell: ``no`` is false, ``007`` is 7 by way of
octal digits, and ``12:30`` is 750. ``load`` refuses such keys and numbers, and names the quoted form. Everything that
fastloop reads as YAML goes through ``load``: recipes, overrides, and the configs that `fastloop import` converts.

The first checks process the parser's events before any object is created, so nesting needs no stack, and aliases no
memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop.problem import clause

if TYPE_CHECKING:
    import yaml

MAX_DEPTH = 32
"""Maximum levels of nesting."""
MAX_VALUES = 10_000
"""Maximum number of values in a file, with expanded aliases."""
PREFIX = "tag:yaml.org,2002:"
TAGS = tuple(f"{PREFIX}{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map"))
FLOAT = re.compile(
    r"""(?:
      [-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?   # 1.5, 1., 1.5e-3
    | [-+]?[0-9][0-9_]*[eE][-+]?[0-9]+               # 1e-3, which is text in YAML 1.1
    | [-+]?\.[0-9][0-9_]*([eE][-+]?[0-9]+)?          # .5
    | [-+]?[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*      # 1:30.5, a number of base 60
    | [-+]?\.(inf|Inf|INF)
    | \.(nan|NaN|NAN)
    )\Z""",
    re.VERBOSE,
)
"""Text that is read as a float. Writers of YAML must quote it."""
FIRST_OF_FLOAT = list("-+.0123456789")
LEADING_ZERO = re.compile(r"[-+]?0[0-9_]")
GROUPED = re.compile(r"[-+]?([0-9]{1,3}(_[0-9]{3})+(\.[0-9]*)?([eE][-+]?[0-9]+)?|0[xb][0-9a-fA-F]+(_[0-9a-fA-F]+)*)")
"""A number with ``_`` between thousands, or anywhere between hexadecimal or binary digits: 10_000.5, 0b1010_1010."""


@dataclass
class _Collection:
    """A list or mapping that is not closed yet."""

    anchor: str | None
    count_before: int  # values of the file before it


def load(text: str, where: str, *, in_shell: bool = False) -> Any:
    """Load a value. ``1e-4`` is a number, a date is text, and ``${...}`` is kept.

    Args:
        where: The file or the override, for messages.
        in_shell: The text is a word of a command line, whose shell removes quotes.

    Raises:
        RecipeError: The text is not YAML, or not plain data, or YAML reads a part of it in another way than it is
            spelled; names the line.
    """
    import yaml

    try:
        _check_events(text, where, in_shell)
        loader = _loader_class()(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _Spelling(loader, where, in_shell).check(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = _place(where, mark.line, in_shell) if mark else where
        problem = getattr(error, "problem", None) or clause(error)
        remedy = ""
        if in_shell and (text.count("[") > text.count("]") or text.count("{") > text.count("}")):
            remedy = "The shell may have split this argument at a space: put it in quotes."
        raise RecipeError(f"not valid YAML: {problem}.", code="invalid-yaml", place=place, remedy=remedy) from None


def _place(where: str, line: int, in_shell: bool) -> str:
    """A line, counted from 0, for messages. The text of an override is one word, without lines."""
    return where if in_shell else f"{where}, line {line + 1}"


@cache
def _loader_class() -> type[yaml.SafeLoader]:
    """PyYAML's loader, which also reads ``1e-3`` as a number, and a date and a lone ``=`` as text."""
    import yaml

    base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class RecipeYamlLoader(base):  # type: ignore[valid-type, misc]
        """PyYAML's loader with resolvers of its own."""

    replaced = [f"{PREFIX}{kind}" for kind in ("float", "timestamp", "value")]
    kept: dict[str, Any] = {}  # first character of a value -> its tags and patterns
    for first, resolvers in base.yaml_implicit_resolvers.items():
        kept[first] = [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
    RecipeYamlLoader.yaml_implicit_resolvers = kept
    RecipeYamlLoader.add_implicit_resolver(f"{PREFIX}float", FLOAT, FIRST_OF_FLOAT)
    return RecipeYamlLoader


def _check_events(text: str, where: str, in_shell: bool) -> None:
    """Check the size of a text, and that it has no tag of an object.

    Raises:
        RecipeError: It has too many levels, too many values, or such a tag.
        yaml.YAMLError: It is not YAML.
    """
    import yaml

    sizes: dict[str, int] = {}  # anchor -> values of its list or mapping
    open_collections: list[_Collection] = []
    count = 0
    event: Any
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        place = _place(where, event.start_mark.line, in_shell)
        if isinstance(event, yaml.CollectionEndEvent):
            ended = open_collections.pop()
            if ended.anchor:
                sizes[ended.anchor] = count - ended.count_before + 1
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        count += sizes.get(str(event.anchor), 1) if isinstance(event, yaml.AliasEvent) else 1
        if count > MAX_VALUES:
            raise RecipeError(
                f"more than {MAX_VALUES:,} values, with expanded aliases.",
                code="too-large",
                place=place,
                remedy="Write ${key} for another key's value.",
            )
        if isinstance(event, yaml.AliasEvent) and any(event.anchor == outer.anchor for outer in open_collections):
            raise RecipeError(
                f"*{event.anchor} is recursive: it stands for a part that it is in itself.",
                code="recursive-alias",
                place=place,
            )
        tag = getattr(event, "tag", None)
        if tag and tag not in TAGS:
            tag = tag.replace(PREFIX, "!!")
            raise RecipeError(
                f"found the tag {tag}. A recipe contains only text, numbers, lists and mappings.",
                code="yaml-tag",
                place=place,
            )
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append(_Collection(event.anchor, count))
            if len(open_collections) > MAX_DEPTH:
                raise RecipeError(f"nested deeper than {MAX_DEPTH} levels.", code="too-deep", place=place)
        elif isinstance(event, yaml.ScalarEvent) and event.anchor:
            sizes[event.anchor] = 1


@dataclass
class _Spelling:
    """Finds keys and numbers that YAML reads in another way than they are spelled."""

    loader: yaml.SafeLoader
    where: str
    in_shell: bool
    checked: set[int] = field(default_factory=set)
    """Ids of the nodes that were checked: an alias has the node of its anchor."""

    def check(self, node: yaml.Node) -> None:
        """Check a node and everything in it.

        Raises:
            RecipeError: A key is a boolean or null, keys are equal, or a number has another spelling than its value.
        """
        import yaml

        if id(node) in self.checked:
            return
        self.checked.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            for key, value in node.value:
                self.check(key)
                self.check(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.check(item)
        elif isinstance(node, yaml.ScalarNode) and node.tag in (f"{PREFIX}int", f"{PREFIX}float"):
            self._check_number(node)

    def _check_keys(self, mapping: yaml.MappingNode) -> None:
        import yaml

        earlier: dict[str, yaml.ScalarNode] = {}
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{PREFIX}merge":
                continue
            if key.tag in (f"{PREFIX}bool", f"{PREFIX}null"):
                kind = key.tag.removeprefix(PREFIX).replace("bool", "a boolean")
                raise RecipeError(
                    f"YAML reads the key {key.value} as {kind}. {self._quote(key)}",
                    code="ambiguous-yaml",
                    place=self._place(key),
                )
            read = _key_text(self.loader.construct_object(key))
            if read in earlier:
                first = earlier[read]
                line = first.start_mark.line + 1
                if first.value == key.value:
                    problem = f"the key {key.value!r} appears twice, first in line {line}"
                else:
                    problem = f"the keys {first.value} (line {line}) and {key.value} are the same key, {read}"
                raise RecipeError(f"{problem}.", code="repeated-key", place=self._place(key), remedy="Remove one.")
            earlier[read] = key

    def _check_number(self, node: yaml.ScalarNode) -> None:
        text = node.value
        read = self.loader.construct_object(node)
        remedy = f" For the number, write {read}."
        if LEADING_ZERO.match(text):
            kind = "a number with a leading zero"
            remedy = " For the number, leave out the zero in front."
        elif ":" in text:
            kind = "a number of base 60"
        elif "_" in text and not GROUPED.fullmatch(text):
            kind = "one number"
        elif isinstance(read, float) and math.isinf(read) and "inf" not in text.lower():
            kind = "a number that is too large"
            remedy = ""
        else:
            return
        raise RecipeError(
            f"YAML reads {text} as {kind}: {read}. {self._quote(node)}{remedy}",
            code="ambiguous-yaml",
            place=self._place(node),
        )

    def _place(self, node: yaml.Node) -> str:
        return _place(self.where, node.start_mark.line, self.in_shell)

    def _quote(self, node: yaml.ScalarNode) -> str:
        """The sentence that names the quoted form."""
        quoted = "'" + node.value.replace("'", "''") + "'"
        shell = " with these quotes, so quote them for the shell, too" if self.in_shell else ""
        return f"For the text, write {quoted}{shell}."


def check_keys(tree: Mapping[Any, Any], where: str, path: str = "") -> None:
    """Check the keys of a mapping that was made in Python, and of those in it, as ``load`` does.

    Args:
        where: The recipe, for messages.
        path: The place of the mapping in it, such as ``data.label_map``.

    Raises:
        RecipeError: A key is not text or a number, or keys have the same text; names the mapping.
    """
    place = f"{where}: {path}" if path else where
    earlier: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(key, bool) or not isinstance(key, str | int | float):
            word = str(key).lower() if isinstance(key, bool) else str(key)
            raise RecipeError(
                code="wrong-type", place=place, found=f"the key {key!r}", expected=f"text or a number, such as {word!r}"
            )
        text = _key_text(key)
        if text in earlier:
            raise RecipeError(
                f"the keys {earlier[text]!r} and {key!r} are the same key, {text}.",
                code="repeated-key",
                place=place,
                remedy="Remove one.",
            )
        earlier[text] = key
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Mapping):
                check_keys(item, where, f"{path}.{key}" if path else text)


def _key_text(key: Any) -> str:
    """A key as text, by which keys are compared: 1, 1.0, 0x1 and '1' are ``1``. Options and labels have text as
    keys."""
    if isinstance(key, float) and key.is_integer():
        key = int(key)
    return str(key)
